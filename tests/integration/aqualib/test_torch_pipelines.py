"""Stock pipelines of diffusers and transformers lend and take back, as the tutorial has them."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from aqualib.engines.cpu_memory import CpuMemoryLimit
from aqualib.engines.torch_loop import TorchLoop
from aqualib.producer.device import EmulatedMemory
from aqualib.producer.informer import Informer
from aqualib.producer.offer_rule import OfferBytes, ReclaimBytes
from aqualib.producer.profile import Profile
from harness.bounds import HANG_S, until
from harness.cluster import new_cluster
from harness.producers import lending
from harness.raw_consumer import RawConsumer, TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Callable

TUTORIAL: Final = Path(__file__).resolve().parents[3] / "docs/tutorials/lending-pipelines.md"
SLAB: Final = 256 << 10
MEMORY: Final = 8 << 20
CALM_S: Final = 5.0
PROFILE: Final = Profile(
    slab_bytes=SLAB,
    spare_bytes=MEMORY,
    steady_queue_length=1,
    least_offer_bytes=SLAB,
    calm_s=CALM_S,
)

# Both warn about themselves and each other; not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def tutorial() -> Any:  # noqa: ANN401 - a script, by its path
    spec = importlib.util.spec_from_file_location(
        "lending_pipelines", TUTORIAL.with_name("lending_pipelines.py")
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


SCRIPT: Final = tutorial()


class SteppedLimit(CpuMemoryLimit):
    """Does something at the end of chosen steps, on the pipeline's own thread and in its midst."""

    def __init__(self, memory: EmulatedMemory) -> None:
        super().__init__(memory, headroom_bytes=SCRIPT.HEADROOM_BYTES)
        self.after: deque[Callable[[], object]] = deque()

    def step_ended(self) -> None:
        super().step_ended()
        if self.after:
            self.after.popleft()()


@pytest.mark.parametrize("kind", SCRIPT.MAKERS)
def test_a_stock_pipeline_lends_and_takes_back_between_its_own_steps(kind: str) -> None:
    def maker() -> Callable[[TorchLoop, range], torch.Tensor]:
        torch.manual_seed(0)
        made: Callable[[TorchLoop, range], torch.Tensor] = SCRIPT.MAKERS[kind]()
        return made

    with CpuMemoryLimit(EmulatedMemory(MEMORY)) as alone:
        loop = TorchLoop(alone, queue_length=lambda: 0)
        make = maker()
        expected, expected_four = make(loop, range(1)), make(loop, range(4))

    issuer = TokenIssuer()
    memory = EmulatedMemory(MEMORY)
    waiting: deque[int] = deque([0])
    with (
        SteppedLimit(memory) as limit,
        lending(issuer, 0, device=memory, slab_bytes=SLAB) as producer,
        ExitStack() as consumers,
        ThreadPoolExecutor(1) as thread,
    ):
        make = maker()
        loop = TorchLoop(limit, queue_length=lambda: len(waiting))
        informer = Informer(producer, loop, PROFILE)
        decisions: list[object] = []

        def look(now_s: float) -> None:
            decisions.append(thread.submit(informer.look, now_s).result())

        SCRIPT.serve_some(make, loop, waiting)

        def attach() -> None:
            consumer = consumers.enter_context(RawConsumer(producer.endpoint))
            consumer.attach(issuer.token(producer.offered_bytes))
            attached.append(consumer)

        attached: list[RawConsumer] = []
        limit.after.extend(
            [
                lambda: look(0.0),
                lambda: look(CALM_S),
                attach,
            ]
        )
        waiting.append(0)
        assert torch.equal(SCRIPT.serve_some(make, loop, waiting), expected)
        assert not limit.after
        lent = producer.leased_bytes
        assert decisions == [None, OfferBytes(MEMORY)]
        assert lent == producer.offered_bytes > MEMORY // 2
        assert limit.limit_bytes + lent <= MEMORY

        # What a batch needs is lent: the requests are served one by one.
        waiting.extend(range(4))
        assert torch.equal(SCRIPT.serve_some(make, loop, waiting), expected)
        assert list(waiting) == [1, 2, 3]

        def give_back() -> None:
            for slab in attached[0].await_reclaim():
                attached[0].give_back(slab)
            until(lambda: not producer.committed_bytes, "all slabs are closed")

        # A request's steps, in which a burst arrives.
        limit.after.extend(
            [
                lambda: waiting.extend(range(4)),
                lambda: look(CALM_S),
                give_back,
                lambda: look(CALM_S),
            ]
        )
        waiting.clear()
        waiting.append(0)
        assert torch.equal(SCRIPT.serve_some(make, loop, waiting), expected)
        assert not limit.after
        assert decisions[2:] == [ReclaimBytes(lent), None]
        assert MEMORY - limit.limit_bytes < SLAB
        assert torch.equal(SCRIPT.serve_some(make, loop, waiting), expected_four)


