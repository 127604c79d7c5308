"""Commands to Redis, coalesced: what requests submit in one turn of the loop travels together.

A coordinator has one thread, and most of what a Redis command costs it is waking up: a write, a
read and a task switch each. So commands are not sent when they are submitted. A *lane* (one
connection, one task) takes what has gathered, sends it in one write and reads the answers; what is
submitted meanwhile is the next batch. Batches grow with the load by themselves, and an idle
coordinator sends a lone command at once.

But never more than a quarter of what is under way at once. Callers, coordinator and Redis are three
stations of a closed circuit: one that takes everything at once leaves the others with nothing to do
until it is done, and then hands everything on together, so that they work by turns instead of side
by side. At 32 callers on two cores that is a third of the throughput
(`benchmarks/coordinator.py`).

Promises: every submitted command is answered or fails within twice `timeout_s`, at most
`MAX_WAITING` wait, and an answer never goes to the wrong command (a connection that
failed or was late is dropped, never reused). Commands of different lanes are not ordered.

Not promised: that a command that failed was not carried out. After a lost connection a batch is
sent once more, which is sound because every script may be repeated: reports by their revision,
grants and reclaims by their idempotency key, the rest by nature.

redis-py provides connections (TLS, Sentinel, authentication) and the parser. Its pipelines do not
serve here: each checks out a connection and builds a stack of futures of its own, which costs
about as much as sending the commands one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import hiredis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
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
    SMALL_SCRIPTS,
    ScriptName,
    load_library,
)
from aqua_protocol import AquaError, StoreFullError, StoreUnavailableError, UnavailableError

Argument: TypeAlias = str | bytes | int
Answer: TypeAlias = Any
"""What Redis says: bytes, int, None, or a list of these."""
Observer: TypeAlias = Callable[[str, float], None]
"""Called with a command's name and the seconds from its submission to its answer."""

MAX_WAITING: Final = 8192
"""Commands that wait for a lane. At 50,000 scripts a second Redis clears them in a sixth of one."""
MAX_BATCH: Final = 256
"""Commands in one write: keeps a batch below some ten milliseconds of Redis time."""
MAX_SHARE: Final = 4
"""One batch takes at most one in so many of the commands under way."""
FREE_BATCH: Final = 8
"""Batches up to this size need not share: smaller ones cost more writes than they win overlap."""
MAX_SCRIPTS_IN_CALL: Final = 64
"""Small scripts in one call, during which Redis serves nobody else: about a millisecond."""
RETRY_AFTER_S: Final = 1.0
"""What callers are told while Redis is away; about the time an embedded one takes to restart."""

