from __future__ import annotations

from dataclasses import dataclass

from aqualib.engines.vllm.requests.queue import PolicyRequestQueue


@dataclass(eq=False)
class Request:
    request_id: str


def queue_of(names: str) -> tuple[PolicyRequestQueue, dict[str, Request]]:
    queue = PolicyRequestQueue()
    requests = {name: Request(name) for name in names}
    for request in requests.values():
        queue.add_request(request)
    return queue, requests


def test_nobody_is_seen_before_the_gate_opens_but_everyone_counts() -> None:
    queue, requests = queue_of("abc")
    assert not queue
    assert len(queue) == 3
    assert list(queue) == list(requests.values())


def test_the_admitted_come_in_the_decided_order() -> None:
    queue, requests = queue_of("abc")
    queue.admit(["c", "a", "unknown"])
    assert queue.peek_request() is requests["c"]
    assert [queue.pop_request(), queue.pop_request()] == [requests["c"], requests["a"]]
    assert not queue
    assert len(queue) == 1


def test_what_the_loop_skips_stays_admitted_at_the_head() -> None:
    queue, requests = queue_of("abc")
    queue.admit("abc")
    skipped = [queue.pop_request(), queue.pop_request()]
    queue.prepend_requests(reversed(skipped))
    assert queue.pop_request() is requests["a"]
    assert len(queue) == 2


def test_a_preempted_request_waits_for_its_turn() -> None:
    queue, requests = queue_of("a")
    queue.admit("a")
    preempted = Request("b")
    queue.prepend_request(preempted)
    assert queue.pop_request() is requests["a"]
    assert not queue
    assert list(queue) == [preempted]


def test_aborted_requests_leave_both_the_line_and_the_gate() -> None:
    queue, requests = queue_of("abc")
    queue.admit("ab")
    queue.remove_requests([requests["a"], requests["c"], Request("never")])
    assert list(queue) == [requests["b"]]
    assert queue.pop_request() is requests["b"]


def test_a_new_decision_replaces_the_last_one() -> None:
    queue, requests = queue_of("ab")
    queue.admit("a")
    queue.admit("b")
    assert queue.pop_request() is requests["b"]
    assert not queue
