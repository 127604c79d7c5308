"""What the chart's examples start of aqualib is there, with options that it takes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

import aqualib.engines.vllm as for_vllm
from aqualib.engines.vllm.options import read_options
from harness.source_tree import ROOT

EXAMPLES: Final = sorted((ROOT / "helm" / "aqua" / "examples").glob("*.yaml"))


def flags() -> Iterator[tuple[str, str, str]]:
    """The flags of all engines: the example, the name, the value."""
    for path in EXAMPLES:
        values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        for server in values.get("servers", {}).values():
            for engine in server["engines"].values():
                for flag in engine["args"]:
                    name, _, value = flag.partition("=")
                    yield path.stem, name, value


def test_classes_that_examples_name_are_there() -> None:
    named = re.compile(r"aqualib\.engines\.vllm\.(\w+)")
    found = {(name, *named.findall(value)) for _, name, value in flags() if named.search(value)}
    assert {name for name, _ in found} == {"--scheduler-cls", "--worker-cls", "--middleware"}
    assert {each for _, each in found} <= set(for_vllm.__all__)


@pytest.mark.parametrize("example", ["co-serving", "dra"])
def test_options_that_examples_give_are_taken(example: str) -> None:
    (given,) = (
        json.loads(value)
        for where, name, value in flags()
        if (where, name) == (example, "--kv-transfer-config")
    )
    assert given.pop("kv_connector") in for_vllm.__all__
    options = read_options(given.pop("kv_connector_extra_config", {}))
    assert given == {"kv_role": "kv_both"}
    assert (options.co_serving is not None) == (example == "co-serving")