_BOOKS_KEY: Final = KEYS["books"].encode()
_NOT_NOW: Final = (
    *("BUSY", "LOADING", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN", "CLUSTERDOWN"),
    *("NOAUTH", "NOPERM", "WRONGPASS", "READONLY", "UNBLOCKED"),
)
"""First words of Redis errors that speak of its state or of our rights, not of the command."""
_END: Final = b"\r\n"
_CALL_WORDS: Final = 4
"""`FCALL`, the function, the number of keys, the key of the books."""
_LIBRARY: Final = b"library_name"
_NO_FUNCTION: Final = "Function not found"
_BROKEN: Final = (RedisConnectionError, RedisTimeoutError, TimeoutError, OSError)


class Pipeline:
    """Sends commands over a few connections of a pool.

    Args:
        pool: Where to take connections from; closed with the pipeline.
        lanes: Connections, each with one batch under way. Two keep Redis busy while the answers
            of the other are handed out.
        timeout_s: How long Redis may take over one batch, connecting included.
        observe: Told of every answer, for metrics.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        lanes: int = 2,
        timeout_s: float = 5.0,
        observe: Observer | None = None,
    ) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._observe = observe
        self._library = load_library()
        self._calls = {
            name: ("FCALL", self._library.function(name).encode(), b"1", _BOOKS_KEY)
            for name in ScriptName
        }
        self._several = _pack(self._calls[ScriptName.RUN_SEVERAL]).partition(_END)[2]
        self._queue: deque[_Command] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._travelling = 0
        self._lane_count = lanes
        self._lanes: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the lanes on the running loop."""
        assert not self._lanes, "started twice"
        self._lanes = [asyncio.create_task(self._run_lane()) for _ in range(self._lane_count)]

    async def close(self) -> None:
        """Stop the lanes and close their connections; what is still pending fails."""
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._lanes = []
        _fail(self._queue, StoreUnavailableError("the coordinator is shutting down"))
        await close_pool(self._pool)

    def script(self, name: ScriptName, *arguments: Argument) -> asyncio.Future[Answer]:
        """Run a script over the books; the future raises what `store_error` makes of errors."""
        if name in SMALL_SCRIPTS:
            return self._submit(name, (name, len(arguments), *arguments), small=True)
        return self._submit(name, (*self._calls[name], *arguments))

    def command(self, *words: Argument) -> asyncio.Future[Answer]:
        """Run a plain command; the future raises what `store_error` makes of errors."""
        return self._submit(str(words[0]).lower(), words)

    async def listen(self) -> AbstractConnection:
        """A connection of its own, for a command that blocks. `hang_up` takes it back.

        Raises:
            UnavailableError: As by `store_error`.
        """
        try:
            connection = await self._take_connection()
        except (RedisError, OSError) as error:
            raise store_error(error) from error
        return connection

    async def hang_up(self, connection: AbstractConnection) -> None:
        """Close a connection of `listen`: it may be in the middle of an answer."""
        await connection.disconnect(nowait=True)
        await self._pool.release(connection)

    async def forget_other_libraries(self) -> None:
        """Delete the scripts of other versions of this program; theirs are loaded when missed.

        Raises:
            UnavailableError: As by `store_error`.
        """
        connection = await self.listen()
        try:
            await connection.send_command("FUNCTION", "LIST", "LIBRARYNAME", f"{LIBRARY_PREFIX}*")
            found = await connection.read_response()
            for name in {dict(zip(row[::2], row[1::2], strict=True))[_LIBRARY] for row in found}:
                if name != self._library.name.encode():
                    await connection.send_command("FUNCTION", "DELETE", name)
                    # Another coordinator may have been quicker.
                    with contextlib.suppress(ResponseError):
                        await connection.read_response()
        except (RedisError, OSError) as error:
            raise store_error(error) from error
        finally:
            await self.hang_up(connection)

    async def _take_connection(self) -> AbstractConnection:
        connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call] # redis-py types it in part
        return connection

    def _submit(
        self, name: str, words: tuple[Argument, ...], *, small: bool = False
    ) -> asyncio.Future[Answer]:
        if not self._lanes:
            raise StoreUnavailableError("the coordinator is not connected to Redis")
        if len(self._queue) >= MAX_WAITING:
            raise UnavailableError(
                f"{len(self._queue)} commands are waiting for Redis already",
                remedy="Retry later, or run more coordinators.",
                retry_after_s=RETRY_AFTER_S,
            )
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._queue.append(_Command(name, _pack(words), len(words) if small else 0, future))
        if self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(None)
        return future

    async def _run_lane(self) -> None:
        connection: AbstractConnection | None = None
        try:
            while True:
                # Again after waking up: another lane may have been quicker.
                while not self._queue:
                    # Everything submitted in this turn of the loop is in the queue by the time
                    # that the lane runs again.
                    waiter = asyncio.get_running_loop().create_future()
                    self._idle.append(waiter)
                    await waiter
                share = (len(self._queue) + self._travelling) // MAX_SHARE
                size = min(len(self._queue), max(share, FREE_BATCH), MAX_BATCH)
                batch = deque(self._queue.popleft() for _ in range(size))
                self._travelling += size
                try:
                    connection = await self._carry(batch, connection)
                finally:
                    self._travelling -= size
        finally:
            if connection is not None:
                await self.hang_up(connection)

    async def _carry(
        self, batch: deque[_Command], connection: AbstractConnection | None
    ) -> AbstractConnection | None:
        """See a batch through; gives back the connection to go on with, None when it is lost."""
        for last_try in (False, True):
            try:
                async with asyncio.timeout(self._timeout_s):
                    if connection is None or not connection.is_connected:
                        connection = await self._connect(connection)
                    await self._exchange(connection, batch)
            except _BROKEN as error:
                # A command that Redis is slow at would be slow again: only a lost connection is
                # worth another try. It is what remains of one after a restart or a failover.
                if last_try or isinstance(error, TimeoutError):
                    _fail(batch, store_error(error))
                if connection is not None:
                    await self.hang_up(connection)
                    connection = None
            except RedisError as error:
                _fail(batch, store_error(error))
            except asyncio.CancelledError:
                _fail(batch, StoreUnavailableError("the coordinator is shutting down"))
                raise
            if not batch:
                return connection
        return connection

    async def _connect(self, connection: AbstractConnection | None) -> AbstractConnection:
        if connection is None:
            connection = await self._take_connection()
        await connection.connect()  # type: ignore[no-untyped-call] # as above
        return connection

    async def _load(self, connection: AbstractConnection) -> None:
        """Give Redis the library: it is a new one, was flushed, or a replica that is behind."""
        await connection.send_command("FUNCTION", "LOAD", self._library.source)
        try:
            await connection.read_response()
        except ResponseError as error:
            # Another lane or coordinator was quicker; the name says that it is the same text.
            if not str(error).endswith("already exists"):
                raise

    async def _exchange(
        self, connection: AbstractConnection, batch: deque[_Command], *, reloaded: bool = False
    ) -> None:
        """Send every command of the batch, and take each out of it as its answer comes."""
        parcels = _parcels(batch)
        packed = b"".join([self._sealed(parcel) for parcel in parcels])
        await connection.send_packed_command(packed, check_health=False)
        unknown = 0
        for parcel in parcels:
            try:
                answer = await connection.read_response()
            except ReadOnlyError as error:
                # A master that became a replica: the next connection finds the new one.
                raise RedisConnectionError(str(error)) from error
            except ResponseError as error:
                if str(error) == _NO_FUNCTION and not reloaded:
                    # To the end of the batch, behind those whose answers are still to come.
                    batch.rotate(-len(parcel))
                    unknown += len(parcel)
                    continue
                for _ in parcel:
                    batch.popleft().fail(store_error(error))
                continue
            now_s = time.perf_counter()
            for own in _shares(parcel, answer):
                command = batch.popleft()
                if self._observe is not None:
                    self._observe(command.name, now_s - command.submitted_s)
                if not command.future.done():
                    command.future.set_result(own)
        if unknown:
            assert len(batch) == unknown, f"{len(batch)} commands left, {unknown} unknown"
            await self._load(connection)
            await self._exchange(connection, batch, reloaded=True)

    def _sealed(self, parcel: list[_Command]) -> bytes:
        """What is sent for the parcel: a command as it is, or one call of several scripts."""
        if not parcel[0].words:
            return parcel[0].packed
        words = _CALL_WORDS + sum(command.words for command in parcel)
        scripts = b"".join([command.packed.partition(_END)[2] for command in parcel])
        return b"*%d%b%b%b" % (words, _END, self._several, scripts)


