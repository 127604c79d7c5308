"""The Lua scripts: one file for each atomic step, together one library of Redis functions.

A script file is the body of one function over `KEYS[1]`, the books, and `ARGV`. What scripts share
is in `lua/lib` and runs once, when the library is loaded: in scripts evaluated one by one, setting
it up would cost more than the step itself. Redis keeps a library with the data and gives it to
replicas; where it is missing (a new server, a flush, a failover that was quicker), the pipeline
loads it again.

The library's name, and that of each function, carries a digest of the text. So coordinators of
different versions share one Redis, each with its own library, and a function that exists is the
one that was meant. A coordinator that starts deletes none: each sweep announces the version that
runs it, and one that has not been announced for ten minutes is deleted by who notices.

Names are checked when the library is put together, not when it runs: `KEY.x` becomes a key of
`keys.KEYS`, `STATE.x` and `EVENT.x` must be words of the lease machine, `KIND.x` an event kind,
`CONST.x` a number below. The lease's transition table is written into the library from
`aqua_protocol.LEASE`, so Lua follows the same table as Python and cannot disagree with it.

Redis refuses a function as a whole when memory or disk is full, unless it is flagged `no-writes`.
It never fails at its first write that needs memory, with earlier deletions already done.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Final

from aqua_coordinator.store.keys import KEYS
from aqua_protocol import TransportKind
from aqua_protocol.ids import MAX_EPOCH, MAX_NAME_LENGTH
from aqua_protocol.lease import BOOKED_STATES, LEASE, LeaseEvent, LeaseState
from aqua_protocol.leases import EventKind
from aqua_protocol.members import MAX_LEASES_PER_MEMBER, MAX_RECLAIMS_PER_REPORT
from aqua_protocol.units import MAX_BYTES

SWEEP_PERIOD_S: Final = 0.5
"""How often a coordinator sweeps: far below any time to live, so expiry is late by little. Doubled,
expiry is up to a second late, and the sweep costs half."""
MAX_GAP_S: Final = 6 * SWEEP_PERIOD_S
"""Without a sweep for this long, no coordinator was there to take reports, and the books' clock
stops. Doubled, members may age for 6 s without one."""
REPORT_SPACING_S: Final = 0.006
"""Of two reports to the books: each takes 0.3 to 0.7 ms of a core (docs/measurements/scale.md).
Doubled, heartbeats of many members are twice as far apart, and their loss is noticed as much later.
"""
HEARTBEATS_MISSED: Final = 3
"""Heartbeats that a silent member may miss, and a lease of it. Doubled, both stay twice as long in
a cluster so large that heartbeats are stretched."""

CONSTANTS: Final[Mapping[str, float | str]] = {
    "initial_state": f"'{LEASE.initial}'",
    "max_gap_us": int(MAX_GAP_S * 1e6),
    "sweep_period_us": int(SWEEP_PERIOD_S * 1e6),
    "report_spacing_us": int(REPORT_SPACING_S * 1e6),
    "heartbeats_missed": HEARTBEATS_MISSED,
    # 10,000 members; the longest heartbeat that settings allow. Connections outlive it.
    "max_spread_us": 60_000_000,
    # Who was told of long heartbeats before others left has 27 of 30 parts of the silence allowed.
    "spread_decay": 30,
    # Kubernetes' threshold for a zone whose nodes are gone together; with two nodes or more it is
    # never reached by one of them.
    "silent_share": 0.55,
    # Below, most of them may be one process group, or one node.
    "few_members": 10,
    # Two sweeps: every coordinator has been heard.
    "reason_lasts_us": int(2 * SWEEP_PERIOD_S * 1e6),
    # A minute of one change a millisecond; an SSE client that fell further behind starts anew.
    "max_events": 65_536,
    # Reclaims that the console can look back on, a kilobyte for four: an hour of one a second.
    "max_reclaim_history": 4096,
    # Sums of all members, for the console: an hour and some, of one every ten seconds.
    "sample_us": 10_000_000,
    "max_samples": 400,
    # How long an ended lease still answers a late release, renewal or `GET`, and a report that
    # crossed its end. At a thousand leases a second it is 120,000 records of 300 bytes.
    "ended_retention_ms": 120_000,
    # Clients retry within seconds.
    "idempotency_ttl_ms": 60_000,
    # The default time to live of a lease request: an adopted lease's own is lost with the books.
    "adopted_ttl_us": 30_000_000,
    # How long a consumer may name an unknown lease: its producer reports within a heartbeat, and
    # is given up after the silence that settings allow.
    "claim_patience_us": 30_000_000,
    # Unknown leases that a report may name and wait for: 10 KiB a consumer. The books adopt as many
    # of a producer in one report, about 10 ms of Redis time; the others are its own until the next.
    "max_claims": 256,
    "max_adoptions": 256,
    # How long a consumer gets no lease of a producer that refused it, or where nothing answered,
    # the first time: until the next report, or as long as a silent producer stays in the books.
    "unusable_us": 1_000_000,
    "unreachable_us": 10_000_000,
    # And at last. Doubled, a producer that never works for a consumer is tried half as often.
    "max_failure_us": 160_000_000,
    # Remembered in one record, 5 kB. Doubled, one that lends under as many false names as it likes
    # can lead a consumer astray for twice as long.
    "max_failures": 64,
    # One more, and one more caller has to be wrong, or to lie.
    "suspicion_voices": 3,
    # Producers looked at for one grant: half a millisecond, if none of them meets the terms.
    "max_candidates": 256,
    "max_leases_per_member": MAX_LEASES_PER_MEMBER,
    "max_open_reclaims": MAX_RECLAIMS_PER_REPORT,
    "max_retired_incarnations": 8,
    # Kilobytes each, and read all at once by a listing.
    "max_profiles": 1000,
    # A version that no coordinator has announced for ten minutes is gone; if not, it loads its own.
    "library_retention_us": 600_000_000,
    # Twenty sweeps, in which every coordinator has announced its own.
    "library_settling_us": 10_000_000,
    # Of the books: those that this version reads. Records of the next differ by a trailing field.
    "min_schema": 1,
    "max_schema": 1,
    "max_name_length": MAX_NAME_LENGTH,
    # Of epochs and times that a record may have, in the year 2112: what follows them fits the wire.
    # Doubled, a record with the last epoch of the wire would make answers that cannot be read.
    "max_epoch": MAX_EPOCH // 2,
    "max_bytes": MAX_BYTES,
    # Records set aside that can be listed; a day of one a minute.
    "max_quarantined": 1440,
    # Of such a record: a lease has 300 bytes at most.
    "max_quarantined_bytes": 512,
    # Producers that a grant tries when the list of free bytes is wrong; the audit mends the rest.
    "max_wrong_listings": 8,
    # How long a cohort leaves to an owner what it has asked back: a producer's heartbeat and the
    # deadline of a reclaim, both by default, and some. Doubled, others borrow again as much later.
    "owner_waits_us": 10_000_000,
    # Between two looks for what may be asked back for one tenant, some milliseconds each. Doubled,
    # its second consumer waits as long.
    "owner_rests_us": 500_000,
    # Records that one listing call looks at, so that a narrow filter does not stall Redis.
    "max_scan": 1000,
}

RIGHTFUL_STATES: Final = frozenset(s for s in LeaseState if LEASE.allows(s, LeaseEvent.RENEW))
"""States in which a lease's holder has a right that a clock can end."""

