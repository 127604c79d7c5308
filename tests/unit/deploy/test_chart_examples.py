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
from harness.engine_values import can_borrow, flags_of
from harness.source_tree import ROOT

EXAMPLES: Final = sorted((ROOT / "helm" / "aqua" / "examples").glob("*.yaml"))


def engines() -> Iterator[tuple[str, dict[str, Any]]]:
    """All engines, each with the name of its example."""
    for path in EXAMPLES:
        values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        for server in values.get("servers", {}).values():
            for engine in server["engines"].values():
                yield path.stem, engine


def flags() -> Iterator[tuple[str, str, str]]:
    """The flags of all engines: the example, the name, the value."""
    for example, engine in engines():
        for name, value in flags_of(engine):
            yield example, name, value


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


def test_every_consumer_of_an_example_can_borrow() -> None:
    consumers = [(example, engine) for example, engine in engines() if engine["role"] == "consumer"]
    assert {example for example, _ in consumers} >= {"co-serving", "dra", "host-namespaces"}
    assert [example for example, engine in consumers if not can_borrow(engine)] == []
