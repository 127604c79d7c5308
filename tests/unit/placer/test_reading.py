"""Bad input: every mistake is a typed error that names the item and the remedy."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from aqua_placer.budget import Budget
from aqua_placer.errors import PlanInvalidError, ProblemInfeasibleError, ProblemInvalidError
from aqua_placer.plan.verification import check_plan
from aqua_placer.problem.families import generate
from aqua_placer.problem.parser import instance_from, read_problem
from aqua_placer.problem.request import Request
from aqua_placer.solve.placement import place
from aqua_protocol import ConfigError

COLUMNS: dict[str, Any] = {
    "servers": [{"count": 1, "gpus": 4, "hbm_gb": 80}],
    "groups": {"name": ["a", "b"], "tp": [1, 2], "r_gb": [10.0, -5.0]},
}
MODELS: dict[str, Any] = {
    "servers": [{"name": "dgx", "count": 2, "gpus": 4, "hbm_gb": 80}],
    "models": [{"name": "llama", "replicas": 2, "need_gb": 10}],
}


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    document = copy.deepcopy(base)
    node: Any = document
    *steps, last = path.split(".")
    for step in steps:
        node = node[int(step)] if isinstance(node, list) else node[step]
    if isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value
    return document


@pytest.mark.parametrize(
    ("base", "path", "value", "names"),
    [
        (COLUMNS, "groups.r_gb.1", float("nan"), "'b'"),
        (COLUMNS, "groups.r_gb.0", float("inf"), "'a'"),
        (COLUMNS, "groups.tp.1", 8, "'b'"),
        (COLUMNS, "groups.tp.0", 0, "'a'"),
        (COLUMNS, "groups.name.1", "a", "'a'"),
        (COLUMNS, "groups.tp", [3, 2], "5 shards do not fit 4 GPUs"),
        (COLUMNS, "groups.tp", [1], "groups.tp has 1 entries"),
        (COLUMNS, "groups.weight", [1.0, 0.0], "'b'"),
        (COLUMNS, "groups.current", [0, 9], "'b'"),
        (COLUMNS, "servers.0.gpus", -4, "servers[0].gpus"),
        (COLUMNS, "servers.0.hbm_gb", -80, "servers[0].hbm_gb"),
        (COLUMNS, "servers.0.count", 0, "servers[0].count"),
        (COLUMNS, "servers", [], "servers"),
        (COLUMNS, "version", 2, "version"),
        (COLUMNS, "surprise", 1, "surprise"),
        (MODELS, "models.0.need_gb", float("nan"), "models[0] (llama).need_gb"),
        (MODELS, "models.0.spare_gb", 3, "models[0] (llama)"),
        (MODELS, "models.0.tp", 8, "'llama.0'"),
        (MODELS, "models.0.pin", ["moon"], "'llama'"),
        (MODELS, "models.0.current", ["dgx/0"], "models[0] (llama)"),
        (MODELS, "models.0.current", ["dgx/0", "dgx/7"], "'llama.1'"),
        (MODELS, "servers.0.links", [[1.0]], "servers[0] (dgx)"),
        (MODELS, "models.0.replicas", 99, "99 shards do not fit 8 GPUs"),
    ],
)
def test_nonsense_names_the_item_and_the_remedy(
    base: dict[str, Any],
    path: str,
    value: Any,  # noqa: ANN401 - JSON
    names: str,
) -> None:
    with pytest.raises(ProblemInvalidError) as caught:
        instance_from(changed(base, path, value))
    assert names in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize("document", [None, [], "text", 3, {}, {"servers": []}])
def test_what_is_no_problem_at_all_is_refused(document: Any) -> None:  # noqa: ANN401 - JSON
    with pytest.raises(ProblemInvalidError):
        instance_from(document)


def test_blocks_that_cannot_be_divided_are_infeasible_although_the_shards_fit() -> None:
    problem = {
        "servers": [{"count": 2, "gpus": 4, "hbm_gb": 80}],
        "groups": {"name": ["a", "b", "c"], "tp": [2, 3, 3], "r_gb": [1.0, 1.0, 1.0]},
    }
    with pytest.raises(ProblemInfeasibleError, match="cannot be divided"):
        place(instance_from(problem), Request(), Budget(10))


def test_a_plan_for_another_problem_is_refused() -> None:
    one, other = (instance_from(generate("ref50", 16, seed)) for seed in (0, 1))
    plan = place(one, Request(), Budget(10))
    with pytest.raises(PlanInvalidError, match="not for"):
        check_plan(other, plan)


def test_all_file_forms_mean_the_same_problem(tmp_path: Path) -> None:
    text = json.dumps(MODELS)
    (tmp_path / "p.json").write_text(text)
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(MODELS))
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(text.encode()))
    digests = {read_problem(tmp_path / f"p.{end}").digest for end in ("json", "yaml", "json.gz")}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.json", b"{"),
        ("p.json", b"\xff\xfe"),
        ("p.yaml", b"a: [1"),
        ("p.json.gz", b"not gzip"),
        ("p.json.gz", gzip.compress(b"{}", mtime=0)[:9]),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ProblemInvalidError, match=name):
        read_problem(path)


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ProblemInvalidError, match="cannot read"):
        read_problem(tmp_path / "absent.yaml")


def test_profiles_are_accepted_as_they_are(tmp_path: Path) -> None:
    profile = {
        "version": 1,
        "model": "sd-3",
        "label": "producer",
        "spare_bytes": 30_000_000_000,
        "hbm_bytes": 80_000_000_000,
        "confidence": 0.9,
        "a_later_field": {"x": 1},
    }
    (tmp_path / "sd.json").write_text(json.dumps(profile))
    document: dict[str, Any] = {
        "servers": [
            {"name": "small", "count": 1, "gpus": 1, "hbm_gb": 80},
            {"name": "large", "count": 1, "gpus": 1, "hbm_gb": 141},
        ],
        "models": [{"name": "sd", "profile": "sd.json"}, {"name": "in", "profile": profile}],
    }
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(document))
    instance = read_problem(tmp_path / "p.yaml")
    assert instance.r_gb.tolist() == [[30.0, 91.0], [30.0, 91.0]]
    document["servers"][0]["count"] = 3
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(document))
    more = read_problem(tmp_path / "p.yaml", [tmp_path / "sd.json"] * 2)
    assert more.r_gb.tolist() == [[30.0, 91.0]] * 4
    assert sum(name.startswith("sd-3") for name in more.names) == 2


def test_a_profile_given_beside_a_problem_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(MODELS))
    (tmp_path / "no.json").write_text('{"version": 1}')
    with pytest.raises(ProblemInvalidError, match="model"):
        read_problem(tmp_path / "p.yaml", [tmp_path / "no.json"])


def test_a_partial_profile_is_not_placed_by() -> None:
    profile = {"model": "m", "label": "consumer", "needed_bytes": 1, "partial": True}
    with pytest.raises(ProblemInvalidError, match="partial"):
        instance_from({**MODELS, "models": [{"name": "m", "profile": profile}]})


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_a_senseless_time_limit_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError):
        Budget(limit)


def test_no_groups_at_all_is_a_valid_problem() -> None:
    empty = {**COLUMNS, "groups": {"name": [], "tp": [], "r_gb": []}}
    instance = instance_from(empty)
    plan = place(instance, Request(), Budget(10))
    assert (plan.value, plan.proven, plan.assignments) == (0, True, [])
    assert check_plan(instance, plan).passed


@pytest.mark.parametrize(
    ("document", "says", "remedy"),
    [
        (
            {**MODELS, "models": [{"name": "a", "need_gb": 1}, {"name": "a", "need_gb": 2}]},
            "'a'",
            "`replicas",
        ),
        (changed(COLUMNS, "groups.name.1", "a"), "'a'", "`groups.name`"),
        (changed(MODELS, "models.0.tensor_parallel", 2), "tensor_parallel", "keys here are"),
        (changed(MODELS, "models.0.replica", 2), "models[0] (llama).replica", "'replicas'"),
        (changed(COLUMNS, "groups.size", [1, 2]), "groups.size", "columns of `groups`"),
        (changed(COLUMNS, "server", []), "server", "Write 'servers'"),
    ],
)
def test_a_remedy_names_the_fix_in_the_form_of_the_file(
    document: dict[str, Any], says: str, remedy: str
) -> None:
    with pytest.raises(ProblemInvalidError) as caught:
        instance_from(document)
    assert says in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("base", [COLUMNS, MODELS])
def test_descriptive_keys_are_allowed_and_mean_nothing(base: dict[str, Any]) -> None:
    noted = {**base, "family": "tpmix", "seed": 3, "comment": "from the nightly run"}
    noted["servers"] = [{**entry, "comment": "rented"} for entry in base["servers"]]
    assert instance_from(noted).digest == instance_from(base).digest


@pytest.mark.parametrize(
    ("base", "path", "value"),
    [
        (COLUMNS, "groups.weight", [1.0, 5e-324]),
        (COLUMNS, "groups.weight", [1.0, 1e300]),
        (COLUMNS, "groups.weight", [1.0, float("inf")]),
        (COLUMNS, "groups.r_gb", [1.0, 1e12]),
        (COLUMNS, "servers.0.hbm_gb", 5e-324),
        (COLUMNS, "servers.0.hbm_gb", float("inf")),
        (COLUMNS, "servers.0.links", [[float("inf")] * 4] * 4),
        (MODELS, "models.0.need_gb", float("inf")),
        (MODELS, "models.0.weight", 1e-300),
    ],
)
def test_absurd_magnitudes_are_refused(base: dict[str, Any], path: str, value: Any) -> None:  # noqa: ANN401 - JSON
    with pytest.raises(ProblemInvalidError):
        instance_from(changed(base, path, value))


@pytest.mark.parametrize("size", [2e-219, -5e-324, 1e-9, -1e-9])
def test_a_size_below_the_grain_is_nothing(size: float) -> None:
    instance = instance_from(changed(COLUMNS, "groups.r_gb", [size, -5.0]))
    assert instance.r_gb[0, 0] == 0
    plan = place(instance, Request(), Budget(10))
    assert plan.coverage_gb == 0
    assert check_plan(instance, plan).passed


@pytest.mark.parametrize("tp", [10**30, -(10**30)])
def test_a_width_beyond_all_integers_names_its_group(tp: int) -> None:
    with pytest.raises(ProblemInvalidError, match="'a'"):
        instance_from(changed(COLUMNS, "groups.tp", [tp, 2]))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", b"models: []\nmodels: []\n", "'models' is there twice"),
        ("a.yaml", b"[" * 5000, "nested too deeply"),
        ("a.yaml.gz", gzip.compress(b"models: []", mtime=0)[:10] + b"\xff" * 9, "cannot read"),
    ],
)
def test_a_file_that_is_broken_or_says_a_thing_twice_is_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProblemInvalidError, match=words):
        read_problem(tmp_path / name)
