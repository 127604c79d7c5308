"""Which of the scheduler's classes vLLM gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("name", ["LendingScheduler", "AquaScheduler"])
def test_asynchronous_scheduling_gets_the_class_made_for_it(name: str) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    import aqualib.engines.vllm

    def made(kind: type, *, is_async: bool) -> type:
        settings = SimpleNamespace(async_scheduling=is_async)
        return type(kind.__new__(kind, SimpleNamespace(scheduler_config=settings)))

    plain = getattr(aqualib.engines.vllm, name)
    overlapping = made(plain, is_async=True)
    assert issubclass(overlapping, plain)
    assert issubclass(overlapping, AsyncScheduler)
    assert overlapping.__name__ == f"Async{name}"
    assert made(plain, is_async=False) is plain
    assert not issubclass(plain, AsyncScheduler)
    assert made(overlapping, is_async=True) is overlapping
    somebody_elses = type("SomebodyElses", (plain,), {})
    assert made(somebody_elses, is_async=True) is somebody_elses
