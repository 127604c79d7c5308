"""The console's batch section: its words, and that no batch service can do anything to the page."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from pydantic import SecretStr

from aqua_coordinator.console import batch_watch
from aqua_coordinator.console.batch_markup import batches_markup, no_batches_markup, span
from aqua_coordinator.console.batch_watch import BatchWatch
from aqua_protocol.batches import BatchSummary, JobView
from aqua_protocol.errors import UnavailableError
from harness.scripted_server import Answer, Request, ScriptedServer

HOSTILE = "\"><script>alert(1)</script><img src=x onerror='alert(1)'>&amp;"
HOUR_S = 3600
KNOWN_TAGS = {
    *("section", "header", "h2", "p", "ul", "li", "div", "svg", "rect"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}


def batch(**changes: object) -> JobView:
    fields: dict[str, Any] = {
        "batch_id": "batch_1",
        "tenant": "research",
        "endpoint": "/v1/completions",
        "model": "llama",
        "status": "in_progress",
        "created_s": 0,
        "expires_s": 24 * HOUR_S,
        "total": 50_000,
        "completed": 11_990,
        "failed": 10,
        "requests_per_s": 2.5,
        "seconds_left": 4.2 * HOUR_S,
    }
    return JobView.model_validate(fields | changes)


def overview(*batches: JobView, **changes: object) -> BatchSummary:
    fields: dict[str, Any] = {
        "at_s": 4 * HOUR_S,
        "batches": batches,
        "counts": {"in_progress": len(batches)} if batches else {},
        "open_requests": 38_000,
        "late_batches": 0,
        "engines": 2,
        "absent_engines": 0,
    }
    return BatchSummary.model_validate(fields | changes)


def words(html: str) -> list[str]:
    return [word for word in re.split(r"<[^>]*>", html) if word]


def test_a_batch_tells_progress_rate_end_deadline_and_errors() -> None:
    said = words(batches_markup(overview(batch())))
    assert said[1] == "1 running, 38,000 requests to go, 2.5/s"
    assert said[-8:] == [
        *("batch_1", "research", "llama", "12,000 of 50,000", "10", "2.5/s", "in 4 h 12 min"),
        "in 20 h 0 min",
    ]
    assert 'class="risk"' not in batches_markup(overview(batch()))


@pytest.mark.parametrize(
    ("changes", "end", "deadline"),
    [
        ({"is_late": True}, "in 4 h 12 min", "in 20 h 0 min, at risk: goes first"),
        ({"seconds_left": 22 * HOUR_S}, "in 22 h 0 min", "in 20 h 0 min, missed by 2 h 0 min"),
        ({"expires_s": HOUR_S}, "in 4 h 12 min", "over"),
    ],
)
def test_a_deadline_that_may_be_missed_stands_out(
    changes: dict[str, Any], end: str, deadline: str
) -> None:
    html = batches_markup(overview(batch(**changes)))
    assert words(html)[-2:] == [end, deadline]
    assert f'<td class="risk">{deadline}</td>' in html


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"requests_per_s": 0.0, "seconds_left": None}, "nothing ends now"),
        ({"requests_per_s": None, "seconds_left": None}, "not known yet"),
        ({"status": "finalizing", "seconds_left": None}, "writing its output"),
        ({"status": "cancelled"}, "cancelled"),
    ],
)
def test_what_a_batch_does_is_said_in_words(changes: dict[str, Any], end: str) -> None:
    assert f"<td>{end}</td>" in batches_markup(overview(batch(**changes)))


def test_what_is_wrong_comes_first() -> None:
    made = overview(
        batch(status="failed", fault="invalid_json", completed=0, total=0),
        counts={"in_progress": 120, "failed": 1},
        late_batches=2,
        absent_engines=1,
    )
    html = batches_markup(made)
    assert "2 batches go first" in html
    assert "1 of 2 engines cannot be reached, or have no room." in html
    assert "120 more are open than are listed here." in html
    assert "10 (invalid_json)" in html
    assert "There is no batch yet." in batches_markup(overview())


def test_no_name_becomes_markup() -> None:
    made = overview(
        batch(batch_id=HOSTILE, tenant=HOSTILE, model=HOSTILE, fault=HOSTILE, status=HOSTILE),
        counts={HOSTILE: 1},
    )
    tags: set[str] = set()
    names: set[str] = set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.add(tag)
            names.update(name for name, _ in attrs)

    for html in (batches_markup(made), no_batches_markup(HOSTILE)):
        Reader().feed(html)
    assert tags <= KNOWN_TAGS
    assert not [name for name in names if name.startswith("on") or name in {"src", "href"}]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (90, "1 min"), (5400, "1 h 30 min"), (180_000, "2 d 2 h")],
)
def test_times_are_said_as_people_do(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.fixture
def answers() -> Iterator[tuple[ScriptedServer, list[Answer]]]:
    """A server that gives these answers, the last one again and again."""
    given: list[Answer] = []

    def answer(_: Request) -> Answer:
        return given.pop(0) if len(given) > 1 else given[0]

    with ScriptedServer(answer) as server:
        yield server, given


async def test_it_asks_as_an_operator_once_for_all_who_look(
    answers: tuple[ScriptedServer, list[Answer]],
) -> None:
    server, given = answers
    known = overview(batch())
    given.append(Answer(200, known.model_dump() | {"new_in_2028": [1]}))
    now_s = [0.0]
    watch = BatchWatch(f"{server.url}/v1", SecretStr("t" * 32), lambda: now_s[0])
    assert await watch.overview() == known == await watch.overview()
    (request,) = server.requests
    assert (request.method, request.path) == ("GET", "/aqua/batches")
    assert request.headers["Authorization"] == f"Bearer {'t' * 32}"
    now_s[0] += batch_watch.KEPT_S
    await watch.overview()
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(401, {}), "refuses this coordinator: give both the same AQUA_BATCH_OPERATOR_TOKEN"),
        (Answer(404, {}), "has no /aqua/batches"),
        (Answer(302, {}), "answers with HTTP 302"),
        (Answer(500, {}), "answers with HTTP 500"),
        (Answer(200, b"<html>"), "does not understand"),
        (Answer(200, {"batches": [{}]}), "does not understand"),
        (Answer(200, b" " * (batch_watch.LONGEST_ANSWER_BYTES + 1)), "answers without end"),
    ],
)
async def test_whatever_it_answers_is_said_and_said_again_without_asking(
    answers: tuple[ScriptedServer, list[Answer]], answer: Answer, said: str
) -> None:
    server, given = answers
    given.append(answer)
    watch = BatchWatch(server.url, None, lambda: 0.0)
    for _ in range(2):
        with pytest.raises(UnavailableError, match=said):
            await watch.overview()
    assert len(server.requests) == 1


async def test_one_that_hangs_costs_its_time_and_one_that_is_away_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_watch, "TIMEOUT_S", 0.05)
    over = threading.Event()

    def hang(_: Request) -> Answer:
        over.wait(60)
        return Answer()

    with ScriptedServer(hang) as server:
        try:
            with pytest.raises(UnavailableError, match=r"does not answer within 0\.05 s"):
                await BatchWatch(server.url, None).overview()
        finally:
            over.set()
    with pytest.raises(UnavailableError, match=r"service does not answer\."):
        await BatchWatch(server.url, None).overview()
