"""Supervision: every thread and task that lives long runs here, so that none ends unheard.

A *loop* is a body that runs until its owner ends it: the function of a thread, or the coroutine
function of a task. What a body did not foresee ends that call of it and never the loop: the crash
is counted and logged, and after a pause the body is called again. Pauses grow, are jittered and
bounded. A loop that crashes again and again goes on being started, and is *failing* until it has
run steadily: readiness and metrics then name it.

What a body owes for this: what it works on stays where its next call finds it, not in its local
variables, and the next call finishes it, repeats it or hands it back. What may be repeated is safe
to repeat. And where it waits for something to do, it says so (`resting`): a body that has worked on
without a rest for longer than anything takes hangs, and its loop is failing as well, until it goes
on. A thread that hangs cannot be ended, so that is all that is done about it.

What is logged of a crash are places and types. The message of an unforeseen exception is left out,
since it may quote a token, a prompt or a page.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import queue
import random
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self, TypeAlias, TypeVar

logger: Final = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

MAX_FRAMES: Final = 20
"""Innermost frames of a traceback that are logged: a loop is fewer deep. Doubled, endless recursion
fills two pages of a log."""

MAX_DOUBLINGS: Final = 16
"""Keeps the power small however long an outage lasts. Doubled, nothing changes: the longest pause
is reached before."""


CRASHES: Final = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)
"""After these a thread goes on: all that Python raises but to end a frame on purpose."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a crashed body is called again, and when its loop is called failing.

    Attributes:
        first_pause_s: After the first crash, before jitter; each further pause is twice the last.
        longest_pause_s: Of any pause.
        steady_s: A body that ran so long has left its earlier crashes behind.
        crashes_allowed: In a row, before a loop is failing.
        hang_s: Without a rest, before a loop is failing. To pin 256 GiB takes 90 s; doubled, a loop
            that hangs is noticed as much later.
        clock: Seconds, monotonic.
        jitter: Draws the share of a pause that is waited, from its bounds.
    """

    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    steady_s: float = 30.0
    crashes_allowed: int = 3
    hang_s: float = 120.0
    clock: Callable[[], float] = lambda: time.monotonic()  # noqa: PLW0108 - found at the call
    jitter: Callable[[float, float], float] = lambda least, most: random.uniform(least, most)  # noqa: PLW0108 - as above

    def pause_s(self, crashes: int) -> float:
        """Seconds to wait after this many crashes in a row."""
        doubled_s: float = self.first_pause_s * 2 ** min(crashes - 1, MAX_DOUBLINGS)
        return min(doubled_s, self.longest_pause_s) * self.jitter(0.5, 1.0)


class Loop:
    """What threads and tasks under supervision share.

    Args:
        body: Called again after each crash, until it returns.
        kind: Names what it does, the same in every process: for metrics.
        detail: Tells this one from others of its kind, in logs and for readiness.

    Attributes:
        policy: Of every loop that is given none.
    """

    policy: ClassVar[RestartPolicy] = RestartPolicy()

    def __init__(
        self,
        body: Callable[[], Any],
        kind: str,
        detail: str = "",
        *,
        policy: RestartPolicy | None = None,
    ) -> None:
        self.body: Final = body
        self.kind: Final = kind
        self.name: Final = f"{kind}-{detail}" if detail else kind
        self._policy = policy or self.policy
        self._crashes = 0
        self._crashed_at_s = float("-inf")
        self._trace = ""
        self._busy_since_s: float | None = None
        _restarts[kind] += 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {self._crashes} crashes in a row>"

    @property
    def is_crashing(self) -> bool:
        """Whether it has crashed again and again, and not run steadily since."""
        since_s = self._policy.clock() - self._crashed_at_s
        return self._crashes >= self._policy.crashes_allowed and since_s < self._policy.steady_s

    @property
    def is_resting(self) -> bool:
        """Whether its body waits for something to do, or for its next call."""
        return self._busy_since_s is None

    @property
    def is_failing(self) -> bool:
        """Whether it is crashing, or hangs: its work is not done."""
        since_s = self._busy_since_s
        hangs = since_s is not None and self._policy.clock() - since_s > self._policy.hang_s
        return hangs or self.is_crashing

    def _begin(self) -> float:
        """Note that the body is called; the time."""
        _current.set(self)
        self._busy_since_s = began_s = self._policy.clock()
        return began_s

    @contextmanager
    def _rest(self) -> Iterator[None]:
        self._busy_since_s = None
        try:
            yield
        finally:
            self._busy_since_s = self._policy.clock()

    def _crash(self, error: BaseException, began_s: float) -> float:
        """Note a crash of a call that began then; the seconds to wait before the next."""
        _restarts[self.kind] += 1
        self._busy_since_s = None
        self._crashed_at_s = self._policy.clock()
        steady = self._crashed_at_s - began_s >= self._policy.steady_s
        self._crashes = 1 if steady else self._crashes + 1
        with suppress(Exception):  # Not even a log that fails ends a loop.
            # Told when it is new and when it has become a state, not for each of thousands.
            before, self._trace = self._trace, trace_of(error)
            if self._trace != before or self._crashes == self._policy.crashes_allowed:
                logger.error(
                    "%s crashed, %d in a row, at\n%s", self.name, self._crashes, self._trace
                )
        return self._policy.pause_s(self._crashes)


class SupervisedThread(Loop):
    """A daemon thread whose body is called until it returns."""

    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: The process may not have another thread.
        """
        self._is_ending = threading.Event()
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        thread.start()
        self._thread = thread

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for a body that was told to end; whether the thread has ended, if it ever began.

        A pause is cut short, for the body may have to tidy up. One that crashes even so is given
        up once its loop is failing.
        """
        if self._thread is None:
            return True
        self._is_ending.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        _running.add(self)
        try:
            while True:
                began_s = self._begin()
                try:
                    self.body()
                except CRASHES as error:
                    pause_s = self._crash(error, began_s)
                else:
                    return
                if self._is_ending.wait(pause_s) and self.is_crashing:
                    return
        finally:
            _running.discard(self)


class SupervisedTask(Loop):
    """A task whose body, a coroutine function, is called until it returns or is stopped."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task, on the running event loop."""
        assert self._task is None, f"{self!r} is started twice"
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def stop(self) -> None:
        """Cancel the body and wait for its end. Harmless when repeated."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        _running.add(self)
        try:
            while True:
                began_s = self._begin()
                try:
                    await self.body()
                except (Exception, asyncio.CancelledError) as error:
                    # Not stopped, it waited for something that was cancelled: a crash.
                    if task.cancelling() and isinstance(error, asyncio.CancelledError):
                        raise
                    pause_s = self._crash(error, began_s)
                    if task.cancelling():
                        return
                else:
                    return
                await asyncio.sleep(pause_s)
        finally:
            _running.discard(self)


def start_job(
    work: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]
) -> asyncio.Task[None]:
    """A task that ends by itself; what it did not foresee is told to `failed`, for its owner."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task


