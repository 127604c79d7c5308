"""Renders as they were read by a person: a change to one shows in the diff of a commit.

`make test-chart GOLDEN=write` writes them anew. Secrets are drawn, so their content is left out.
What an example renders to the letter as the default values do is named and stands in
`default.yaml` alone: a change to what all releases have is read once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest
import yaml

from harness.chart import EXAMPLES, Manifest, render

GOLDEN: Final = Path(__file__).parent / "golden"


def _shown(values: Manifest) -> list[Manifest]:
    """The objects of a release, without what is drawn or stands in `deploy/`."""
    manifests = render(values)
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            manifest["data"] = dict.fromkeys(sorted(manifest["data"]), "<drawn>")
        if manifest["kind"] == "PrometheusRule":
            manifest["spec"] = "<deploy/prometheus>"
    return [m for m in manifests if "-dashboard-" not in m["metadata"]["name"]]


@pytest.mark.parametrize("example", ["default", *EXAMPLES])
def test_a_render_is_the_one_that_was_read(example: str) -> None:
    manifests = _shown(EXAMPLES.get(example, {}))
    if example != "default":
        usual = _shown({})
        same = [f"{m['kind']}/{m['metadata']['name']}" for m in manifests if m in usual]
        manifests = [{"as in default.yaml": same}, *(m for m in manifests if m not in usual)]
    text = yaml.safe_dump_all(manifests, sort_keys=False, width=100)
    path = GOLDEN / f"{example}.yaml"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
