"""The Lua scripts as text: they follow the table, and name only what exists."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import pytest

from aqua_coordinator.store.keys import KEYS, PERMANENT
from aqua_coordinator.store.scripts import (
    LIBRARY_PREFIX,
    PARTS,
    RIGHTFUL_STATES,
    ScriptName,
    assemble,
    load_library,
    lua_transitions,
)
from aqua_protocol.lease import LEASE, LeaseEvent, LeaseState

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


def test_the_library_is_complete() -> None:
    library = load_library()
    assert library.source.startswith(f"#!lua name={library.name}\n")
    code = "\n".join(line.partition("--")[0] for line in library.source.splitlines())
    assert not re.findall(r"\b(?:KEY|STATE|EVENT|KIND|CONST)\.\w+|LEASE_[A-Z_]+|LIBRARY_NAME", code)


def test_a_library_of_another_text_has_another_name() -> None:
    one, other = (assemble({ScriptName.READ_BOOKS: f"return {n}"}) for n in (1, 2))
    assert one.name != other.name
    assert one.name.startswith(LIBRARY_PREFIX)
    assert one.function(ScriptName.READ_BOOKS) != other.function(ScriptName.READ_BOOKS)


def test_scripts_that_only_read_say_so_to_redis() -> None:
    for name in ScriptName:
        reads = name.startswith(("read_", "audit_"))
        assert ("-- @flags no-writes\n" in (LUA / f"{name}.lua").read_text()) == reads


def test_every_lua_file_is_a_script_or_a_part() -> None:
    files = {file.name.removesuffix(".lua") for file in LUA.iterdir() if file.name != "lib"}
    assert files == set(ScriptName)
    assert {file.name.removesuffix(".lua") for file in (LUA / "lib").iterdir()} == set(PARTS)


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
        assemble({ScriptName.READ_BOOKS: f"return {line}"})


def test_rightful_states_are_those_that_can_be_renewed() -> None:
    assert {LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.RECLAIMING} == RIGHTFUL_STATES


def test_keys_share_one_slot_and_permanent_ones_are_real() -> None:
    assert all(key.startswith("{aqua}:") for key in KEYS.values())
    assert len(set(KEYS.values())) == len(KEYS)
    assert PERMANENT.keys() <= KEYS.keys()
    assert KEYS.keys() - PERMANENT.keys() == {"claim", "idempotency", "probe"}
