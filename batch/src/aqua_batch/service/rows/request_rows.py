"""Requests as rows: waiting, leased, ended; and why each ends exactly once.

A *worker* is one life of a service: it has a row that says until when it lives, and prolongs it.
A worker *leases* waiting requests; a lease has the request's next generation. What happened is
written under the generation of its lease, in one transaction that compares it with the row's: if
the request is no longer leased in this generation, because the worker was thought dead and another
took it up, or because its batch was cancelled, the answer is late and is discarded. So a request
may run twice, but one outcome is recorded, whatever dies, hangs or comes back when.

Clocks decide only when a worker is thought dead. Workers whose clocks differ take requests up too
early or too late; the generations keep the outcome single even then.

Locks are taken in one order, so that PostgreSQL never finds two transactions that wait for each
other: a worker's row, then batches' rows by their number (`lock_batches`), then any requests of
theirs. Leasing alone takes requests without their batch, and passes over what another holds.

Some hundred rows change by one statement. With one for each row, PostgreSQL plans as often, and the
writer's thread waits as often, up to 5 ms, for the interpreter that a busy event loop holds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    case,
    delete,
    insert,
    select,
    update,
)

from aqua_batch.service.rows.number_lists import is_among
from aqua_batch.service.rows.schema import BATCHES, REQUESTS, WORKERS

EARLY_SHARE: Final = 0.1
"""Share of its window in which a batch is never late. Doubled, one that gets too little is helped
when a fifth of its time is gone."""
SAFE_SHARE: Final = 0.8
"""Share of its window in which a batch is to end at its pace so far. Doubled, none would be late
before its deadline has passed."""
LATE_SHARE: Final = 0.5
"""Share of free places that late batches get first. Doubled, tenants with short windows would
starve the others."""


class RequestState(IntEnum):
    """How far a request is."""

    WAITING = 0
    LEASED = 1
    ENDED = 2
    """It has an outcome."""
    WITHDRAWN = 3
    """Its batch was cancelled or has expired first."""


@dataclass(frozen=True, slots=True)
class LeasedRequest:
    """A request that this worker is to run.

    Attributes:
        batch, line: Its key; `batch` is the row of its batch.
        input_key, start, size: Where its text lies.
        generation: What its outcome has to name.
        attempts: How often an engine failed at it.
        expires_s: Unix time at which its batch expires.
    """

    batch: int
    line: int
    custom_id: str
    tenant: str
    endpoint: str
    input_key: str
    start: int
    size: int
    generation: int
    attempts: int
    expires_s: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Batch, line and generation."""
        return self.batch, self.line, self.generation


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How a leased request ended: its line of the output file, or of the error file."""

    request: LeasedRequest
    is_answer: bool
    record: bytes


@dataclass(frozen=True, slots=True)
class Return:
    """A leased request that goes back to wait.

    Attributes:
        not_before_s: Unix time before which it is not leased again.
        counts: Whether an engine failed at it.
    """

    request: LeasedRequest
    not_before_s: float
    counts: bool


def prolong_worker(connection: Connection, worker: str, now_s: float, until_s: float) -> bool:
    """Let a worker live on; whether it still did."""
    changed = connection.execute(
        update(WORKERS)
        .where(WORKERS.c.worker == worker, WORKERS.c.alive_until_s > now_s)
        .values(alive_until_s=until_s)
    )
    return bool(changed.rowcount)


def add_worker(connection: Connection, worker: str, until_s: float) -> None:
    """Let a new worker live."""
    connection.execute(insert(WORKERS).values(worker=worker, alive_until_s=until_s))


def alive_workers(now_s: float) -> Select[tuple[str]]:
    """The query for those that live."""
    return select(WORKERS.c.worker).where(WORKERS.c.alive_until_s > now_s)


def free_dead_workers(connection: Connection, now_s: float) -> int:
    """Let requests of dead workers wait again; how many there were."""
    dead = (
        select(WORKERS.c.worker)
        .where(WORKERS.c.alive_until_s <= now_s)
        .order_by(WORKERS.c.worker)
        # What another forgets, or what is just leasing or prolonged, is not ours to free.
        .with_for_update(skip_locked=True)
    )
    return remove_workers(connection, connection.execute(dead).scalars().all())


def remove_workers(connection: Connection, workers: Sequence[str]) -> int:
    """Forget workers, and let their requests wait again; how many there were."""
    if not workers:
        return 0
    # This waits for a lease of theirs that is being written; after it there can be none.
    connection.execute(delete(WORKERS).where(WORKERS.c.worker.in_(workers)))
    leased = _leased_by(workers)
    held = connection.execute(select(REQUESTS.c.batch).where(*leased).distinct()).scalars()
    lock_batches(connection, held.all())
    freed = connection.execute(
        update(REQUESTS).where(*leased).values(state=RequestState.WAITING, worker=None)
    )
    return freed.rowcount


def lock_batches(connection: Connection, batches: Iterable[int]) -> None:
    """Keep others from these batches until the transaction ends; before any request of theirs."""
    rows = select(BATCHES.c.seq).where(BATCHES.c.seq.in_(sorted(set(batches))))
    # Rows that refer to a batch may still be added: that changes nothing of it.
    connection.execute(rows.order_by(BATCHES.c.seq).with_for_update(key_share=True)).all()


def _leased_by(workers: Sequence[str]) -> tuple[ColumnElement[bool], ...]:
    active = select(BATCHES.c.seq).where(BATCHES.c.ended_s.is_(None))
    return (
        REQUESTS.c.batch.in_(active),
        REQUESTS.c.state == RequestState.LEASED,
        REQUESTS.c.worker.in_(workers),
    )


def free_unknown_leases(
    connection: Connection, worker: str, known: Container[tuple[int, int, int]]
) -> int:
    """Let requests wait again that a worker has leased without knowing; how many there were.

    That is what a lost answer of the database leaves behind: they were leased, and it has not
    heard which.
    """
    columns = (REQUESTS.c.batch, REQUESTS.c.line, REQUESTS.c.generation)
    query = select(*columns).where(*_leased_by([worker])).with_for_update(skip_locked=True)
    unknown = [key for key in map(tuple, connection.execute(query)) if key not in known]
    _change(connection, unknown, state=RequestState.WAITING, worker=None)
    return len(unknown)


def _change(connection: Connection, keys: Iterable[tuple[int, int, int]], **values: object) -> None:
    """Set columns of requests, which this transaction has locked already."""
    lines: defaultdict[int, list[int]] = defaultdict(list)
    for batch, line, _ in keys:
        lines[batch].append(line)
    for batch, of_batch in lines.items():
        connection.execute(
            update(REQUESTS)
            .where(REQUESTS.c.batch == batch, is_among(connection, REQUESTS.c.line, of_batch))
            .values(**values)
        )


def fair_shares(
    room: int, running: Mapping[str, int], waiting: Mapping[str, int]
) -> dict[str, int]:
    """Divide free places among tenants, so that those who run least get the next.

    Args:
        room: Free places.
        running: Requests under way, by tenant.
        waiting: Requests that could run now, by tenant, in order of precedence among equals.
    """
    shares = dict.fromkeys(waiting, 0)
    for _ in range(room):
        hungry = [tenant for tenant in waiting if shares[tenant] < waiting[tenant]]
        if not hungry:
            break
        least = min(hungry, key=lambda tenant: running.get(tenant, 0) + shares[tenant])
        shares[least] += 1
    return shares


def is_late(began_s: float, expires_s: float, ended: int, total: int, now_s: float) -> bool:
    """Whether a batch, at its pace so far, would end later than `SAFE_SHARE` of its window.

    Said only once `EARLY_SHARE` of the window has passed: before that, its pace says nothing.
    """
    window_s, passed_s = expires_s - began_s, now_s - began_s
    if passed_s < window_s * EARLY_SHARE:
        return False
    return ended * window_s * SAFE_SHARE < total * passed_s


def choose_requests(
    room: int, running: Mapping[str, int], waiting: Sequence[LeasedRequest], late: Container[int]
) -> list[LeasedRequest]:
    """Choose whom to run next: late batches by deadline, then tenants fairly, each's in order.

    Late batches get `LATE_SHARE` of the room before all others, the earliest deadline first. No
    more: a tenant cannot take all by asking for windows that nothing keeps.

    Args:
        room: Free places.
        running: Requests under way, by tenant.
        waiting: Requests that could run now, by deadline and then in the order of their batch.
        late: Batches that will miss their deadline at their pace so far.
    """
    hurried = [each for each in waiting if each.batch in late][: math.ceil(room * LATE_SHARE)]
    keys = {each.key for each in hurried}
    others: defaultdict[str, list[LeasedRequest]] = defaultdict(list)
    for each in waiting:
        if each.key not in keys:
            others[each.tenant].append(each)
    busy = Counter(running)
    busy.update(each.tenant for each in hurried)
    counts = {tenant: len(each) for tenant, each in others.items()}
    shares = fair_shares(room - len(hurried), busy, counts)
    return hurried + [each for tenant, share in shares.items() for each in others[tenant][:share]]


def lease_requests(
    connection: Connection,
    worker: str,
    room: int,
    room_of: Callable[[str | None], int],
    most_bytes: int,
    running: Mapping[str, int],
    now_s: float,
) -> list[LeasedRequest]:
    """Lease up to `room` waiting requests, as `choose_requests` says.

    Within a batch they come in its order (`rank`). Together they have no more than `most_bytes`,
    unless the first has; of batches of one model there are no more than `room_of` it. A worker
    whose life is over gets none: nothing would ever free them.
    """
    alive = alive_workers(now_s).where(WORKERS.c.worker == worker)
    if connection.execute(alive.with_for_update(read=True)).first() is None:
        return []
    candidates: defaultdict[str | None, list[LeasedRequest]] = defaultdict(list)
    found: Counter[tuple[str, str | None]] = Counter()
    rooms: dict[str | None, int] = {}
    late: set[int] = set()
    for row in connection.execute(_running_batches()):
        batch, tenant, endpoint, input_key, model, began_s, expires_s, ended, total = row
        if model not in rooms:
            rooms[model] = min(room, room_of(model))
        if (wanted := rooms[model] - found[tenant, model]) <= 0:
            continue
        if is_late(began_s, expires_s, ended, total, now_s):
            late.add(batch)
        waiting = (
            select(
                REQUESTS.c.line,
                REQUESTS.c.custom_id,
                REQUESTS.c.start,
                REQUESTS.c.size,
                REQUESTS.c.generation,
                REQUESTS.c.attempts,
            )
            .where(
                REQUESTS.c.batch == batch,
                REQUESTS.c.state == RequestState.WAITING,
                REQUESTS.c.not_before_s <= now_s,
            )
            .order_by(REQUESTS.c.rank)
            .limit(wanted)
            .with_for_update(skip_locked=True)
        )
        for line, custom_id, start, size, generation, attempts in connection.execute(waiting):
            place = (endpoint, input_key, start, size)
            life = (generation + 1, attempts, expires_s)
            candidates[model].append(LeasedRequest(batch, line, custom_id, tenant, *place, *life))
            found[tenant, model] += 1
    busy = Counter(running)
    chosen: list[LeasedRequest] = []
    for model, waiting_for in candidates.items():
        left = min(room - len(chosen), rooms[model])
        chosen += (some := choose_requests(left, busy, waiting_for, late))
        busy.update(each.tenant for each in some)
    sizes = accumulate(each.size for each in chosen)
    fit = [size <= most_bytes for size in sizes]
    leased = chosen[: max(1, sum(fit))]
    keys = (each.key for each in leased)
    values = {"worker": worker, "generation": REQUESTS.c.generation + 1}
    _change(connection, keys, state=RequestState.LEASED, **values)
    return leased


def open_work(connection: Connection, now_s: float, tenant: str | None = None) -> tuple[int, int]:
    """Requests of running batches that have not ended, and how many of these batches are late.

    Of one tenant's batches, or of all for None.
    """
    open_requests = late_batches = 0
    query = _running_batches()
    if tenant is not None:
        query = query.where(BATCHES.c.tenant == tenant)
    for row in connection.execute(query):
        *_, began_s, expires_s, ended, total = row
        open_requests += total - ended
        late_batches += is_late(began_s, expires_s, ended, total, now_s)
    return open_requests, late_batches


def _running_batches() -> Select[Any]:
    return (
        select(
            BATCHES.c.seq.label("batch"),
            BATCHES.c.tenant,
            BATCHES.c.endpoint,
            BATCHES.c.input_key,
            BATCHES.c.model,
            BATCHES.c.in_progress_s,
            BATCHES.c.expires_s,
            BATCHES.c.completed + BATCHES.c.failed,
            BATCHES.c.total,
        )
        .where(BATCHES.c.status == "in_progress")
        .order_by(BATCHES.c.expires_s, BATCHES.c.seq)
    )


def end_leases(
    connection: Connection, requests: Sequence[LeasedRequest]
) -> set[tuple[int, int, int]]:
    """End those of these requests, whose batches are locked, that are leased in this generation.

    Returns:
        Their keys: of the others, nothing may be written.
    """
    lines: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for each in requests:
        lines[each.batch, each.generation].append(each.line)
    ended: set[tuple[int, int, int]] = set()
    for (batch, generation), of_batch in lines.items():
        found = connection.execute(
            update(REQUESTS)
            .where(
                REQUESTS.c.batch == batch,
                is_among(connection, REQUESTS.c.line, of_batch),
                REQUESTS.c.generation == generation,
                REQUESTS.c.state == RequestState.LEASED,
            )
            .values(state=RequestState.ENDED, worker=None)
            .returning(REQUESTS.c.line)
        )
        ended.update((batch, line, generation) for line in found.scalars())
    return ended


def settle(
    connection: Connection,
    outcomes: Sequence[RequestOutcome],
    returns: Sequence[Return],
    now_s: float,
) -> set[tuple[int, int, int]]:
    """Record how leases ended; the keys of those that were late, of which nothing was written."""
    requests = [each.request for each in outcomes] + [each.request for each in returns]
    lock_batches(connection, (each.batch for each in requests))
    current = end_leases(connection, requests)
    _record(connection, [each for each in outcomes if each.request.key in current], now_s)
    again = [each for each in returns if each.request.key in current]
    if again:
        connection.execute(
            update(REQUESTS)
            .where(REQUESTS.c.batch == bindparam("at"), REQUESTS.c.line == bindparam("on"))
            .values(
                state=RequestState.WAITING,
                attempts=REQUESTS.c.attempts + bindparam("more"),
                not_before_s=bindparam("due"),
            ),
            [
                {
                    "at": each.request.batch,
                    "on": each.request.line,
                    "more": int(each.counts),
                    "due": each.not_before_s,
                }
                for each in again
            ],
        )
    return {each.key for each in requests} - current


def _record(connection: Connection, ended: Sequence[RequestOutcome], now_s: float) -> None:
    if not ended:
        return
    _add_outcomes(connection, [(*each.request.key, each.is_answer, each.record) for each in ended])
    counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for each in ended:
        counts[each.request.batch][not each.is_answer] += 1
    for batch, (completed, failed) in counts.items():
        answered = BATCHES.c.completed + completed
        refused = BATCHES.c.failed + failed
        is_over = and_(BATCHES.c.status == "in_progress", answered + refused >= BATCHES.c.total)
        connection.execute(
            update(BATCHES)
            .where(BATCHES.c.seq == batch)
            .values(
                completed=answered,
                failed=refused,
                status=case((is_over, "finalizing"), else_=BATCHES.c.status),
                finalizing_s=case((is_over, int(now_s)), else_=BATCHES.c.finalizing_s),
            )
        )


_INSERT_EACH: Final = (
    "INSERT INTO outcomes (batch, line, generation, is_answer, record) VALUES (?, ?, ?, ?, ?)"
)
_INSERT_LISTS: Final = (
    "INSERT INTO outcomes (batch, line, generation, is_answer, record) SELECT * FROM "
    "unnest(%b::bigint[], %b::integer[], %b::integer[], %b::boolean[], %b::bytea[])"
)


def _add_outcomes(connection: Connection, rows: list[tuple[int, int, int, bool, bytes]]) -> None:
    """Insert rows as the drivers do it fastest; SQLAlchemy's own way costs twice the time in all.

    PostgreSQL gets a list for each column, for it runs a statement anew for each row.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(_INSERT_EACH, rows)
    else:
        connection.exec_driver_sql(_INSERT_LISTS, tuple(map(list, zip(*rows, strict=True))))


def withdraw_requests(connection: Connection, batch: int) -> None:
    """End what a batch, which is locked, has no outcome of yet; leases on it end with it."""
    connection.execute(
        update(REQUESTS)
        .where(
            REQUESTS.c.batch == batch,
            REQUESTS.c.state.in_((RequestState.WAITING, RequestState.LEASED)),
        )
        .values(state=RequestState.WITHDRAWN, worker=None)
    )


def active_batches(connection: Connection, batches: Iterable[int]) -> set[int]:
    """Which of these batches still run."""
    query = select(BATCHES.c.seq).where(
        BATCHES.c.seq.in_(sorted(batches)), BATCHES.c.status == "in_progress"
    )
    return set(connection.execute(query).scalars())