class _Command:
    """One command on its way; `words` counts those of a small script, and is 0 otherwise."""

    __slots__ = ("future", "name", "packed", "submitted_s", "words")

    def __init__(
        self, name: str, packed: bytes, words: int, future: asyncio.Future[Answer]
    ) -> None:
        self.name = name
        self.packed = packed
        self.words = words
        self.future = future
        self.submitted_s = time.perf_counter()

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def _pack(words: tuple[Argument, ...]) -> bytes:
    # Its stub says a tuple of one.
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packed


def _parcels(batch: deque[_Command]) -> list[list[_Command]]:
    """The batch in its order, with neighbours that are small scripts in one parcel."""
    parcels: list[list[_Command]] = []
    for command in batch:
        if (
            command.words
            and parcels
            and parcels[-1][-1].words
            and len(parcels[-1]) < MAX_SCRIPTS_IN_CALL
        ):
            parcels[-1].append(command)
        else:
            parcels.append([command])
    return parcels


def _shares(parcel: list[_Command], answer: Answer) -> list[Answer]:
    """The answer of each command; that there are no books goes to all."""
    if not parcel[0].words:
        return [answer]
    return answer[1] if answer[0] == b"ok" else [answer] * len(parcel)


def _fail(commands: deque[_Command], error: Exception) -> None:
    while commands:
        commands.popleft().fail(error)


def store_error(error: Exception) -> AquaError | AssertionError:
    """What a failure of Redis means to callers; an error inside a script is a mistake of ours."""
    text = str(error)
    if isinstance(error, OutOfMemoryError) or text.startswith(("OOM", "MISCONF")):
        return StoreFullError(f"Redis refuses writes: {text}", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, ResponseError) and not text.startswith(_NOT_NOW):
        return AssertionError(f"Redis refused a command of ours: {text}")
    reason = text or type(error).__name__
    return StoreUnavailableError(f"Redis does not answer: {reason}", retry_after_s=RETRY_AFTER_S)
