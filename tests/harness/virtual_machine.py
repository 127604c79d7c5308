"""Processes and threads that are none: real code with threads, on a clock that is told.

Each thread is a greenlet: one runs at a time, and another takes over only where the code waits, at
a lock that is held, a condition, a queue, a sleep, a selector. What runs next is drawn by the seed,
so a run is repeated by its seed, byte for byte, and an hour passes in seconds.

The code under test is the product's own, which finds stand-ins for `threading`, `time` and so on
(`virtual_modules`) and for sockets (`virtual_sockets`). A process is killed as the kernel does it:
its threads never run again, its sockets close, its pidfds become readable.

What it leaves out: preemption between two waits. A race of two threads over plain memory is for
other tests; races of processes and messages are what this is for.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from greenlet import greenlet

FIRST_FD: Final = 1 << 40
"""Beyond every real descriptor, so that the two are told apart."""
EPOCH_S: Final = 1_700_000_000.0
"""Unix time at which every run begins."""


class Machine:
    """The clock, the order of events, and all processes.

    Args:
        seed: Of every choice.

    Attributes:
        now_s: Seconds since the run began.
        steps: Events that have run.
    """

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.steps = 0
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._main = greenlet.getcurrent()
        self._running: Process | None = None
        self.descriptors: dict[int, Descriptor] = {}
        self._fds = itertools.count(FIRST_FD)
        self.listeners: dict[str, Any] = {}
        self.processes: list[Process] = []
        self.latency_s = 0.001
        """Longest way of a packet, drawn anew for each."""

    # --- Events ----------------------------------------------------------------------

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Run `act` after a delay; of events at one moment any may come first."""
        order = self.random.random()
        heapq.heappush(self._events, (self.now_s + delay_s, order, next(self._numbers), act))

    def step(self) -> None:
        """Run the next event."""
        at_s, _, _, act = heapq.heappop(self._events)
        self.now_s = max(self.now_s, at_s)
        self.steps += 1
        act()

    def close(self) -> None:
        """End every thread, so that none goes on when it is collected."""
        for process in self.processes:
            process.bury()

    # --- Processes and threads -------------------------------------------------------

    @property
    def process(self) -> Process:
        """Whose thread is running."""
        assert self._running is not None, "no process runs"
        return self._running

    def resume(self, thread: greenlet, process: Process, value: object = None) -> None:
        """Let a thread go on, unless its process is dead or stopped."""
        if not process.is_alive or thread.dead:
            return
        if process.is_stopped:
            process.held_up.append(lambda: self.resume(thread, process, value))
            return
        before, self._running = self._running, process
        thread.parent = greenlet.getcurrent()
        try:
            thread.switch(value)
        finally:
            self._running = before

    def park(self, timeout_s: float | None = None) -> Waiter:
        """What to wait with: hand it to whoever shall wake it, then call `wait`."""
        return Waiter(self, timeout_s)

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait."""
        self.park(max(0.0, seconds)).wait()

    def add(self, descriptor: Descriptor) -> int:
        """Number a descriptor."""
        number = next(self._fds)
        self.descriptors[number] = descriptor
        return number


class Waiter:
    """A thread that waits for something, or for a time to pass; used once."""

    def __init__(self, machine: Machine, timeout_s: float | None) -> None:
        self._machine = machine
        self._thread = greenlet.getcurrent()
        self._process = machine.process
        self.is_over = False
        if timeout_s is not None:
            machine.after(max(0.0, timeout_s), lambda: self._end(woken=False))

    def wait(self) -> bool:
        """Wait; False when only the time has passed."""
        assert self._thread is greenlet.getcurrent(), "another thread's"
        return bool(self._thread.parent.switch())

    def wake(self) -> None:
        """Let the thread go on soon. Harmless when repeated."""
        if not self.is_over:
            self.is_over = True
            self._machine.after(0.0, lambda: self._go_on(woken=True))

    def _end(self, *, woken: bool) -> None:
        if not self.is_over:
            self.is_over = True
            self._go_on(woken=woken)

    def _go_on(self, *, woken: bool) -> None:
        self._machine.resume(self._thread, self._process, woken)


class Process:
    """A process: threads that live and die together.

    Attributes:
        skew_s: How far its clock is ahead of the machine's.
        on_death: Called when it is gone.
    """

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.pid = 1000 + len(machine.processes)
        self.is_alive = True
        self.is_stopped = False
        self.skew_s = 0.0
        self.held_up: list[Callable[[], None]] = []
        self.on_death: list[Callable[[], None]] = []
        self.channels: list[Descriptor] = []
        self.watchers: list[Descriptor] = []
        self._threads: list[greenlet] = []
        machine.processes.append(self)

    def start(self, run: Callable[[], object]) -> greenlet:
        """A new thread, which begins soon."""
        thread = greenlet(lambda _: run())
        # Kept for ever: a greenlet that is collected would run its `finally` blocks.
        self._threads.append(thread)
        if len(self._threads) > 64:
            self._threads = [thread for thread in self._threads if not thread.dead]
        self.machine.after(0.0, lambda: self.machine.resume(thread, self))
        return thread

    def kill(self) -> None:
        """End it here and now."""
        if not self.is_alive:
            return
        self.is_alive = False
        for channel in list(self.channels):
            channel.close()
        for act in list(self.on_death):
            act()
        for watcher in self.watchers:
            watcher.notify()

    def bury(self) -> None:
        """End its threads for good; whatever they still do is done to a world that is over."""
        for thread in self._threads:
            if not thread.dead:
                thread.parent = greenlet.getcurrent()
                with contextlib.suppress(BaseException):
                    thread.throw()

    def stop(self) -> None:
        """Let none of its threads run until `go_on`."""
        self.is_stopped = True

    def go_on(self) -> None:
        """Undo `stop`."""
        self.is_stopped = False
        held_up, self.held_up = self.held_up, []
        for act in held_up:
            self.machine.after(0.0, act)


# --- What modules find under the names of the standard library ---------------------------


class Lock:
    """`threading.Lock` and `RLock`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._owner: greenlet | None = None
        self._count = 0
        self._waiting: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, also again."""
        me = greenlet.getcurrent()
        while self._owner is not None and self._owner is not me:
            if not blocking:
                return False
            waiter = self._machine.park(None if timeout < 0 else timeout)
            self._waiting.append(waiter)
            if not waiter.wait():
                return False
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        """Let the next have it."""
        self._count -= 1
        if not self._count:
            self._owner = None
            while self._waiting:
                waiter = self._waiting.popleft()
                if not waiter.is_over:
                    waiter.wake()
                    break

    def locked(self) -> bool:
        """Whether anyone has it."""
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, machine: Machine, lock: Lock | None = None) -> None:
        self._machine = machine
        self._lock = lock or Lock(machine)
        self._waiting: list[Waiter] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be notified."""
        waiter = self._machine.park(timeout)
        self._waiting.append(waiter)
        self._lock.release()
        woken = waiter.wait()
        self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:  # noqa: ANN401 - the predicate's
        """Wait until it holds."""
        end_s = None if timeout is None else self._machine.now_s + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - self._machine.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify_all(self) -> None:
        """Wake all."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.wake()

    def notify(self, n: int = 1) -> None:
        """Wake some."""
        waiting, self._waiting = self._waiting[:n], self._waiting[n:]
        for waiter in waiting:
            waiter.wake()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Event:
    """`threading.Event`."""

    def __init__(self, machine: Machine) -> None:
        self._is_set = False
        self._changed = Condition(machine)

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def set(self) -> None:
        """Wake who waits."""
        self._is_set = True
        self._changed.notify_all()

    def clear(self) -> None:
        """Undo `set`."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set."""
        with self._changed:
            return bool(self._changed.wait_for(self.is_set, timeout))


