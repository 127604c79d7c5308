"""Brings requests to engines and their answers to the database.

One worker's life, as supervised loops: *feed* leases requests ahead of the engines' need, so that
an engine never waits for the database; *record* writes outcomes (`Recorder`); *watch* finds batches
that were cancelled or have expired, here or by another service, and breaks off their requests;
*live* prolongs the worker's life; *sense* looks at the load of engines (`concurrency`). What is not
on the database is nothing: a worker that is killed leaves leases, which others take up when its
life has run out.

A worker that was thought dead, because it or its machine stood still, notices by itself, drops all
that it had and begins a new life; what it still records meanwhile is late (`request_rows`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import structlog
from pydantic_core import from_json, to_json

from aqua_batch.records import UTF8_MARK
from aqua_batch.service.dispatch.answer_rate import AnswerRate
from aqua_batch.service.dispatch.engines import (
    EngineAbsentError,
    EngineAnswer,
    EngineEndpoint,
    EngineFailedError,
    EnginePool,
)
from aqua_batch.service.dispatch.metrics import BatchMetrics
from aqua_batch.service.dispatch.ready_queue import ReadyQueue, ReadyRequest
from aqua_batch.service.dispatch.recorder import Recorder
from aqua_batch.service.files.objects import ObjectStore
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.request_rows import (
    LeasedRequest,
    RequestOutcome,
    Return,
    active_batches,
    add_worker,
    free_unknown_leases,
    lease_requests,
    prolong_worker,
    remove_workers,
)
from aqua_protocol.errors import DataLostError, StoreUnavailableError
from aqua_protocol.supervision import SupervisedTask, resting, start_job

log = structlog.get_logger(__name__)

POLL_S: Final = 0.5
"""Seconds between looks at what other services may have changed. Doubled, a request that waits for
a repetition, or was cancelled elsewhere, is noticed half a second later."""
MOST_AHEAD: Final = 1024
"""Requests leased ahead of the engines of a model. Doubled, twice as many texts lie in memory."""
AHEAD_S: Final = 0.5
"""Seconds for which requests are leased ahead of engines that answer fast; of others, as many as
they have places. More are leased when half are left, and a slow disk may take that half's time.
Doubled, half as many transactions lease as many requests; a late batch or another tenant waits up
to half a second longer for its turn."""
MOST_UNRECORDED: Final = 2048
"""Answers that wait for the database before engines get no more. Doubled, a database that does not
answer costs twice the memory."""
MOST_UNRECORDED_BYTES: Final = 64 << 20
"""Bytes of them, likewise. Doubled, a database that does not answer costs twice the memory."""
MOST_HELD_BYTES: Final = 64 << 20
"""Bytes of requests in memory, ahead or at engines; a single one may have more. Doubled, twice the
memory where requests are of megabytes."""
SENSE_S: Final = 1.0
"""Seconds between looks at the engines' metrics. Doubled, an engine that has too much to do gets
less a second later."""
FIRST_PAUSE_S: Final = 1.0
"""Seconds before a request that failed runs again, then twice as long each time. Doubled, a short
hiccup of an engine costs a second more."""
LONGEST_PAUSE_S: Final = 60.0
"""Seconds. Doubled, a request whose engines fail for long ends up to a minute later."""
LIVES_PER_LEASE: Final = 4
"""How often a worker prolongs its life within it. Doubled, twice the transactions."""


class Dispatcher:
    """One worker.

    Args:
        lease_s: How long it is thought alive after it was last heard of.
        max_attempts: How often engines may fail at a request.
        now_s: Unix time.
    """

    def __init__(
        self,
        database: Database,
        objects: ObjectStore,
        engines: EnginePool,
        metrics: BatchMetrics,
        *,
        lease_s: float,
        max_attempts: int,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._objects = objects
        self._engines = engines
        self._metrics = metrics
        self._lease_s = lease_s
        self._max_attempts = max_attempts
        self._now_s = now_s
        self._recorder = Recorder(database, lease_s, now_s, self._recorded)
        self._ready = ReadyQueue()
        self._jobs: dict[tuple[int, int, int], tuple[LeasedRequest, asyncio.Task[None]]] = {}
        self._low_marks: dict[str | None, int] = {}
        self._rate = AnswerRate()
        self._is_wanting = asyncio.Event()
        self._is_changed = asyncio.Event()
        self.worker = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run requests within the block; at its end they go back to wait, at once."""
        await self._begin_life()
        try:
            async with (
                SupervisedTask(self._recorder.run, "batch-record"),
                SupervisedTask(self._live, "batch-live"),
                SupervisedTask(self._watch, "batch-watch"),
                SupervisedTask(self._feed, "batch-feed"),
                SupervisedTask(self._sense, "batch-sense"),
            ):
                yield
        finally:
            while self._jobs:  # One that is given back meanwhile takes another's place.
                self._ready.clear()
                await self._drop(list(self._jobs))
            self._ready.clear()
            with contextlib.suppress(StoreUnavailableError):
                if len(self._recorder):
                    await self._recorder.flush()
                await self._database.write(partial(remove_workers, workers=[self.worker]))

    def look(self) -> None:
        """Notice now that a batch has begun or was cancelled."""
        self._is_changed.set()
        self._is_wanting.set()

    async def _begin_life(self) -> None:
        worker = secrets.token_hex(8)
        until_s = self._now_s() + self._lease_s
        await self._database.write(partial(add_worker, worker=worker, until_s=until_s))
        self.worker = worker

    async def _live(self) -> None:
        while True:
            with resting():
                await asyncio.sleep(self._lease_s / LIVES_PER_LEASE)
            now_s = self._now_s()
            lives = await self._database.write(
                partial(
                    prolong_worker, worker=self.worker, now_s=now_s, until_s=now_s + self._lease_s
                )
            )
            if not lives:
                log.warning("thought dead: begins anew", worker=self.worker, lost=len(self._jobs))
                await self._begin_life()
                self._ready.clear()
                await self._drop(list(self._jobs))

    async def _watch(self) -> None:
        while True:
            self._is_changed.clear()
            held = {each.batch for each, _ in self._jobs.values()}
            held |= {each.request.batch for each in self._ready}
            if held:
                active = await self._database.read(partial(active_batches, batches=held))
                gone = held - active  # What was leased meanwhile is of neither.
                if gone:
                    self._ready.drop(gone)
                    await self._drop([key for key in self._jobs if key[0] in gone])
            with resting(), contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._is_changed.wait()

    async def _drop(self, keys: Sequence[tuple[int, int, int]]) -> None:
        """Break off requests: their connections close, and the engines abort them."""
        tasks = [self._jobs[key][1] for key in keys if key in self._jobs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sense(self) -> None:
        while True:
            await self._engines.look()
            self._is_wanting.set()
            with resting():
                await asyncio.sleep(SENSE_S)
            self._rate.begin_window()

    async def _feed(self) -> None:
        """Lease ahead; after a crash what was leased without our knowing goes back first."""
        ready = {each.request.key for each in self._ready}
        known = ready | set(self._jobs) | self._recorder.keys()
        free = partial(free_unknown_leases, worker=self.worker, known=known)
        if freed := await self._database.write(free):
            log.warning("leases given back that nothing was known of", count=freed)
        while True:
            self._is_wanting.clear()
            self._pump()
            if not await self._lease_more():
                pause_s = min(POLL_S, self._engines.next_return_s() or POLL_S)
                with resting(), contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._is_wanting.wait()

    async def _lease_more(self) -> int:
        """Lease what runs low, if it is worth a transaction; how many requests there were."""
        held_bytes = sum(each.request.size for each in self._ready)
        held_bytes += sum(each.size for each, _ in self._jobs.values())
        is_behind = (
            len(self._recorder) >= MOST_UNRECORDED
            or self._recorder.waiting_bytes >= MOST_UNRECORDED_BYTES
            or held_bytes >= MOST_HELD_BYTES
        )
        listed = frozenset[str]().union(*(each.models or () for each in self._engines.engines))
        models = (*listed, None)
        self._low_marks = {model: (self._ahead(model) - 1) // 2 for model in models}
        ready = {model: self._ready.count(model) for model in models}
        wanted = sum(self._wanted(model, ready) for model in models)
        if is_behind or not wanted:
            return 0
        return await self._lease(wanted, ready, MOST_HELD_BYTES - held_bytes)

    def _ahead(self, model: str | None) -> int:
        """Requests to have ready for a model, or for batches of several (None)."""
        in_time = int(self._rate.per_s(model) * AHEAD_S)
        return min(MOST_AHEAD, max(self._engines.places_for(model), in_time))

    def _wanted(self, model: str | None, ready: Mapping[str | None, int]) -> int:
        """Requests to lease for a model, or for batches of several (None), once they run low.

        Each model for itself: one whose engines are full keeps as many ready, and others that run
        low meanwhile get theirs before an engine waits.
        """
        ahead = self._ahead(model)
        wanted = ahead - ready.get(model, 0)
        is_low = wanted * 2 > ahead or (wanted > 0 and self._engines.has_room(model))
        return wanted if is_low else 0

    async def _lease(self, count: int, ready: Mapping[str | None, int], most_bytes: int) -> int:
        running = Counter(each.tenant for each, _ in self._jobs.values())
        running.update(each.request.tenant for each in self._ready)
        worker = self.worker

        leased = await self._database.write(
            partial(
                lease_requests,
                worker=worker,
                room=count,
                room_of=partial(self._wanted, ready=ready),
                most_bytes=most_bytes,
                running=running,
                now_s=self._now_s(),
            )
        )
        by_input: defaultdict[str, list[LeasedRequest]] = defaultdict(list)
        for each in leased:
            by_input[each.input_key].append(each)
        for key, requests in by_input.items():
            try:
                ready_requests = await asyncio.to_thread(self._read, key, requests)
            except (StoreUnavailableError, DataLostError) as error:
                for each in requests:
                    self._fail(each, f"the input cannot be read: {error.message}")
            except (ValueError, LookupError, TypeError):
                for each in requests:
                    self._fail(each, "the input has changed since it was checked")
            else:
                if worker == self.worker:  # Otherwise this life is over, and so are its leases.
                    for ready_request in ready_requests:
                        self._ready.put(ready_request)
        return len(leased)

    def _read(self, key: str, requests: Sequence[LeasedRequest]) -> list[ReadyRequest]:
        lines = self._objects.ranges(key, [(each.start, each.size) for each in requests])
        bodies = [from_json(line.removeprefix(UTF8_MARK))["body"] for line in lines]
        return [
            ReadyRequest(request, to_json(body), str(body["model"]))
            for request, body in zip(requests, bodies, strict=True)
        ]

    def _pump(self) -> None:
        """Give engines with room the next requests of models that they have."""
        full: set[str] = set()
        while waiting := [model for model in self._ready.models if model not in full]:
            engine = self._engines.take(waiting[0])
            if engine is None:
                full.add(waiting[0])
                continue
            ready = self._ready.take(waiting[0])
            job = start_job(self._run(ready, engine), partial(self._crashed, ready.request))
            job.add_done_callback(partial(self._ended, ready, engine))
            self._jobs[ready.request.key] = ready.request, job

    def _crashed(self, request: LeasedRequest, error: BaseException) -> None:
        """Give back a request that tripped over a mistake of ours, or end it as any that fails."""
        log.error("unexpected error", exc_info=error)
        self._fail(request, "the batch service made a mistake")

    async def _run(self, ready: ReadyRequest, engine: EngineEndpoint) -> None:
        request = ready.request
        try:
            answer = await self._engines.ask(
                engine, request.endpoint, ready.body, expires_s=request.expires_s
            )
        except EngineAbsentError:
            self._ready.put_back(ready)
        except EngineFailedError as error:
            self._fail(request, error.message)
        else:
            record = to_json(_record_of(request, answer), inf_nan_mode="null")
            self._recorder.put(RequestOutcome(request, answer.is_answer, record))
            self._metrics.answered(answer.status)
            self._rate.count(ready.model)

    def _ended(self, ready: ReadyRequest, engine: EngineEndpoint, job: asyncio.Task[None]) -> None:
        """Give the place of a request to the next; also of one that was dropped before it began."""
        engine.running -= 1
        held = self._jobs.get(ready.request.key)
        if held is not None and held[1] is job:  # Else another engine has it already.
            del self._jobs[ready.request.key]
        self._pump()
        if self._runs_low(ready.model) or self._runs_low(None):
            self._is_wanting.set()

    def _runs_low(self, model: str | None) -> bool:
        """Whether to look for more: a request that ends asks this, so it costs two looks."""
        return self._ready.count(model) <= self._low_marks.get(model, 0)

    def _fail(self, request: LeasedRequest, reason: str) -> None:
        """Let a request wait for another try, or end it if it has had them all."""
        attempts = request.attempts + 1
        if attempts >= self._max_attempts:
            message = f"{reason} ({attempts} attempts)"
            error = {"code": "engine_error", "message": message}
            record = {**_head(request), "response": None, "error": error}
            self._recorder.put(RequestOutcome(request, is_answer=False, record=to_json(record)))
            self._metrics.answered(0)
            return
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1))
        due_s = self._now_s() + pause_s * random.uniform(0.75, 1.25)
        self._recorder.put(Return(request, due_s, counts=True))
        self._metrics.retries.inc()

    def _recorded(self, late: int) -> None:
        if late:
            log.warning("late answers discarded", count=late)
            self._metrics.late.inc(late)


def _head(request: LeasedRequest) -> dict[str, Any]:
    return {"id": f"batch_req_line_{request.line}", "custom_id": request.custom_id}


def _record_of(request: LeasedRequest, answer: EngineAnswer) -> dict[str, Any]:
    """A line of the output file or, where the engine refused, of the error file."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id or f"req_line_{request.line}",
        "body": answer.body,
    }
    return {**_head(request), "response": response, "error": None}
