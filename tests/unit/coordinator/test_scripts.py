"""The Lua scripts as text: they follow the table, and name only what exists."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import pytest

from aqua_coordinator.store.keys import KEYS, PERMANENT
from aqua_coordinator.store.scripts import (
    RIGHTFUL_STATES,
    ScriptName,
    assemble,
    load_scripts,
    lua_transitions,
)
from aqua_protocol.lease import LEASE, LeaseEvent, LeaseState

LUA = resources.files("aqua_coordinator.store") / "lua"


def rows_of(lua: str) -> dict[tuple[str, str], str]:
    """The transitions in a Lua table."""
    found = re.findall(r"\['(\w+) (\w+)'\]='(\w+)'", lua)
    return {(state, event): after for state, event, after in found}


def test_lua_has_every_transition_of_the_table_and_no_other() -> None:
    rows = rows_of(lua_transitions(list(LeaseEvent)))
    for state, event in itertools.product(LeaseState, LeaseEvent):
        expected = LEASE.transitions.get((state, event))
        assert rows.get((state.value, event.value)) == expected


@pytest.mark.parametrize("name", list(ScriptName))
def test_a_script_carries_the_transitions_of_exactly_its_events(name: ScriptName) -> None:
    text = (LUA / f"{name}.lua").read_text()
    rows = rows_of(load_scripts()[name].source)
    events = set(re.findall(r"EVENT\.(\w+)", text))
    assert {event for _, event in rows} == events


@pytest.mark.parametrize("name", list(ScriptName))
def test_a_script_says_what_it_takes_and_gives(name: ScriptName) -> None:
    header = []
    for line in (LUA / f"{name}.lua").read_text().splitlines():
        if not line.startswith("--"):
            break
        header.append(line)
    text = "\n".join(header)
    assert "-- KEYS[1]" in text
    assert "-- Result" in text
    used = set(re.findall(r"ARGV\[(\d)\]", (LUA / f"{name}.lua").read_text()))
    documented = set(re.findall(r"-- ARGV\[(\d)", text))
    assert used <= documented


@pytest.mark.parametrize("name", list(ScriptName))
def test_a_script_is_complete(name: ScriptName) -> None:
    source = load_scripts()[name].source
    assert source.startswith("#!lua")
    code = "\n".join(line.partition("--")[0] for line in source.splitlines())
    assert not re.findall(r"\b(?:KEY|STATE|EVENT|KIND|CONST)\.\w+|LEASE_[A-Z_]+", code)


def test_scripts_that_only_read_say_so_to_redis() -> None:
    for name, script in load_scripts().items():
        reads = name.startswith(("read_", "audit_"))
        assert script.source.startswith("#!lua flags=no-writes\n") == reads


def test_every_lua_file_is_a_script_or_used_by_one() -> None:
    files = {file.name.removesuffix(".lua") for file in LUA.iterdir() if file.name != "lib"}
    assert files == set(ScriptName)
    used: set[str] = set()
    for name in ScriptName:
        header = re.search(r"-- @use (.+)", (LUA / f"{name}.lua").read_text())
        assert header is not None
        used |= set(header[1].split())
    assert {file.name.removesuffix(".lua") for file in (LUA / "lib").iterdir()} == used


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
        assemble(f"-- @use answer\nreturn {line}")


def test_rightful_states_are_those_that_can_be_renewed() -> None:
    assert {LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.RECLAIMING} == RIGHTFUL_STATES


def test_keys_share_one_slot_and_permanent_ones_are_real() -> None:
    assert all(key.startswith("{aqua}:") for key in KEYS.values())
    assert len(set(KEYS.values())) == len(KEYS)
    assert PERMANENT.keys() <= KEYS.keys()
    assert KEYS.keys() - PERMANENT.keys() == {"claim", "idempotency", "probe"}
