"""Commands to Redis, coalesced: what requests submit in one turn of the loop travels together.

A coordinator has one thread, and most of what a Redis command costs it is waking up: a write, a
read and a task switch each. So one task with one connection takes what has gathered, sends it in
one write and reads the answers; what is submitted meanwhile is the next batch. Batches grow with
the load by themselves, and an idle coordinator sends a lone command at once. Small scripts that are
neighbours in a batch share one call, and with it the reading and writing that they have in common.

A batch takes no more than a quarter of what has gathered. Callers, coordinator and Redis are three
stations of a closed circuit: one that takes everything at once makes them work by turns instead of
side by side (`benchmarks/coordinator.py`).

Promises: every submitted command is answered or fails within twice `timeout_s`, at most
`MAX_WAITING` wait, and an answer never goes to the wrong command (a connection that failed or was
late is dropped, never reused).

With `min_replicas`, answers of scripts that may write are held back until so many replicas have
all that was written: one `WAIT` for a batch, behind a write of our own, because it speaks of its
connection's writes, and a repeated grant is answered with another's. Where replicas fall short, who
waits for them is refused, those whose turn would come later as well, and the connection given up: a
master without replicas may be one that was demoted in its sleep, and Sentinel knows its successor.
Commands that only read have their turn next, on another connection.

Not promised: that a command that failed was not carried out. After a lost connection a batch is
sent once more, which is sound because every script may be repeated: reports by their revision,
grants and reclaims by their idempotency key, the rest by nature. So callers that were refused for
want of replicas ask again; a grant that is not asked for again expires unattached.

redis-py provides connections (TLS, Sentinel, authentication) and the parser; its own pipelines cost
too much CPU here (ADR 0011).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from typing import Any, Final, TypeAlias

import hiredis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from aqua_coordinator.store.connection import close_pool
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.scripts import (
    LIBRARY_PREFIX,
    SCRIPTS,
    WRITING_SCRIPTS,
    Library,
    load_library,
)
from aqua_protocol import AquaError, UnavailableError
from aqua_protocol.errors import StoreFullError, StoreUnavailableError
from aqua_protocol.supervision import SupervisedTask, resting

Argument: TypeAlias = str | bytes | int
Answer: TypeAlias = Any
"""What Redis says: bytes, int, None, or a list of these."""
Observer: TypeAlias = Callable[[str, float], None]
"""Called with a command's name and the seconds from its submission to its answer."""

MAX_WAITING: Final = 8192
"""Commands that wait to be sent. At 50,000 scripts a second Redis clears them in a sixth of one;
doubled, a caller may wait twice as long before it is refused."""
MAX_BATCH: Final = 256
"""Commands in one write: some ten milliseconds of Redis time, twice that when doubled."""
MAX_SHARE: Final = 4
"""A batch takes at most one in so many of the commands that wait. Without it (1) throughput at 32
callers falls by a quarter; twice as many means smaller batches, and more writes."""
FREE_BATCH: Final = 12
"""Batches up to this size need not share: smaller ones cost more writes than they win overlap, at 8
a fourteenth of the CPU with 32 callers. Doubled, throughput there falls by a tenth."""
REPLICAS_SHARE: Final = 0.2
"""Of `timeout_s`, for replicas: 1 s by default, within what members wait for an answer. Doubled,
members see a timeout instead of a refusal."""
PROBE_TTL_MS: Final = 10_000
"""Life of the key that a probe writes. Doubled, nothing changes: the next probe overwrites it."""
RETRY_AFTER_S: Final = 1.0
"""What callers are told while Redis is away; about the time an embedded one takes to restart.
Doubled, they come back a second later."""

SHARING: Final = frozenset({"grant_lease", "renew_lease", "release_lease"})
"""Small scripts that consumers call all the time: neighbours in a batch share one call."""

_BOOKS_KEY: Final = KEYS["books"].encode()
_NOT_NOW: Final = (
    *("BUSY", "NOREPLICAS", "UNBLOCKED", "WRONGTYPE"),
    *("DENIED", "Protocol error: unauthenticated"),
)
"""First words of Redis errors that speak of its state, not of the command. A key of the wrong type
stops scripts that only read, until the next one that writes sets it aside. The last two are those
of a Redis that has come to want a password: of its protected mode, and for words beyond its tenth.
"""
_DEMOTED: Final = (ReadOnlyError, MasterDownError)
"""What a master says that became a replica: the next connection finds the new one."""
_NO_FUNCTION: Final = "Function not found"
_BROKEN: Final = (RedisConnectionError, RedisTimeoutError, OSError, *_DEMOTED)


class _ReplicasShortError(TimeoutError):
    """Fewer replicas than were asked for have what was written."""


