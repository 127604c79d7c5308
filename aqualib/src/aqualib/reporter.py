"""The reporter: tells the coordinator a member's full state, for ever, and never blocks anyone.

A report is sent soon after something changed and at least once per heartbeat. Changes in between
are coalesced: what is sent is the state at the moment of sending, so nothing has to be queued, and
a report that got lost is repaired by the next. The first report registers the member.

An absent coordinator is a normal state. The reporter then tries again with growing, jittered pauses
up to a bound, logs the beginning and the end of the absence once each, and goes on as long as the
member lives. A member without a coordinator is the same member: `deliver=None` makes a reporter
that tells nothing and never waits.

An answer is handled before the books it names are confirmed in the next report: a producer must
refuse the tokens of lost books by the time it says that it knows the new ones.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from aqua_protocol import PROTOCOL_VERSION, AquaError
from aqua_protocol.ids import BooksId, Incarnation, Revision, new_incarnation
from aqua_protocol.members import MemberAck
from aqua_protocol.supervision import RestartPolicy, SupervisedThread, resting
from aqualib.version import AQUALIB_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

logger: Final = logging.getLogger("aqualib")

ReportT = TypeVar("ReportT")
AckT = TypeVar("AckT", bound=MemberAck)

MIN_INTERVAL_S: Final = 0.05
"""Seconds between reports at least: a reclaim of a thousand slabs makes dozens of reports, not a
thousand. The first change after a pause is reported at once. Doubled, half the reports of a
reclaim."""

MAX_HEARTBEAT_S: Final = 60.0
"""Seconds between reports at most: as far as a coordinator of many members stretches them. Doubled,
nothing changes."""

FIRST_PAUSE_S: Final = 0.1
"""Seconds of the first pause while no coordinator answers. Doubled, one that restarts is found 0.1
s later."""

MAX_PAUSE_S: Final = 5.0
"""Seconds of the longest pause; none exceeds the heartbeat, for a coordinator is sized for that
many reports, and after its return the books must be right soon. Doubled, it matters only to
heartbeats above 5 s."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Says who a member is, the same in all its reports.

    Members of one `domain` can share memory; `model` is for people; `incarnation` is this life of
    the process.
    """

    node: str
    domain: str
    gpu_uuid: str
    model: str | None = None
    incarnation: Incarnation = field(default_factory=new_incarnation)

    def stamp(self, revision: Revision, books_id: BooksId | None) -> dict[str, Any]:
        """The fields of `MemberIdentity`, for the report with this revision."""
        versions = {"protocol_version": PROTOCOL_VERSION, "aqualib_version": AQUALIB_VERSION}
        life = {"revision": revision, "books_id": books_id, "pid": os.getpid()}
        return asdict(self) | versions | life


class Reporter(Generic[ReportT, AckT]):
    """Sends one member's reports from a background thread.

    Args:
        build: Makes the report of this moment; called on the reporter's thread.
        deliver: Sends it and returns the answer; an `AquaError` means that it failed. None where
            there is no coordinator.
        on_ack: Handles the answer to a report; called on the reporter's thread. An `AquaError`
            counts as if no answer had come.
        heartbeat_s: Longest silence; a coordinator asks for a shorter one.
        name: Of the thread, and in the log.
    """

    def __init__(
        self,
        build: Callable[[Revision, BooksId | None], ReportT],
        deliver: Callable[[ReportT], AckT] | None,
        on_ack: Callable[[ReportT, AckT], None],
        *,
        heartbeat_s: float = MAX_HEARTBEAT_S,
        name: str = "member",
    ) -> None:
        self._build = build
        self._deliver = deliver
        self._on_ack = on_ack
        self._longest_silence_s = heartbeat_s
        self._heartbeat_s = heartbeat_s
        self._name = name
        self._books_id: BooksId | None = None
        self._revision = 0
        self._failures = 0
        self._error: AquaError | None = None
        # Counts changes; the books know everything up to `_known`.
        self._changes = 1
        self._known = 0
        self._closing = False
        self._last_report = False
        self._started_at_s = float("-inf")
        self._not_before_s = float("-inf")
        self._condition = threading.Condition()
        self._thread = SupervisedThread(self._run, "aqua-report", name)

    def start(self) -> None:
        """Begin to report."""
        if self._deliver is not None:
            self._thread.start()

    def changed(self) -> None:
        """Report soon. Takes a microsecond; may be called under the caller's locks."""
        with self._condition:
            self._changes += 1
            self._condition.notify_all()

    @property
    def error(self) -> AquaError | None:
        """Why the last report failed; None while the coordinator answers."""
        return self._error

    @property
    def books_id(self) -> BooksId | None:
        """The books that this member has confirmed or is about to; None before any answer."""
        return self._books_id

    def flush(self, timeout_s: float) -> bool:
        """Wait until the books know the state of this moment; False when they do not in time."""
        if self._deliver is None:
            return False
        with self._condition:
            self._changes += 1
            goal = self._changes
            self._condition.notify_all()
            return self._condition.wait_for(lambda: self._known >= goal, timeout_s)

    def close(self, *, last_report: bool = False, timeout_s: float = 5.0) -> None:
        """Stop after a report under way. Harmless when repeated.

        Args:
            last_report: Try once more to tell what the books do not know yet, unless the
                coordinator is absent anyway.
            timeout_s: Bound of the wait.
        """
        with self._condition:
            if not self._closing:
                self._closing = True
                self._last_report = last_report
            self._condition.notify_all()
        self._thread.join(timeout_s)

    def leave(self, remove: Callable[[], None], *, last_report: bool = False) -> None:
        """Close, and call `remove` to say goodbye, unless the coordinator is absent anyway."""
        self.close(last_report=last_report)
        if self._deliver is None or self._error is not None:
            return
        try:
            remove()
        except AquaError as error:
            logger.info("%s could not say that it leaves: %s", self._name, error)

    # --- The thread -----------------------------------------------------------------------

    def _run(self) -> None:
        assert self._deliver is not None, "started with a coordinator"
        while self._wait_until_due():
            with self._condition:
                goal = self._changes
            self._started_at_s = time.monotonic()
            report = self._build(Revision(self._revision), self._books_id)
            self._revision += 1
            try:
                ack = self._deliver(report)
                self._on_ack(report, ack)
            except AquaError as error:
                self._note_failure(error)
            else:
                self._note_answer(ack, goal)

    def _wait_until_due(self) -> bool:
        """Wait for the next report's time; False when it was the last."""
        with self._condition:
            while not self._closing:
                pause_s = self._due_at_s() - time.monotonic()
                if pause_s <= 0:
                    return True
                with resting():
                    self._condition.wait(pause_s)
            owes_last, self._last_report = self._last_report, False
            return owes_last and self._error is None and self._changes > self._known

    def _due_at_s(self) -> float:
        if self._changes > self._known:
            return self._not_before_s
        return max(self._not_before_s, self._started_at_s + self._heartbeat_s)

    def _note_failure(self, error: AquaError) -> None:
        if self._error is None or self._error.code != error.code:
            logger.warning("%s cannot report: %s", self._name, error)
        self._error = error
        self._failures += 1
        absence = RestartPolicy(FIRST_PAUSE_S, min(MAX_PAUSE_S, self._heartbeat_s))
        self._not_before_s = time.monotonic() + absence.pause_s(self._failures)

    def _note_answer(self, ack: AckT, goal: int) -> None:
        if self._error is not None:
            logger.info("%s reports again", self._name)
        self._error = None
        self._failures = 0
        self._heartbeat_s = min(self._longest_silence_s, max(ack.heartbeat_s, MIN_INTERVAL_S))
        self._not_before_s = self._started_at_s + MIN_INTERVAL_S
        with self._condition:
            if ack.books_id != self._books_id:
                self._books_id = BooksId(ack.books_id)
                self._changes += 1
                goal = self._changes - 1
            self._known = max(self._known, goal)
            self._condition.notify_all()
