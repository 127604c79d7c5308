"""The reporter: full state on change and by heartbeat, for ever, and nobody waits for it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from aqua_protocol import UnavailableError
from aqua_protocol.errors import UnauthenticatedError
from aqua_protocol.members import MemberAck
from aqualib import reporter as reporter_module
from aqualib.reporter import Reporter
from harness.bounds import HANG_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqua_protocol import AquaError
    from aqua_protocol.ids import BooksId, Revision

NEVER_S = 3600.0


@dataclass
class Books:
    """A coordinator in miniature: remembers reports, and can be absent, slow or replaced."""

    books_id: str = "books-1"
    heartbeat_s: float = NEVER_S
    error: AquaError | None = None
    reports: list[tuple[int, str | None, str]] = field(default_factory=list)
    acked: list[tuple[int, str]] = field(default_factory=list)
    state: str = "initial"
    open_gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.open_gate.set()

    def build(self, revision: Revision, books_id: BooksId | None) -> tuple[int, str | None, str]:
        return revision, books_id, self.state

    def deliver(self, report: tuple[int, str | None, str]) -> MemberAck:
        self.reports.append(report)
        assert self.open_gate.wait(HANG_S)
        if self.error is not None:
            raise self.error
        return MemberAck(books_id=self.books_id, heartbeat_s=self.heartbeat_s)

    def take(self, report: tuple[int, str | None, str], ack: MemberAck) -> None:
        self.acked.append((report[0], ack.books_id))


@pytest.fixture
def books() -> Books:
    return Books()


Tested = Reporter[tuple[int, str | None, str], MemberAck]


@contextlib.contextmanager
def reporting(books: Books, **options: Any) -> Iterator[Tested]:  # noqa: ANN401 - a Reporter's
    """A reporter to `books`, closed at the end; `deliver` and `on_ack` may take their place."""
    settings = {"deliver": books.deliver, "on_ack": books.take, "heartbeat_s": NEVER_S, **options}
    reporter: Tested = Reporter(books.build, name="tested", **settings)
    try:
        yield reporter
    finally:
        books.open_gate.set()
        reporter.close()


def is_reporting() -> bool:
    """Whether the thread of the tested reporter lives."""
    return "aqua-report-tested" in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "MIN_INTERVAL_S", 0.001)
    monkeypatch.setattr(reporter_module, "MAX_PAUSE_S", 0.005)


@pytest.fixture
def reporter(books: Books, _quick: None) -> Iterator[Tested]:
    with reporting(books) as reporter:
        yield reporter


class SkippedTime:
    """The time of a reporter that never waits: each wait takes as long as asked, and no time."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def condition(self) -> threading.Condition:
        return _Skipping(self)


class _Skipping(threading.Condition):
    def __init__(self, time: SkippedTime) -> None:
        super().__init__()
        self._time = time

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None, "a reporter looks again by itself"
        self._time.now_s += timeout
        return False


def test_the_first_report_registers_and_the_second_confirms_the_books(
    books: Books, reporter: Tested
) -> None:
    reporter.start()
    until(lambda: len(books.acked) >= 2, "the books are confirmed")
    assert books.reports == [(0, None, "initial"), (1, "books-1", "initial")]
    assert reporter.books_id == "books-1"


@pytest.mark.usefixtures("_quick")
def test_an_answer_is_handled_before_its_books_are_confirmed(books: Books) -> None:
    handled_by_then: list[int] = []

    def deliver(report: tuple[int, str | None, str]) -> MemberAck:
        handled_by_then.append(len(books.acked))
        return books.deliver(report)

    with reporting(books, deliver=deliver) as reporter:
        reporter.start()
        assert reporter.flush(HANG_S)
    assert handled_by_then == list(range(len(handled_by_then)))


def test_a_change_is_reported_with_the_state_of_the_moment(books: Books, reporter: Tested) -> None:
    reporter.start()
    assert reporter.flush(HANG_S)
    books.state = "changed"
    reporter.changed()
    until(lambda: books.reports[-1][2] == "changed", "the change is reported")


def test_changes_during_a_report_are_coalesced_into_one(books: Books, reporter: Tested) -> None:
    reporter.start()
    until(lambda: len(books.acked) >= 2, "the books are confirmed")
    books.open_gate.clear()
    reporter.changed()
    until(lambda: len(books.reports) == 3, "a report is under way")
    for number in range(1000):
        books.state = f"state-{number}"
        reporter.changed()
    books.open_gate.set()
    assert reporter.flush(HANG_S)
    assert len(books.reports) <= 5
    assert books.reports[-1][2] == "state-999"


def test_nothing_new_is_reported_by_heartbeat(books: Books, reporter: Tested) -> None:
    # The coordinator asks for a shorter silence than we would keep.
    books.heartbeat_s = 0.001
    reporter.start()
    until(lambda: len(books.reports) >= 10, "ten heartbeats")
    revisions = [revision for revision, _, _ in books.reports]
    assert revisions == list(range(len(revisions)))


