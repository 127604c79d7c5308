"""Supervision: bodies that crash are called again, and nothing is silent about it."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import weakref

import pytest

from aqua_protocol.supervision import (
    Loop,
    RestartPolicy,
    SerialExecutor,
    SupervisedTask,
    SupervisedThread,
    failing_loops,
    note_progress,
    restart_counts,
    resting,
    running_loops,
    start_job,
)
from harness.bounds import HANG_S

SECRET = "aqua_0123456789ab_secret"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "policy", RestartPolicy(0.0, 0.0))


def crashing(errors: list[BaseException], done: threading.Event | None = None) -> SupervisedThread:
    """A loop that raises each error once, and then ends."""
    left = iter(errors)

    def body() -> None:
        for error in left:
            raise error
        if done is not None:
            done.set()

    return SupervisedThread(body, "tested", "7")


@pytest.mark.parametrize("error", [ValueError(), MemoryError(), SystemExit(), KeyboardInterrupt()])
def test_a_thread_goes_on_after_anything_that_its_body_raises(error: BaseException) -> None:
    done = threading.Event()
    before = restart_counts().get("tested", 0)
    thread = crashing([error, error], done)
    thread.start()
    assert done.wait(HANG_S)
    assert thread.join(HANG_S)
    assert restart_counts()["tested"] == before + 2
    assert running_loops() == []


def test_pauses_grow_are_bounded_and_drawn() -> None:
    policy = RestartPolicy(first_pause_s=1.0, longest_pause_s=8.0, jitter=lambda _, most: most)
    assert [policy.pause_s(n) for n in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 8, 8, 8]
    drawn = RestartPolicy(first_pause_s=1.0, jitter=lambda least, _: least)
    assert drawn.pause_s(2) == 1.0


def test_a_loop_fails_when_it_has_crashed_often_enough_and_recovers_by_running_steadily(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [0.0]
    policy = RestartPolicy(0.0, 0.0, steady_s=10.0, crashes_allowed=3, clock=lambda: now_s[0])
    commands: queue.SimpleQueue[bool] = queue.SimpleQueue()
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def body() -> None:
        while True:
            answers.put("runs")
            if commands.get(timeout=HANG_S):
                return
            raise ValueError(SECRET)

    thread = SupervisedThread(body, "tested", "7", policy=policy)
    thread.start()
    for expected in ((), (), (), ("tested-7",), ("tested-7",)):
        assert answers.get(timeout=HANG_S) == "runs"
        assert failing_loops() == expected
        commands.put(False)
    assert answers.get(timeout=HANG_S) == "runs"
    now_s[0] = 10.0
    assert failing_loops() == ()
    commands.put(False)  # After a steady run this is the first crash again.
    assert answers.get(timeout=HANG_S) == "runs"
    assert failing_loops() == ()
    commands.put(True)
    assert thread.join(HANG_S)
    # Told when it was new and when it had become a state; by name and place, never by contents.
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(", at")[0] for line in told] == [
        "tested-7 crashed, 1 in a row",
        "tested-7 crashed, 3 in a row",
    ]
    assert "builtins.ValueError" in caplog.text
    assert __file__ in caplog.text
    assert SECRET not in caplog.text


def test_a_body_that_works_without_a_rest_for_too_long_hangs_until_it_goes_on() -> None:
    now_s = [0.0]
    policy = RestartPolicy(0.0, 0.0, hang_s=10.0, clock=lambda: now_s[0])
    works, rests = threading.Event(), threading.Event()
    go_on: queue.SimpleQueue[None] = queue.SimpleQueue()

    def body() -> None:
        works.set()
        go_on.get(timeout=HANG_S)
        note_progress()
        works.set()
        go_on.get(timeout=HANG_S)
        with resting():
            rests.set()
            go_on.get(timeout=HANG_S)

    thread = SupervisedThread(body, "tested", "7", policy=policy)
    assert not thread.is_failing
    thread.start()
    for expected in ((), ("tested-7",)):
        assert works.wait(HANG_S)
        assert failing_loops() == ()
        now_s[0] += 10.0 + len(expected)
        assert failing_loops() == expected
        works.clear()
        go_on.put(None)
    assert rests.wait(HANG_S)
    now_s[0] += 1000.0
    assert failing_loops() == ()
    assert thread.is_resting
    go_on.put(None)
    assert thread.join(HANG_S)


async def test_a_task_hangs_likewise_and_its_pause_after_a_crash_is_a_rest() -> None:
    now_s = [0.0]
    policy = RestartPolicy(HANG_S, HANG_S, hang_s=10.0, clock=lambda: now_s[0])
    hangs, goes_on = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        hangs.set()
        await goes_on.wait()
        raise ValueError

    async with SupervisedTask(body, "tested", policy=policy) as task:
        await hangs.wait()
        now_s[0] = 11.0
        assert failing_loops() == ("tested",)
        goes_on.set()
        for _ in range(2):  # Turns of the loop: the body raises in the first.
            await asyncio.sleep(0)
        assert task.is_resting
        assert failing_loops() == ()


def test_to_rest_outside_of_a_loop_is_nothing() -> None:
    with resting():
        note_progress()


def test_causes_are_told_by_type_and_number(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        try:
            raise FileNotFoundError(2, SECRET)
        except OSError as error:
            raise ValueError(SECRET) from error

    calls = iter([fail])

    def body() -> None:
        for call in calls:
            call()

    thread = SupervisedThread(body, "tested")
    thread.start()
    assert thread.join(HANG_S)
    assert "builtins.ValueError\nwhich came from\n" in caplog.text
    assert "builtins.FileNotFoundError ENOENT" in caplog.text
    assert SECRET not in caplog.text


def test_joining_cuts_a_pause_short_and_gives_up_a_body_that_cannot_end() -> None:
    crashed = threading.Event()
    calls: list[int] = []

    def body() -> None:
        calls.append(1)
        crashed.set()
        raise ValueError

    policy = RestartPolicy(first_pause_s=HANG_S, longest_pause_s=HANG_S, crashes_allowed=3)
    thread = SupervisedThread(body, "tested", policy=policy)
    thread.start()
    assert crashed.wait(HANG_S)
    assert thread.join(HANG_S / 2)
    assert len(calls) == 3


def test_a_thread_that_was_never_started_is_joined_at_once() -> None:
    assert SupervisedThread(lambda: None, "tested").join()


async def test_a_task_goes_on_after_an_error_and_after_a_foreign_cancellation() -> None:
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    done = asyncio.Event()
    waits = iter([cancelled])

    async def body() -> None:
        for future in waits:
            await future
        if restart_counts()["tested-task"] < 2:
            raise MemoryError
        done.set()
        await asyncio.Event().wait()

    async with SupervisedTask(body, "tested-task") as task, asyncio.timeout(HANG_S):
        await done.wait()
        assert running_loops() == [task]
    assert restart_counts()["tested-task"] == 2
    assert running_loops() == []


async def test_stopping_a_task_in_its_pause_ends_it() -> None:
    crashed = asyncio.Event()

    async def body() -> None:
        crashed.set()
        raise ValueError

    policy = RestartPolicy(first_pause_s=HANG_S, longest_pause_s=HANG_S)
    async with SupervisedTask(body, "tested", policy=policy):
        await crashed.wait()
    assert running_loops() == []


async def test_what_a_job_did_not_foresee_is_told_to_its_owner() -> None:
    told: list[BaseException] = []

    async def fail() -> None:
        raise ValueError

    await asyncio.wait({start_job(fail(), told.append)})
    assert [type(error) for error in told] == [ValueError]


def test_an_executor_does_its_jobs_in_order_and_outlives_those_that_fail() -> None:
    executor = SerialExecutor("tested")
    order: list[int] = []

    def job(number: int) -> int:
        order.append(number)
        if number % 2:
            raise SystemExit
        return number

    futures = [executor.submit(job, number) for number in range(6)]
    executor.shutdown()
    executor.shutdown()
    assert order == list(range(6))
    assert [future.exception() is None for future in futures] == [True, False] * 3
    assert futures[4].result() == 4
    assert running_loops() == []


def test_an_executor_outlives_waiters_that_left_and_does_what_it_had_begun() -> None:
    before = restart_counts()
    executor = SerialExecutor("tested")
    begun, go_on, done = threading.Event(), threading.Event(), list[str]()

    def job() -> None:
        begun.set()
        go_on.wait(HANG_S)
        done.append("begun")

    first = executor.submit(job)
    begun.wait(HANG_S)
    second = executor.submit(done.append, "not begun")
    first.cancel()
    assert second.cancel()
    go_on.set()
    last = executor.submit(done.append, "last")
    last.result(HANG_S)
    executor.shutdown()
    assert done == ["begun", "last"]
    assert restart_counts() == before


def test_the_thread_of_an_executor_ends_with_it() -> None:
    executor = SerialExecutor("tested")
    ended = threading.Event()
    executor.submit(lambda: None).result(HANG_S)
    weakref.finalize(executor, ended.set)
    thread = next(t for t in threading.enumerate() if t.name == "tested")
    del executor
    gc.collect()
    assert ended.is_set()
    thread.join(HANG_S)
    assert not thread.is_alive()
