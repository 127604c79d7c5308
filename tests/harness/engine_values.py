"""Engines as values of the chart: what their flags tell aqualib."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from aqualib.engines.vllm.options import is_borrowing


def flags_of(engine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The flags of an engine: the name, the value."""
    for flag in engine["args"]:
        name, _, value = flag.partition("=")
        yield name, value


def can_borrow(engine: dict[str, Any]) -> bool:
    """Whether a vLLM with these flags asks a coordinator, and pages to what it is lent."""
    given = dict(flags_of(engine)).get("--kv-transfer-config") if "args" in engine else None
    if given is None:
        return False
    transfer = {"kv_connector_extra_config": {}, **json.loads(given)}
    return is_borrowing(
        SimpleNamespace(kv_transfer_config=SimpleNamespace(**transfer), additional_config={})
    )