def test_an_absent_coordinator_is_tried_for_ever_and_blocks_nobody(
    books: Books, reporter: Tested
) -> None:
    books.error = UnavailableError("nobody there")
    reporter.start()
    until(lambda: len(books.reports) >= 20, "twenty attempts")
    assert reporter.error is books.error
    assert not reporter.flush(0.01)
    books.error = None
    assert reporter.flush(HANG_S)
    assert reporter.error is None


def test_an_absence_is_logged_once_and_a_new_reason_again(
    books: Books, reporter: Tested, caplog: pytest.LogCaptureFixture
) -> None:
    books.error = UnavailableError("nobody there")
    with caplog.at_level("INFO", "aqualib"):
        reporter.start()
        until(lambda: len(books.reports) >= 5, "five attempts")
        books.error = UnauthenticatedError("token withdrawn")
        seen = len(books.reports)
        until(lambda: len(books.reports) >= seen + 5, "five more attempts")
        books.error = None
        assert reporter.flush(HANG_S)
    told = [record.getMessage() for record in caplog.records]
    assert sum("nobody there" in line for line in told) == 1
    assert sum("token withdrawn" in line for line in told) == 1
    assert sum("reports again" in line for line in told) == 1


def pauses(
    monkeypatch: pytest.MonkeyPatch,
    books: Books,
    **options: Any,  # noqa: ANN401 - a Reporter's
) -> list[float]:
    """Seconds between each of fifty attempts and the next."""
    time, tried_at_s = SkippedTime(), list[float]()
    monkeypatch.setattr(reporter_module, "time", time)
    threads = SimpleNamespace(Condition=time.condition, Thread=threading.Thread)
    monkeypatch.setattr(reporter_module, "threading", threads)

    def deliver(report: tuple[int, str | None, str]) -> MemberAck:
        tried_at_s.append(time.now_s)
        if len(tried_at_s) == 51:
            books.open_gate.clear()
        return books.deliver(report)

    reporter: Tested = Reporter(books.build, deliver, books.take, **options)
    try:
        reporter.start()
        until(lambda: not books.open_gate.is_set(), "fifty pauses")
        return [later_s - s for s, later_s in pairwise(tried_at_s)]
    finally:
        books.open_gate.set()
        reporter.close()


@pytest.mark.parametrize(("options", "kept_s"), [({}, 20.0), ({"heartbeat_s": 2.0}, 2.0)])
def test_reports_are_as_rare_as_the_coordinator_asks_unless_a_member_is_configured(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float], kept_s: float
) -> None:
    # The first two are to join and to confirm the books.
    assert pauses(monkeypatch, Books(heartbeat_s=20.0), **options)[2:] == pytest.approx(
        [kept_s] * 48
    )


@pytest.mark.parametrize("heartbeat_s", [NEVER_S, 0.5])
def test_pauses_grow_up_to_a_bound_and_none_exceeds_the_heartbeat(
    monkeypatch: pytest.MonkeyPatch, heartbeat_s: float
) -> None:
    bound_s = min(reporter_module.MAX_PAUSE_S, heartbeat_s)
    books = Books(error=UnavailableError("nobody there"))
    for number, pause_s in enumerate(pauses(monkeypatch, books, heartbeat_s=heartbeat_s)):
        longest_s = min(reporter_module.FIRST_PAUSE_S * 2**number, bound_s)
        assert longest_s * 0.499 < pause_s < longest_s * 1.001


def test_books_that_were_replaced_are_confirmed_at_once(books: Books, reporter: Tested) -> None:
    reporter.start()
    assert reporter.flush(HANG_S)
    books.books_id = "books-2"
    reporter.changed()
    until(lambda: books.reports[-1][1] == "books-2", "the new books are confirmed")


@pytest.mark.usefixtures("_quick")
def test_an_answer_that_cannot_be_handled_confirms_nothing(books: Books) -> None:
    def refuse(_: tuple[int, str | None, str], __: MemberAck) -> None:
        raise UnavailableError("the key is no key")

    with reporting(books, on_ack=refuse) as reporter:
        reporter.start()
        until(lambda: len(books.reports) >= 3, "three attempts")
    assert {books_id for _, books_id, _ in books.reports} == {None}


def test_closing_ends_the_thread_and_may_be_repeated(books: Books, reporter: Tested) -> None:
    reporter.start()
    assert reporter.flush(HANG_S)
    assert is_reporting()
    reporter.close()
    reporter.close()
    assert not is_reporting()


def test_a_last_report_tells_the_final_state(books: Books, reporter: Tested) -> None:
    reporter.start()
    assert reporter.flush(HANG_S)
    books.state = "final"
    reporter.changed()
    reporter.close(last_report=True)
    assert books.reports[-1][2] == "final"


def test_a_last_report_waits_for_no_absent_coordinator(books: Books, reporter: Tested) -> None:
    books.error = UnavailableError("nobody there")
    reporter.start()
    until(lambda: reporter.error is not None, "the absence is noticed")
    reporter.close(last_report=True)
    assert not is_reporting()