class Thread:
    """`threading.Thread`, of the process that makes it."""

    def __init__(
        self,
        machine: Machine,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        self._machine = machine
        self._run: Callable[[], object] = lambda: target(*args, **(kwargs or {}))
        self._is_done = Event(machine)
        self._thread: greenlet | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = self._machine.process.start(self._body)

    def _body(self) -> None:
        self._run()
        self._is_done.set()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread is not None and not self._is_done.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._is_done.wait(timeout)


class SimpleQueue:
    """`queue.SimpleQueue`."""

    def __init__(self, machine: Machine) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition(machine)

    def put(self, item: object) -> None:
        """Add one."""
        self._items.append(item)
        self._changed.notify_all()

    def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - of any kind
        """Take the oldest."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout):
                raise queue.Empty
            return self._items.popleft()

    def empty(self) -> bool:
        """Whether there is none."""
        return not self._items


# --- Descriptors --------------------------------------------------------------------------


class Descriptor:
    """Something that a selector can wait for."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.number = machine.add(self)
        self._waiting: list[Waiter] = []

    def fileno(self) -> int:
        """Its number, -1 once closed."""
        return self.number

    def is_readable(self) -> bool:
        """Whether reading would not wait."""
        raise NotImplementedError

    def is_writable(self) -> bool:
        """Whether writing would not wait."""
        return True

    def watch(self, waiter: Waiter) -> None:
        """Wake this one at the next change."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.is_over]
        self._waiting.append(waiter)

    def notify(self) -> None:
        """It has changed."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.wake()

    def close(self) -> None:
        """Give the number back."""
        self.machine.descriptors.pop(self.number, None)
        self.number = -1
