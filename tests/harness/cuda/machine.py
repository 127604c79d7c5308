"""A machine with GPUs that is not there: contexts, streams, memory, and a list of broken rules.

It keeps the books; `library` has the driver's calls over it and `torch_side` the parts of torch.
Work that is queued here runs late (`streams`), and every access is compared with those before it
(`accesses`). What real hardware would punish at its leisure is a `Violation` at once, with the
stacks of both sides. `check` raises what has been found.

What is not modelled: time, caches, kernels that run side by side (one piece of work runs at once),
fragmentation, and peers' links.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Final

from harness.cuda.accesses import AccessLog
from harness.cuda.memory import AddressSpace, Mapping, Physical
from harness.cuda.streams import LEGACY, Clock, Event, Stream, Work, join
from harness.cuda.violations import Kind, Stack, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from harness.cuda.copy_ahead import CopyAhead

GLOBAL: Final = 0
"""Capture mode of a thread that minds the captures of all others; how every thread begins."""

EAGERNESS: Final = (0.0, 0.0, 0.2, 0.8)
"""Chances that a call lets some queued work run, of which a seed takes one: mostly none does."""


class _Thread(threading.local):
    """What the driver keeps for each thread."""

    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.capture_mode = GLOBAL
        self.ahead: CopyAhead | None = None


class Machine:
    """GPUs, as one process has them.

    Args:
        gpu_count: GPUs in the machine.
        visible: Numbers of those that this process may use; all if None.
        memory_bytes: What each has.
        seed: Chooses what runs when.

    Attributes:
        calls: Of each driver call, how many were made.
        submissions: Of each thread, copies and kernels that it has queued, by driver or torch.
        contexts_made: Ordinals of GPUs on which this process has a context.
        violations: What has been found so far.
    """

    def __init__(
        self,
        *,
        gpu_count: int = 1,
        visible: Sequence[int] | None = None,
        memory_bytes: int = 1 << 30,
        seed: int = 0,
    ) -> None:
        self.gpu_count = gpu_count
        self.visible = list(range(gpu_count)) if visible is None else list(visible)
        self.memory_bytes = memory_bytes
        self.has_peers = True
        self.exports_descriptors = True
        self.has_rdma = True
        self.has_batch = True
        self.host_node = -1
        self.reads_registered = True
        self.submissions: Counter[int] = Counter()
        self.refusing: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.calls: Counter[str] = Counter()
        self.contexts_made: set[int] = set()
        self.violations: list[Violation] = []
        self.space = AddressSpace()
        self.handles: dict[int, Physical] = {}
        self.known: Clock = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.used: Counter[int] = Counter()
        self.captures: dict[int, Stack] = {}
        self._pinned: dict[int, tuple[int, AccessLog]] = {}
        self._legacy: dict[int, Stream] = {}
        self._random = random.Random(seed)
        self._eagerness = self._random.choice(EAGERNESS)
        self._numbers = iter(range(1, 1 << 40))
        self._pid = os.getpid()
        self.thread = _Thread()

    # --- What is there --------------------------------------------------------------------

    def uuid_of(self, ordinal: int) -> uuid.UUID:
        """The name of a visible GPU."""
        return self.uuid_of_gpu(self.visible[ordinal])

    @staticmethod
    def uuid_of_gpu(number: int) -> uuid.UUID:
        """The name of a GPU of the machine, visible or not."""
        return uuid.UUID(bytes=bytes(16 * number + i for i in range(16)))

    def counts(self) -> dict[str, int]:
        """Handles, mappings, reservations, pinned ranges, and contexts current in this thread."""
        return {
            "handles": len(self.handles),
            "mappings": len(self.space),
            "reservations": len(self.space.reserved),
            "pinned": len(self._pinned),
            "contexts": len(self.thread.contexts),
        }

    def number(self) -> int:
        """A number that was never given out before."""
        return next(self._numbers)

    # --- Rules ----------------------------------------------------------------------------

    def report(self, kind: Kind, what: str, *others: Stack) -> None:
        """Record a broken rule, noticed here."""
        self.violations.append(self._violation(kind, what, *others))

    @staticmethod
    def _violation(kind: Kind, what: str, *others: Stack) -> Violation:
        return Violation(kind, what, (*map(str, others), str(Stack())))

    def check(self) -> None:
        """Raise what has been found.

        Raises:
            AssertionError: Rules were broken.
        """
        found, self.violations = self.violations, []
        assert not found, f"{len(found)} violations\n" + "\n".join(map(str, found[:5]))

    def take_violations(self) -> list[Kind]:
        """The kinds of what has been found, which is then forgotten."""
        found, self.violations = self.violations, []
        return [violation.kind for violation in found]

    @property
    def current(self) -> int | None:
        """Ordinal of the GPU whose context is current in this thread."""
        contexts = self.thread.contexts
        return contexts[-1] if contexts else None

    def may_call(self, name: str) -> bool:
        """Whether a capture allows an unsafe call to this thread; if not, it is a violation."""
        if not self.captures or self.thread.capture_mode != GLOBAL:
            return True
        self.report(Kind.CAPTURE, f"{name} during a capture", *self.captures.values())
        return False

    def is_refused(self, name: str) -> bool:
        """Whether this is the call that was to fail."""
        if not self.refusing[name]:
            return False
        self.refusing[name] -= 1
        return not self.refusing[name]

    # --- Work -----------------------------------------------------------------------------

    def new_stream(self, device: int, *, is_blocking: bool, priority: int = 0) -> Stream:
        """A stream of one GPU."""
        number = self.number()
        stream = Stream(0x2000 + 16 * number, number, device, is_blocking, priority)
        self.streams[stream.handle] = stream
        return stream

    def stream(self, handle: int | None, device: int) -> Stream | None:
        """The stream of this handle; `LEGACY` is the default stream of `device`."""
        if handle:
            return self.streams.get(handle)
        if device not in self._legacy:
            self._legacy[device] = Stream(LEGACY, self.number(), device, is_blocking=True)
        return self._legacy[device]

    def queue(
        self,
        stream: Stream,
        what: str,
        run: Callable[[], object] | None = None,
        *,
        reads: Iterable[tuple[int, int]] = (),
        writes: Iterable[tuple[int, int]] = (),
    ) -> Work:
        """Queue work; ranges are addresses and sizes, of host memory as well."""
        if stream.capture is not None:
            return Work(what, stream, 0, {}, None, [])  # In the graph, not in the queue.
        self.submissions[threading.get_ident()] += run is not None  # Else it only marks a place.
        stream.count += 1
        work = Work(what, stream, stream.count, stream.clock, run, stream.waits)
        work.ahead = self.thread.ahead
        stream.waits = []
        for other in self._beside(stream):
            join(stream.clock, other.clock)
            if other.last is not None and not other.last.is_done:
                work.after.append(other.last)
        join(stream.clock, self.known)
        stream.clock[stream.number] = work.number
        work.clock = dict(stream.clock)
        stream.last = work
        stream.queue.append(work)
        for is_write, ranges in ((False, reads), (True, writes)):
            for at, nbytes in ranges:
                self._note(work, at, nbytes, is_write=is_write)
        self.drift()
        return work

    def wait(self, stream: Stream, event: Event) -> None:
        """Order what the stream is given from now on after the event."""
        if event.work is not None:
            join(stream.clock, event.work.clock)
            if not event.work.is_done:
                stream.waits.append(event.work)

    def finish(self, *works: Work | None) -> None:
        """Run work and what comes before it; the host knows of it then."""
        for work in works:
            if work is not None:
                self._force(work)
                join(self.known, work.clock)

    def finish_stream(self, stream: Stream) -> None:
        """Run all that is queued on a stream."""
        if stream.capture is not None:
            self.report(Kind.CAPTURE, f"{stream} is waited for while it is captured")
        self.finish(stream.last, *stream.waits)
        join(self.known, stream.clock)  # Events that it waits for may have happened before.

    def finish_device(self, device: int) -> None:
        """Run all that is queued on a GPU."""
        for stream in (*self.streams.values(), *self._legacy.values()):
            if stream.device == device:
                self.finish_stream(stream)

    def drift(self) -> None:
        """Let some of the work run that nothing keeps from running."""
        while self._random.random() < self._eagerness:
            ready = [s for s in (*self.streams.values(), *self._legacy.values()) if s.queue]
            if not ready:
                return
            work = self._random.choice(ready).queue[0]
            if not self._needs_held(work):
                self._force(work)

    @contextlib.contextmanager
    def held(self, stream: Stream) -> Iterator[None]:
        """Keep a stream from running; who waits for it meanwhile commits a violation."""
        stream.is_held = True
        try:
            yield
        finally:
            stream.is_held = False

    def require_free(self, what: str) -> None:
        """What waits for a whole GPU, as some calls may, must not meet a stream that is held."""
        for stream in (*self.streams.values(), *self._legacy.values()):
            if stream.is_held:
                self.report(Kind.WAIT, f"{what} while {stream} is held")

    def _beside(self, stream: Stream) -> list[Stream]:
        """Streams that this one waits for by itself."""
        if stream.handle == LEGACY:
            blocking = [s for s in self.streams.values() if s.is_blocking]
            return [s for s in blocking if s.device == stream.device]
        legacy = self._legacy.get(stream.device)
        return [legacy] if stream.is_blocking and legacy is not None else []

    def _needs_held(self, work: Work) -> bool:
        before = [first for first in work.stream.queue if first.number <= work.number]
        return work.stream.is_held or any(
            self._needs_held(other)
            for first in before
            for other in first.after
            if not other.is_done
        )

    def _force(self, work: Work) -> None:
        stream = work.stream
        while not work.is_done and stream.queue:
            first = stream.queue[0]
            for other in first.after:
                self._force(other)
            if stream.is_held:
                self.report(Kind.WAIT, f"{first} is held, and waited for", first.stack)
                stream.is_held = False
            if stream.queue and stream.queue[0] is first:
                stream.queue.popleft()
                self._run(first)

    def _run(self, work: Work) -> None:
        work.is_done = True
        work.after = []
        gone = any(mapping.is_gone for mapping in work.mappings)
        if gone or not all(self.pinned_log(at) for at, _ in work.host):
            self.report(Kind.REUSED, f"memory went before {work} ran", work.stack)
        elif work.run is not None:
            work.run()
        work.run = None

    # --- Memory ---------------------------------------------------------------------------

    def _note(self, work: Work, at: int, nbytes: int, *, is_write: bool) -> None:
        device, end = work.stream.device, at + nbytes
        while at < end:
            mapping = self.space.find(at)
            if mapping is None:
                self._note_host(work, at, end - at, is_write=is_write)
                return
            allowed = mapping.writers if is_write else mapping.readers
            if device not in allowed:
                self.report(Kind.UNMAPPED, f"{work} has no right to {at:#x}")
                work.run = None
                return
            stop = min(end, mapping.end)
            work.mappings.append(mapping)
            self._compare(
                mapping.memory.log, at - mapping.at, stop - mapping.at, work, is_write=is_write
            )
            at = stop

    def _note_host(self, work: Work, at: int, nbytes: int, *, is_write: bool) -> None:
        if self.space.is_device(at):
            self.report(Kind.UNMAPPED, f"{work} goes to {at:#x}, where no memory is")
            work.run = None
        elif (found := self.pinned_log(at)) is not None:
            start, log = found
            work.host.append((at, nbytes))
            self._compare(log, at - start, at - start + nbytes, work, is_write=is_write)

    def _compare(self, log: AccessLog, start: int, end: int, work: Work, *, is_write: bool) -> None:
        for what, other, stretches in log.note(start, end, work, is_write=is_write):
            if other is None:
                self.report(Kind.UNSET, f"{work} {what}")
                continue
            found = self._violation(Kind.RACE, f"{work} {what}", other.stack)
            ahead = other.ahead if is_write else work.ahead
            if ahead is not None and ahead.is_open:
                ahead.doubt(stretches, found)
            else:
                self.violations.append(found)

    def is_device(self, at: int) -> bool:
        """See `AddressSpace.is_device`; any thread may ask."""
        with self.lock:
            return self.space.is_device(at)

    def pinned_log(self, at: int) -> tuple[int, AccessLog] | None:
        """Start and log of the registered host memory that holds an address; for any thread."""
        with self.lock:
            for start, (nbytes, log) in self._pinned.items():
                if start <= at < start + nbytes:
                    return start, log
        return None

    def pin(self, at: int, nbytes: int) -> bool:
        """Register host memory; False where some of it is registered already. For any thread."""
        with self.lock:
            for start, (size, _) in self._pinned.items():
                if start < at + nbytes and at < start + size:
                    return False
            self._pinned[at] = nbytes, AccessLog(nbytes, is_set=True)
        return True

    def unpin(self, at: int) -> bool:
        """Undo `pin`; False if it was not registered. For any thread."""
        with self.lock:
            if at not in self._pinned:
                return False
            nbytes, _ = self._pinned.pop(at)
            for work in self._queued():
                if any(at <= start < at + nbytes for start, _ in work.host):
                    self.report(Kind.REUSED, f"host memory goes under {work}", work.stack)
        return True

    def unmap(self, mapping: Mapping) -> None:
        """Take memory away, whoever is about to use it."""
        for work in self._queued():
            if mapping in work.mappings:
                self.report(Kind.REUSED, f"memory is unmapped under {work}", work.stack)
        self.space.unmap(mapping)
        self.drop(mapping.memory)

    def drop(self, memory: Physical) -> None:
        """Close memory that nothing of ours holds any more."""
        if not memory.holders:
            if memory.fd >= 0:
                os.close(memory.fd)
            if memory.is_ours:
                self.used[memory.device] -= memory.nbytes

    def _queued(self) -> Iterator[Work]:
        for stream in (*self.streams.values(), *self._legacy.values()):
            yield from stream.queue

    def close(self) -> None:
        """Close what is open of memory that was never given up; what is mapped stays so."""
        mapped = (mapping.memory for mapping in self.space)
        for memory in {*self.handles.values(), *mapped}:
            os.close(memory.fd)
            memory.fd = -1
