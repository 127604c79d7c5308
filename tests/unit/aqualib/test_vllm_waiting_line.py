from __future__ import annotations

from dataclasses import dataclass

from aqualib.engines.vllm.waiting_line import WaitingLine


@dataclass(eq=False)
class Request:
    request_id: str


def line_of(names: str) -> tuple[WaitingLine, dict[str, Request]]:
    line = WaitingLine()
    requests = {name: Request(name) for name in names}
    for request in requests.values():
        line.add_request(request)
    return line, requests


def test_nobody_is_seen_before_the_gate_opens_but_everyone_counts() -> None:
    line, requests = line_of("abc")
    assert not line
    assert len(line) == 3
    assert list(line) == list(requests.values())


def test_the_admitted_come_in_the_decided_order() -> None:
    line, requests = line_of("abc")
    line.admit(["c", "a", "unknown"])
    assert line.peek_request() is requests["c"]
    assert [line.pop_request(), line.pop_request()] == [requests["c"], requests["a"]]
    assert not line
    assert len(line) == 1


def test_what_the_loop_skips_stays_admitted_at_the_head() -> None:
    line, requests = line_of("abc")
    line.admit("abc")
    skipped = [line.pop_request(), line.pop_request()]
    line.prepend_requests(reversed(skipped))
    assert line.pop_request() is requests["a"]
    assert len(line) == 2


def test_a_preempted_request_waits_for_its_turn() -> None:
    line, requests = line_of("a")
    line.admit("a")
    preempted = Request("b")
    line.prepend_request(preempted)
    assert line.pop_request() is requests["a"]
    assert not line
    assert list(line) == [preempted]


def test_aborted_requests_leave_both_the_line_and_the_gate() -> None:
    line, requests = line_of("abc")
    line.admit("ab")
    line.remove_requests([requests["a"], requests["c"], Request("never")])
    assert list(line) == [requests["b"]]
    assert line.pop_request() is requests["b"]


def test_a_new_decision_replaces_the_last_one() -> None:
    line, requests = line_of("ab")
    line.admit("a")
    line.admit("b")
    assert line.pop_request() is requests["b"]
    assert not line
