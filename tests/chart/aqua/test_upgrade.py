"""From one version of the chart to the next, and back: by what both render.

A cluster refuses changes of some fields, and what changes in a pod's template restarts it. Helm's
rollback sends the objects of before again, so what holds in one direction holds in the other.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from harness.chart import CHART, EXAMPLES, Manifest, helm, merged, render
from harness.kubernetes_api import IMMUTABLE, at

NEXT: Final = "0.2.0"

# What one tries again by hand or by a new plan, under a new name.
RENAMED_WITH_CONTENT: Final = {"Job"}


@pytest.fixture(scope="module")
def next_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This chart under the next version's number."""
    copy = tmp_path_factory.mktemp("chart") / "aqua"
    shutil.copytree(CHART, copy)
    about = yaml.safe_load((copy / "Chart.yaml").read_text())
    assert about["version"] != NEXT
    (copy / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": NEXT, "appVersion": NEXT}))
    return copy


def rendered(chart: Path, values: Manifest, *options: str) -> dict[tuple[str, str], Manifest]:
    done = helm("template", "aqua", str(chart), "--namespace", "gpu", *options, values=values)
    assert done.returncode == 0, done.stderr
    manifests = [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}


def refused(before: dict[tuple[str, str], Manifest], after: dict[tuple[str, str], Manifest]) -> Any:  # noqa: ANN401
    """Changes that a cluster would not take."""
    return [
        f"{'/'.join(key)}: {path}"
        for key in before.keys() & after.keys()
        for path in IMMUTABLE.get(key[0], ())
        if at(before[key], path) != at(after[key], path)
    ]


@pytest.mark.parametrize("example", ["default", *EXAMPLES])
def test_the_next_version_changes_nothing_that_cannot_change_and_goes_back(
    next_chart: Path, example: str
) -> None:
    values = EXAMPLES.get(example, {})
    before, after = rendered(CHART, values), rendered(next_chart, values, "--is-upgrade")
    assert refused(before, after) == []
    assert refused(after, before) == []
    gone = {key for key in before.keys() ^ after.keys() if key[0] not in RENAMED_WITH_CONTENT}
    assert gone == set(), "an object of another name is a loss of what the first one had"


@pytest.mark.parametrize("example", ["dra", "host-namespaces"])
def test_an_upgrade_restarts_no_engine(next_chart: Path, example: str) -> None:
    before, after = (rendered(chart, EXAMPLES[example]) for chart in (CHART, next_chart))
    engines = [
        key
        for key, one in before.items()
        if key[0] == "Deployment"
        and one["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"
    ]
    assert engines
    for key in engines:
        assert before[key]["spec"]["template"] == after[key]["spec"]["template"], key
        version = after[key]["metadata"]["labels"]["app.kubernetes.io/version"]
        assert version == NEXT


def test_other_numbers_and_images_of_the_same_release_are_taken_too() -> None:
    placer = {"placer": EXAMPLES["production"]["placer"]}
    base = merged(EXAMPLES["dra"], placer, EXAMPLES["batch"])
    changes: list[Manifest] = [
        {"coordinator": {"replicas": 5}},
        {"batch": {"replicas": 1, "engines": ["http://other:8000"]}},
        {"image": {"tag": "0.2.1"}},
        {"monitoring": {"mode": "always"}},
        {"placer": {"jobs": {"nightly": {"arguments": ["--time-limit", "60"]}}}},
        {"servers": {"pair-0": {"engines": {"llm": {"image": "registry.internal/other:2"}}}}},
        {"servers": {"pair-0": {"engines": {"llm": {"gpus": 2}}}}},
    ]
    before = {(one["kind"], one["metadata"]["name"]): one for one in render(base)}
    for change in changes:
        manifests = render(merged(base, change))
        after = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
        assert refused(before, after) == [], change