class SlowTutorial:
    """Stops what the script waits for: the informer between two slabs, and then the borrower."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.borrower: subprocess.Popen[str] | None = None
        self._slab_count = 0
        self._served_count = 0
        self._go_on = threading.Event()
        self._serve = SCRIPT.serve_some
        patch.setattr(SCRIPT, "EmulatedMemory", self._memory)
        patch.setattr(SCRIPT, "serve_some", self._served)

    def entered(self, borrower: subprocess.Popen[str]) -> None:
        """The burst begins, whatever is lent."""
        self.borrower = borrower
        borrower.send_signal(signal.SIGSTOP)

    def asked(self) -> None:
        """The script asks for Enter: it thinks that everything is lent."""
        self._go_on.set()

    def _memory(self, total_bytes: int) -> EmulatedMemory:
        memory = EmulatedMemory(total_bytes)
        take = memory.take

        def slowly(nbytes: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                if self._slab_count:
                    assert self._go_on.wait(HANG_S), "the script does not go on"
                self._slab_count += 1
            take(nbytes)

        memory.take = slowly  # type: ignore[method-assign] # what the informer makes slabs of
        return memory

    def _served(self, *arguments: Any) -> torch.Tensor:  # noqa: ANN401 - as of `serve_some`
        # The second image that began after the first slab was there: the script has seen it.
        self._served_count += self._slab_count
        if self._served_count > 1:
            self._go_on.set()
        made: torch.Tensor = self._serve(*arguments)
        if self.borrower is not None and len(made) == SCRIPT.BATCH:
            self.borrower.send_signal(signal.SIGCONT)
        return made


def test_the_tutorial_goes_as_it_says_however_slow_its_informer_and_its_borrower_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (borrow,) = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)
    borrowers = []
    slow = SlowTutorial(monkeypatch)
    with new_cluster() as cluster:
        cluster.start_coordinator()
        monkeypatch.setenv("AQUA_COORDINATOR_URL", cluster.url)
        monkeypatch.setenv("AQUA_SOCKET_DIR", str(cluster.directory))
        monkeypatch.setenv("AQUA_SLAB_BYTES", "1MiB")

        def press_enter(prompt: str) -> str:
            assert "burst" in prompt
            slow.asked()
            borrower = subprocess.Popen(
                [sys.executable, "-u", "-c", borrow],
                stdout=subprocess.PIPE,
                env=os.environ,
                text=True,
            )
            borrowers.append(borrower)
            assert borrower.stdout is not None
            assert borrower.stdout.readline() == "in borrowed memory\n"
            slow.entered(borrower)
            return ""

        monkeypatch.setattr("builtins.input", press_enter)
        try:
            SCRIPT.main("images")
            (borrower,) = borrowers
            told, _ = borrower.communicate(timeout=HANG_S)
        finally:
            for borrower in borrowers:
                borrower.kill()
                borrower.wait()
    assert told.endswith("every byte is there\n")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "lending 14 MiB"
    assert lines[-1] == "4 at once, 0 MiB lent"