class Pipeline:
    """Sends commands over a connection of a pool.

    Args:
        pool: Where to take connections from; closed with the pipeline.
        timeout_s: How long Redis may take over one batch, connecting included.
        observe: Told of every answer, for metrics.
        min_replicas: How many have a write before it is answered.
        replicas_share: Of `timeout_s`, how long they may take over that.
        library: Scripts of another version than this one; for tests.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        timeout_s: float = 5.0,
        observe: Observer | None = None,
        min_replicas: int = 0,
        replicas_share: float = REPLICAS_SHARE,
        library: Library | None = None,
    ) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._observe = observe
        self._min_replicas = min_replicas
        # Replicas take as long for a large batch as for a small one.
        self._free_batch = MAX_BATCH if min_replicas else FREE_BATCH
        write = ("SET", KEYS["probe"], "1", "PX", PROBE_TTL_MS)
        wait = ("WAIT", min_replicas, round(1000 * timeout_s * replicas_share))
        self._wait = _packed(write) + _packed(wait)
        self._library = library or load_library()
        self._calls = {
            name: ("FCALL", self._library.function(name).encode(), b"1", _BOOKS_KEY)
            for name in SCRIPTS
        }
        self._several = ("FCALL", self._library.function("run_several").encode(), b"1", _BOOKS_KEY)
        self._waiting: deque[_Command] = deque()
        self._submitted = asyncio.Event()
        self._sender = SupervisedTask(self._send_forever, "store-pipeline")
        self._is_open = False
        self._connection: AbstractConnection | None = None

    def start(self) -> None:
        """Begin to send, on the running loop."""
        self._sender.start()
        self._is_open = True

    async def close(self) -> None:
        """Stop sending and close the connections; what is still pending fails."""
        self._is_open = False
        await self._sender.stop()
        _fail(self._waiting, StoreUnavailableError("the coordinator is shutting down"))
        await close_pool(self._pool)

    def script(self, name: str, *arguments: Argument) -> asyncio.Future[Answer]:
        """Run a script over the books; the future raises what `store_error` makes of errors."""
        if name in SHARING:
            return self._submit(_Command(name, (name, len(arguments), *arguments), shares=True))
        return self._submit(_Command(name, (*self._calls[name], *arguments)))

    def command(self, *words: Argument) -> asyncio.Future[Answer]:
        """Run a plain command; the future raises what `store_error` makes of errors."""
        return self._submit(_Command(str(words[0]).lower(), words))

    async def forget_libraries(self, names: Sequence[str]) -> None:
        """Delete scripts of other versions of this program; theirs are loaded when missed.

        Raises:
            UnavailableError: As by `store_error`.
        """
        for name in names:
            if name.startswith(LIBRARY_PREFIX) and name != self.library_name:
                # Another coordinator may have been quicker.
                with contextlib.suppress(AssertionError):
                    await self.command("FUNCTION", "DELETE", name)

    @property
    def library_name(self) -> str:
        """Return the name of the scripts that this pipeline runs."""
        return self._library.name

    async def _hang_up(self) -> None:
        """Close the connection, which may be in the middle of an answer."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    def _submit(self, command: _Command) -> asyncio.Future[Answer]:
        if not self._is_open:
            raise StoreUnavailableError("the coordinator is not connected to Redis")
        if len(self._waiting) >= MAX_WAITING:
            raise UnavailableError(
                f"{len(self._waiting)} commands are waiting for Redis already",
                remedy="Retry later, or run more coordinators.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._waiting.append(command)
        self._submitted.set()
        return command.future

    async def _send_forever(self) -> None:
        batch: deque[_Command] = deque()
        try:
            while True:
                # Whatever is submitted in this turn of the loop waits by the time this goes on.
                with resting():
                    await self._submitted.wait()
                size = min(max(len(self._waiting) // MAX_SHARE, self._free_batch), MAX_BATCH)
                size = min(size, len(self._waiting))
                batch = deque(self._waiting.popleft() for _ in range(size))
                if not self._waiting:
                    self._submitted.clear()
                await self._carry(batch)
        finally:
            if batch:  # Callers wait for their answers, whatever has ended this.
                _fail(batch, StoreUnavailableError("the coordinator let go of Redis"))
            await self._hang_up()

    async def _carry(self, batch: deque[_Command]) -> None:
        """See a batch through."""
        for last_try in (False, True):
            try:
                async with asyncio.timeout(self._timeout_s):
                    if self._connection is None:
                        self._connection = await self._pool.get_connection()  # type: ignore[no-untyped-call] # redis-py types it in part
                        assert self._connection is not None, "a pool gives one or an error"
                    if not self._connection.is_connected:
                        await self._connection.connect()
                    await self._exchange(self._connection, batch)
            except _ReplicasShortError as error:
                self._refuse_who_waits(batch, store_error(error))
                await self._hang_up()
            except _BROKEN as error:
                # A command that Redis is slow at would be slow again: only a lost connection is
                # worth another try. It is what remains of one after a restart or a failover.
                if last_try or isinstance(error, TimeoutError):
                    _fail(batch, store_error(error))
                    # These have waited for the same Redis, and may not wait for it batch by batch.
                    _fail(self._waiting, store_error(error))
                    self._submitted.clear()
                await self._hang_up()
            except RedisError as error:
                _fail(batch, store_error(error))
                # What of its answers was not read would be those of the next commands.
                await self._hang_up()
            if not batch:
                break

    def _refuse_who_waits(self, batch: deque[_Command], error: Exception) -> None:
        """Fail what waits for replicas, of the batch and behind it; the others go on waiting.

        None of these is behind a write any more, so no further wait for replicas holds them up.
        """
        commands = [*batch, *self._waiting]
        batch.clear()
        self._waiting.clear()
        for command in commands:
            if command.waits:
                command.fail(error)
            else:
                self._waiting.append(command)
        if self._waiting:
            self._submitted.set()
        else:
            self._submitted.clear()

    async def _exchange(
        self, connection: AbstractConnection, batch: deque[_Command], *, reloaded: bool = False
    ) -> None:
        """Send every command of the batch, and take each out of it as its answer comes."""
        # Neighbours with the same key travel in one call.
        neighbours = groupby(batch, key=lambda command: command.shares or command)
        calls = [list(call) for _, call in neighbours]
        waits = self._min_replicas > 0 and any(command.waits for command in batch)
        packed = b"".join([*map(self._pack, calls), self._wait if waits else b""])
        await connection.send_packed_command(packed, check_health=False)
        unknown, held = 0, list[tuple[Answer, list[_Command]]]()
        try:
            for call in calls:
                try:
                    answer = await connection.read_response()
                except _DEMOTED:
                    raise
                except ResponseError as error:
                    if str(error) == _NO_FUNCTION and not reloaded:
                        # To the end of the batch, behind those whose answers are still to come.
                        batch.rotate(-len(call))
                        unknown += len(call)
                        continue
                    answer = error
                if waits and call[0].waits:
                    held.append((answer, [batch.popleft() for _ in call]))
                else:
                    self._hand_out(answer, call)
                    _drop_first(batch, len(call))
            if waits:
                await self._read_wait(connection)
            for answer, commands in held:
                self._hand_out(answer, commands)
        except BaseException:
            batch.extend(chain.from_iterable(commands for _, commands in held))
            raise
        if unknown:
            assert len(batch) == unknown, f"{len(batch)} commands left, {unknown} unknown"
            await self._load(connection)
            await self._exchange(connection, batch, reloaded=True)

    async def _read_wait(self, connection: AbstractConnection) -> None:
        await connection.read_response()
        count = await connection.read_response()
        if count < self._min_replicas:
            raise _ReplicasShortError(
                f"{count} replicas have what was written, not {self._min_replicas}"
            )

    def _hand_out(self, answer: Answer, call: list[_Command]) -> None:
        """Give each command its part; that there are no books, or an error, is told to all."""
        several = call[0].shares and isinstance(answer, list) and answer[0] == b"ok"
        now_s = time.perf_counter()
        for command, own in zip(call, answer[1] if several else [answer] * len(call), strict=True):
            if isinstance(own, RedisError):
                command.fail(store_error(own))
                continue
            if self._observe is not None:
                self._observe(command.name, now_s - command.submitted_s)
            if not command.future.done():
                command.future.set_result(own)

    def _pack(self, call: list[_Command]) -> bytes:
        words = call[0].words
        if call[0].shares:
            words = (*self._several, *chain.from_iterable(command.words for command in call))
        return _packed(words)

    async def _load(self, connection: AbstractConnection) -> None:
        """Give Redis the library: it is a new one, was flushed, or a replica that is behind."""
        await connection.send_command("FUNCTION", "LOAD", self._library.source)
        try:
            await connection.read_response()
        except ResponseError as error:
            # Another coordinator was quicker; the name says that it is the same text.
            if not str(error).endswith("already exists"):
                raise


class _Command:
    """One command on its way; one that shares its call has the words of its script only."""

    __slots__ = ("future", "name", "shares", "submitted_s", "waits", "words")

    def __init__(self, name: str, words: tuple[Argument, ...], *, shares: bool = False) -> None:
        self.name = name
        self.words = words
        self.shares = shares
        self.waits = name in WRITING_SCRIPTS
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.submitted_s = time.perf_counter()

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def _packed(words: tuple[Argument, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type] # its stub takes a tuple of one
    return packed


def _drop_first(batch: deque[_Command], count: int) -> None:
    for _ in range(count):
        batch.popleft()


def _fail(commands: deque[_Command], error: Exception) -> None:
    while commands:
        commands.popleft().fail(error)


def store_error(error: Exception) -> AquaError | AssertionError:
    """What a failure of Redis means to callers; an error inside a script is a mistake of ours."""
    text = str(error)
    if isinstance(error, OutOfMemoryError) or text.startswith(("OOM", "MISCONF")):
        return StoreFullError(f"Redis refuses writes: {text}", retry_after_s=RETRY_AFTER_S)
    # Of these redis-py makes types, and takes the first word off.
    is_state = isinstance(error, (*_DEMOTED, NoPermissionError)) or text.startswith(_NOT_NOW)
    if isinstance(error, ResponseError) and not is_state:
        return AssertionError(f"Redis refused a command of ours: {text}")
    reason = text or type(error).__name__
    return StoreUnavailableError(f"Redis does not answer: {reason}", retry_after_s=RETRY_AFTER_S)
