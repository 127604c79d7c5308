"""Generated problems."""

from __future__ import annotations

import pytest

from aqua_placer.problem.families import FAMILIES, generate
from aqua_placer.problem.parser import instance_from
from aqua_protocol import ConfigError
from harness.changed_problems import WEIGHTS, on_mixed_servers, weighted


@pytest.mark.parametrize("family", [*FAMILIES, "tpmix-cont"])
def test_the_same_seed_gives_the_same_problem_and_another_seed_another(family: str) -> None:
    first, again, other = (generate(family, 128, seed) for seed in (4, 4, 5))
    assert first == again
    assert first["groups"] != other["groups"]


@pytest.mark.parametrize("occupancy", [1.0, 0.9])
def test_occupancy_is_met_to_the_shard(occupancy: float) -> None:
    instance = instance_from(generate("tpscarce", 1024, 1, occupancy=occupancy))
    assert int(instance.tp.sum()) == round(1024 * occupancy)


def test_all_sizes_differ_in_the_continuous_families() -> None:
    sizes = generate("ref50-cont", 1024, 0)["groups"]["r_gb"]
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize(("family", "gpus"), [("unknown", 128), ("ref50", 100), ("ref50", 0)])
def test_senseless_requests_are_refused(family: str, gpus: int) -> None:
    with pytest.raises(ConfigError):
        generate(family, gpus, 0)


def test_servers_of_several_sizes_have_as_many_gpus_and_take_every_group() -> None:
    problem = generate("tpmix", 128, 0)
    mixed = instance_from(on_mixed_servers(problem))
    assert mixed.servers.total_gpus == 128
    assert len(set(mixed.servers.gpus.tolist())) > 1
    assert mixed.tp.tolist() == problem["groups"]["tp"]


def test_weights_are_all_drawn_and_change_nothing_else() -> None:
    problem = generate("tpmix", 128, 0)
    heavy = weighted(problem, 0)
    assert set(heavy["groups"].pop("weight")) == set(WEIGHTS)
    assert heavy["groups"] == problem["groups"]
