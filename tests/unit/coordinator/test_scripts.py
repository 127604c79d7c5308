"""The Lua scripts as text: they follow the table, and name only what exists."""

from __future__ import annotations

import itertools
import re
import tomllib
from importlib import resources

import pytest

from aqua_coordinator.store.keys import KEYS, PERMANENT
from aqua_coordinator.store.lua_step import STEPS
from aqua_coordinator.store.scripts import (
    LIBRARY_PREFIX,
    PARTS,
    RIGHTFUL_STATES,
    SCRIPTS,
    assemble,
    load_library,
    lua_transitions,
)
from aqua_protocol.errors import ERRORS_BY_CODE
from aqua_protocol.lease import LEASE, LeaseEvent, LeaseState
from harness.source_tree import ROOT

LUA = resources.files("aqua_coordinator.store") / "lua"


def rows_of(lua: str) -> dict[tuple[str, str], str]:
    """The transitions in a Lua table."""
    found = re.findall(r"\['(\w+) (\w+)'\]='(\w+)'", lua)
    return {(state, event): after for state, event, after in found}


def test_lua_has_every_transition_of_the_table_and_no_other() -> None:
    rows = rows_of(lua_transitions())
    for state, event in itertools.product(LeaseState, LeaseEvent):
        expected = LEASE.transitions.get((state, event))
        assert rows.get((state.value, event.value)) == expected


def test_the_library_carries_the_whole_table() -> None:
    assert rows_of(load_library().source) == {
        (state.value, event.value): after.value
        for (state, event), after in LEASE.transitions.items()
    }


def header_and_body(name: str) -> tuple[str, str]:
    """The comment that opens a script, and its code without comments."""
    lines = (LUA / f"{name}.lua").read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    code = [re.sub(r"--.*", "", line) for line in lines[end:]]
    return "\n".join(lines[:end]), "\n".join(code)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_header_names_what_the_typed_function_passes(name: str) -> None:
    header, body = header_and_body(name)
    arguments = re.findall(r"^-- ARGV\[(\d)\]  (\w+)", header, re.MULTILINE)
    parameters = list(STEPS[name].parameters)[1:]
    assert arguments == [(str(number), word) for number, word in enumerate(parameters, start=1)]
    assert {number for number, _ in arguments} >= set(re.findall(r"ARGV\[(\d)\]", body))
    assert "-- Result   {'ok'" in header


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_header_names_the_shared_functions_that_the_script_calls(name: str) -> None:
    header, body = header_and_body(name)
    shared = {
        function
        for part in (LUA / "lib").iterdir()
        for function in re.findall(r"^local function (\w+)", part.read_text(), re.MULTILINE)
    }
    listed = re.search(r"^-- Calls    (.+(?:\n--          .+)*)", header, re.MULTILINE)
    calls = re.findall(r"\w+", listed[1]) if listed else []
    own = set(re.findall(r"local function (\w+)", body))
    assert set(calls) == shared & set(re.findall(r"\b(\w+)\(", body)) - own
    assert len(set(calls)) == len(calls)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_header_names_the_refusals_of_the_script(name: str) -> None:
    header, body = header_and_body(name)
    listed = re.search(r"^-- Refuses  (.+)", header, re.MULTILINE)
    codes = set(re.findall(r"\w+", listed[1])) if listed else set()
    assert set(re.findall(r"refuse\('(\w+)'", body)) <= codes <= ERRORS_BY_CODE.keys()


def test_the_library_is_complete() -> None:
    library = load_library()
    assert library.source.startswith(f"#!lua name={library.name}\n")
    code = "\n".join(line.partition("--")[0] for line in library.source.splitlines())
    assert not re.findall(r"\b(?:KEY|STATE|EVENT|KIND|CONST)\.\w+|LEASE_[A-Z_]+|LIBRARY_NAME", code)


def test_a_library_of_another_text_has_another_name() -> None:
    one, other = (assemble({"read_books": f"return {n}"}) for n in (1, 2))
    assert one.name != other.name
    assert one.name.startswith(LIBRARY_PREFIX)
    assert one.function("read_books") != other.function("read_books")


def test_scripts_that_only_read_say_so_to_redis() -> None:
    for name in SCRIPTS:
        reads = name.startswith("read_")
        assert ("-- @flags no-writes\n" in (LUA / f"{name}.lua").read_text()) == reads


def test_every_lua_file_is_a_script_or_a_part() -> None:
    files = {file.name.removesuffix(".lua") for file in LUA.iterdir() if file.name != "lib"}
    assert files == set(SCRIPTS) == STEPS.keys()
    assert {file.name.removesuffix(".lua") for file in (LUA / "lib").iterdir()} == set(PARTS)


def test_lua_keeps_to_the_line_length_of_python() -> None:
    limit = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["line-length"]
    overlong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(ROOT.glob("*/src/**/*.lua"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > limit
    ]
    assert overlong == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("KEY.nothing", KeyError),
        ("CONST.nothing", KeyError),
        ("STATE.happy", ValueError),
        ("EVENT.celebrate", ValueError),
        ("KIND.party", ValueError),
    ],
)
def test_a_name_that_does_not_exist_is_noticed_when_the_script_is_put_together(
    line: str, fault: type[Exception]
) -> None:
    with pytest.raises(fault):
        assemble({"read_books": f"return {line}"})


def test_rightful_states_are_those_that_can_be_renewed() -> None:
    assert {LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.RECLAIMING} == RIGHTFUL_STATES


def test_keys_share_one_slot_and_permanent_ones_are_real() -> None:
    assert all(key.startswith("{aqua}:") for key in KEYS.values())
    assert len(set(KEYS.values())) == len(KEYS)
    assert PERMANENT.keys() <= KEYS.keys()
    assert KEYS.keys() - PERMANENT.keys() == {"claims", "idempotency", "probe", "quota_waits"}