PARTS: Final = (
    *("quarantine", "answer", "books", "writes", "lists", "tenant", "lease", "member", "reclaim"),
    *("failures", "matching", "quota", "fencing", "idempotency", "removal", "register"),
)
"""What scripts share, in an order in which each part finds what it uses."""

LIBRARY_PREFIX: Final = "aqua_books_"
_DIGEST_LENGTH: Final = 16
"""Hexadecimal digits: 64 bits tell versions apart. Doubled, each call carries 16 bytes more."""

_NAME: Final = re.compile(r"\b(KEY|STATE|EVENT|KIND|CONST)\.(\w+)")
_FLAGS: Final = re.compile(r"^-- @flags (.+)$", re.MULTILINE)

LUA: Final = resources.files("aqua_coordinator.store") / "lua"
SCRIPTS: Final = tuple(
    sorted(file.name.removesuffix(".lua") for file in LUA.iterdir() if file.name.endswith(".lua"))
)
"""The scripts, by the name of their file."""
WRITING_SCRIPTS: Final = frozenset(
    name for name in SCRIPTS if "@flags no-writes" not in (LUA / f"{name}.lua").read_text("utf-8")
)


@dataclass(frozen=True, slots=True)
class Library:
    """All scripts, as Redis gets them.

    Attributes:
        name: Begins with `LIBRARY_PREFIX`, ends with a digest of the text.
        source: Complete Lua text.
    """

    name: str
    source: str

    def function(self, script: str) -> str:
        """What `FCALL` calls; unique on a server, as Redis wants it."""
        return f"{self.name}_{script}"


@cache
def load_library() -> Library:
    """Put the library together from the package's files."""
    return assemble({name: _read(f"{name}.lua") for name in SCRIPTS})


def assemble(scripts: Mapping[str, str]) -> Library:
    """The library of these scripts: shared parts, one function for each, names filled in."""
    parts = [_read(f"lib/{part}.lua") for part in PARTS]
    text = "\n".join([*parts, *(_function(name, body) for name, body in scripts.items())])
    text = text.replace("LEASE_TRANSITIONS", lua_transitions())
    text = text.replace("LEASE_BOOKED_STATES", _lua_set(BOOKED_STATES))
    text = text.replace("LEASE_RIGHTFUL_STATES", _lua_set(RIGHTFUL_STATES))
    text = text.replace("KNOWN_TRANSPORTS", _lua_set(list(TransportKind)))
    text = _NAME.sub(_fill_in, text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
    name = f"{LIBRARY_PREFIX}{digest}"
    return Library(name, f"#!lua name={name}\n{text.replace('LIBRARY_NAME', name)}")


def _function(name: str, body: str) -> str:
    flags = _FLAGS.search(body)
    quoted = ", ".join(f"'{flag}'" for flag in flags[1].split()) if flags else ""
    return f"register('{name}', {{{quoted}}}, function(KEYS, ARGV)\n{body}\nend)"


def lua_transitions() -> str:
    """The lease's transition table as a Lua table: `'state event'` to the next state."""
    rows = (f"['{state} {event}']='{after}'" for (state, event), after in LEASE.transitions.items())
    return f"{{{','.join(rows)}}}"


def _lua_set(names: Collection[StrEnum]) -> str:
    return f"{{{','.join(f'{name}=true' for name in sorted(names))}}}"


def _fill_in(match: re.Match[str]) -> str:
    kind, name = match.groups()
    match kind:
        case "KEY":
            return f"'{KEYS[name]}'"
        case "CONST":
            return str(CONSTANTS[name])
        case "STATE":
            return f"'{LeaseState(name)}'"
        case "EVENT":
            return f"'{LeaseEvent(name)}'"
        case _:
            return f"'{EventKind(name)}'"


def _read(path: str) -> str:
    return LUA.joinpath(path).read_text("utf-8")
