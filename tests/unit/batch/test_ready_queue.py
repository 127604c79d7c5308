"""Leased requests wait in the order in which they came, each model for itself, and none is lost."""

import pytest

from aqua_batch.service.dispatch.ready_queue import ReadyQueue, ReadyRequest
from aqua_batch.service.rows.request_rows import LeasedRequest


def ready(model: str, line: int, batch: int = 1) -> ReadyRequest:
    request = LeasedRequest(batch, line, f"{line}", "t", "/v1/completions", "k", 0, line, 1, 0, 0)
    return ReadyRequest(request, b"{}", model)


def queue_of(*entries: ReadyRequest) -> ReadyQueue:
    queue = ReadyQueue()
    for each in entries:
        queue.put(each)
    return queue


def test_models_take_turns_and_each_keeps_its_order() -> None:
    queue = queue_of(ready("a", 1), ready("a", 2), ready("b", 3), ready("a", 4), ready("b", 5))
    taken = []
    while queue.models:
        taken.append(queue.take(queue.models[0]).request.line)
    assert taken == [1, 3, 2, 5, 4]


def test_what_is_put_back_is_next() -> None:
    queue = queue_of(ready("a", 1), ready("a", 2))
    first = queue.take("a")
    queue.put_back(first)
    assert queue.take("a") is first


def test_counts_follow_what_is_there() -> None:
    queue = queue_of(ready("a", 1), ready("b", 2), ready("b", 4, batch=2))
    assert (queue.count(None), queue.count("b"), queue.count("c")) == (3, 2, 0)
    queue.drop({2})
    assert [each.request.line for each in queue] == [1, 2]
    assert queue.count("b") == 1
    queue.take("b")
    assert queue.models == ("a",)
    queue.clear()
    assert (queue.count(None), list(queue)) == (0, [])


def test_a_model_without_requests_has_none_to_take() -> None:
    queue = queue_of(ready("a", 1))
    queue.take("a")
    with pytest.raises(KeyError):
        queue.take("a")
