"""Positions between steps, mappings that lack or contradict, names that the chart takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from aqua_placer.budget import Budget
from aqua_placer.errors import (
    DomainTooLargeError,
    MappingIncompleteError,
    MappingInvalidError,
    PlanInvalidError,
)
from aqua_placer.problem.families import generate
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.relocate.relocation import Relocation, relocate
from aqua_placer.rollout.kubernetes import render_plan
from aqua_placer.rollout.mapping import ClusterMapping, read_mapping
from aqua_placer.rollout.positions import Position, positions_after
from aqua_placer.solve.placement import place
from aqua_protocol.plan import Plan
from harness.changed_problems import churned

ANY = {"defaults": {"image": "registry.internal/engine:1"}}


def solved(models: list[dict[str, Any]], **server: object) -> tuple[Instance, Plan]:
    cluster = {"name": "dgx", "count": 2, "gpus": 4, "hbm_gb": 80, **server}
    instance = instance_from({"servers": [cluster], "models": models})
    return instance, place(instance, Request(), Budget(30))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_positions_go_from_todays_plan_to_the_next_and_no_gpu_is_held_twice(seed: int) -> None:
    problem = generate("tpmix", 64, seed)
    today = place(instance_from(problem), Request(), Budget(30))
    changed = churned(problem, [entry.server_index for entry in today.assignments], 0.2, seed)
    plan, _ = relocate(instance_from(changed), today, Request(), Relocation(), Budget(30))
    assert plan.moves
    assert positions_after(plan, 0) == positions_after(today)
    for step in range(len(plan.moves) + 1):
        held = [
            (position.server, gpu)
            for position in positions_after(plan, step).values()
            for gpu in position.gpus
        ]
        assert len(held) == len(set(held))
    assert positions_after(plan) == {
        entry.group: Position(entry.server, tuple(entry.gpus)) for entry in plan.assignments
    }
    with pytest.raises(PlanInvalidError, match="steps"):
        positions_after(plan, len(plan.moves) + 1)


def test_all_that_a_mapping_lacks_is_named_once_by_its_place() -> None:
    models = [{"name": "llama", "replicas": 3, "tp": 2, "need_gb": 9}, {"name": "x", "spare_gb": 9}]
    instance, plan = solved(models)
    with pytest.raises(MappingIncompleteError) as told:
        render_plan(instance, plan, ClusterMapping())
    assert told.value.details["missing"] == ["models.llama.image", "models.x.image"]
    with pytest.raises(MappingIncompleteError) as told:
        render_plan(
            instance, plan, ClusterMapping.model_validate({**ANY, "mode": "hostNamespaces"})
        )
    assert told.value.details["missing"] == [
        f"servers.dgx/{number}.{key}" for number in (0, 1) for key in ("node", "gpus")
    ]
    some = {**ANY, "servers": {"dgx/0": {"gpus": ["GPU-1", "GPU-2"]}}}
    with pytest.raises(MappingIncompleteError, match=r"dgx/0\.gpus \(it has 4"):
        render_plan(instance, plan, ClusterMapping.model_validate(some))


def test_a_group_is_found_by_its_name_then_its_model_then_a_pattern() -> None:
    mapping = ClusterMapping.model_validate(
        {
            "defaults": {"port": 1},
            "models": {
                "l*": {"image": "pattern"},
                "llama": {"image": "model", "port": 2},
                "llama.0.stage1": {"image": "group"},
            },
        }
    )
    found = {
        name: mapping.engine(name) for name in ("llama.0.stage1", "llama.0.stage0", "llm", "other")
    }
    assert [engine.image for engine in found.values()] == ["group", "model", "pattern", None]
    assert [engine.port for engine in found.values()] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"models": {"a": {"imaeg": "x"}}}, r"models\.a\.imaeg: Extra inputs"),
        ({"mode": "Dra"}, "mode: Input should be 'dra'"),
        ([], "top level"),
        ({"servers": {"a": {"node": "n"}, "b": {"node": "n"}}}, "node n is in two servers"),
        ({"servers": {"a": {"gpus": ["GPU-1"]}, "b": {"gpus": ["GPU-1"]}}}, "GPU GPU-1 is in two"),
        ({"servers": {"a": {"gpus": ["0"]}}}, "should match pattern"),
    ],
)
def test_a_mapping_that_is_none_is_refused_by_the_place(
    tmp_path: Path, content: object, said: str
) -> None:
    path = tmp_path / "mapping.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(MappingInvalidError, match=said):
        read_mapping(path)


def test_names_that_the_chart_does_not_take_become_ones_that_it_takes_the_same_every_time() -> None:
    names = ["Llama_3.1-70B-Instruct", "llama_3.1-70b-instruct", "9lives", "ok", "sd-xl.turbo"]
    instance, plan = solved([{"name": name, "spare_gb": 5} for name in names])
    mapping = ClusterMapping.model_validate(ANY)
    first, second = (render_plan(instance, plan, mapping).values["servers"] for _ in range(2))
    assert first == second
    engines = {
        engine["env"][0]["value"]: key
        for server in first.values()
        for key, engine in server["engines"].items()
    }
    assert set(engines) == set(names)
    assert engines["ok"] == "ok"
    for key in engines.values():
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,9}[a-z0-9])?", key)
    clashing = solved([{"name": "a-b", "spare_gb": 5}, {"name": "a.b", "spare_gb": 5}], count=1)
    with pytest.raises(MappingInvalidError, match="would both be called 'a-b'"):
        render_plan(*clashing, mapping)


def test_a_rack_is_more_than_one_claim_holds_and_the_remedy_says_what_to_do() -> None:
    instance, plan = solved([{"name": "a", "spare_gb": 5}], gpus=72)
    with pytest.raises(DomainTooLargeError, match="72 GPUs") as told:
        render_plan(instance, plan, ClusterMapping.model_validate(ANY))
    assert "each node a server" in told.value.remedy


def test_what_a_mapping_says_of_an_engine_wins_over_the_plan() -> None:
    instance, plan = solved([{"name": "a", "need_gb": 5}, {"name": "b", "memory_gb": 0}])
    env = [{"name": "AQUA_WANTED_BYTES", "value": "1GiB"}]
    mapping = ClusterMapping.model_validate({**ANY, "models": {"a": {"env": env}}})
    servers = render_plan(instance, plan, mapping).values["servers"].values()
    engines = {key: engine for server in servers for key, engine in server["engines"].items()}
    assert engines["a"]["env"] == [{"name": "AQUA_MEMBER", "value": "a"}, *env]
    assert (engines["a"]["role"], engines["b"]["role"]) == ("consumer", "none")