_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class SerialExecutor:
    """Does jobs one after the other on a supervised daemon thread, which its first job starts.

    What a job raises is its future's. The thread ends with the last reference to the executor.
    """

    def __init__(self, kind: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = SupervisedThread(partial(_work, self._jobs), kind)
        self._is_started = False
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False

    def submit(self, work: Callable[..., ResultT], *arguments: object) -> Future[ResultT]:
        """Do `work` after what was submitted before, unless it is cancelled until then.

        Called by one thread.
        """
        assert self._end.alive, "submitted after the shutdown"
        if not self._is_started:
            self._thread.start()
            self._is_started = True
        future: Future[ResultT] = Future()
        self._jobs.put((future, partial(work, *arguments)))
        return future

    def shutdown(self) -> None:
        """Finish what was submitted, and end. Harmless when repeated."""
        self._end()
        self._thread.join()


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while True:
        with resting():
            job = jobs.get()
        if job is None:
            return
        future, work = job
        # From here on it cannot be cancelled: a result that none may take would end the loop.
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the waiter's, whatever it is
                future.set_exception(error)
        del job, future, work  # A job keeps tensors.


def resting() -> AbstractContextManager[None]:
    """Within the block the loop of this thread or task waits for something to do.

    It begins its next work with the end of the block; elsewhere than in a loop it is nothing.
    """
    loop = _current.get()
    return nullcontext() if loop is None else loop._rest()  # noqa: SLF001 - of this module


def note_progress() -> None:
    """The loop of this thread or task has finished a part of its work, and begins the next."""
    with resting():
        pass


def running_loops() -> list[Loop]:
    """Every loop of this process that has been started and not ended, by name."""
    return sorted(_running.copy(), key=lambda loop: loop.name)


def failing_loops() -> tuple[str, ...]:
    """Names of the loops that crash again and again or hang: not all of the work is done."""
    return tuple(loop.name for loop in running_loops() if loop.is_failing)


def restart_counts() -> Mapping[str, int]:
    """How often loops of each kind that this process has had crashed and were started again."""
    return MappingProxyType(_restarts)


def trace_of(error: BaseException) -> str:
    """Where an exception and its causes come from, and their types: all that a log may say."""
    told: list[str] = []
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        kind = type(following)
        number = following.errno if isinstance(following, OSError) else None
        why = f" {errno.errorcode.get(number, number)}" if number is not None else ""
        frames = traceback.format_tb(following.__traceback__, -MAX_FRAMES)
        told.append(f"{''.join(frames)}{kind.__module__}.{kind.__qualname__}{why}")
        implicit = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or implicit
    return "\nwhich came from\n".join(told)


_current: Final[ContextVar[Loop | None]] = ContextVar("loop", default=None)
_running: Final[set[Loop]] = set()
_restarts: Final[Counter[str]] = Counter()
os.register_at_fork(after_in_child=_running.clear)  # A child has none of its parent's threads.
