"""Engines that meet the same online requests in the same minutes, by turns; what of each became.

An engine is a real vLLM as a server runs it (`served_engine`). While one has its turn, a fraction
of a second, all others are stopped and their clocks stand still (`paused_clock`): so all of them
meet the same machine, and a machine that slows down slows down all of them. Which one comes next is
drawn, as the one before leaves its caches. In each the thread that runs the model has a core of its
own.

What a run is judged by is here, too. Ratios are to the mean of two engines that serve the online
requests alone: how far these differ from each other is the noise of all figures. What is left for
offline work is the time in which they have nothing to do; an *ideal filler* computes in it what an
engine computes that has offline work alone.

Source: ConServe section 6 compares with Online-Only in the same way; the ideal filler is ours.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Final

from aqua_demo.engines.online_load import Lengths, OnlineLoad, busy_s, p99
from aqua_demo.engines.paused_clock import TurnGroup
from aqua_demo.engines.scale import with_aqua
from aqua_demo.processes import LOG_TAIL_LINES, DemoError
from aqua_protocol.supervision import SupervisedThread, resting

TURN_S: Final = 0.25
"""Of an engine: short beside the minutes in which a machine changes, long beside a step. Doubled, a
machine that changes meets engines less alike."""

OBJECTIVE_FACTOR: Final = 2.0
"""Objectives over the 99th percentile of what requests take alone: tight. Doubled, steps in gaps
may be twice as long."""
MODEL_PROCESS: Final = "VLLM::Worker"
"""What vLLM calls the process that runs the model, where that is one of its own, as on CPUs."""
AT_ONCE: Final = 24
"""Offline requests that an engine has at any time: more than fit into memory. Doubled, more
wait."""

Run = dict[str, Any]
"""What became of an order: `online` and `offline` requests, `seconds` until the last online one
ended, and the engine's counters (`counted`) and gauges (`levels`)."""


@dataclass(frozen=True, slots=True)
class Order:
    """What an engine serves in a race.

    Args:
        online: Requests that come when they are due.
        offline: A file of offline requests, or None.
        at_once: Of these, so many are kept at the engine.
        seconds: It lasts so long at least.
        drains: Whether offline requests that began are waited for.
        seed: Of the prompts of online requests.
    """

    online: OnlineLoad
    offline: Path | None = None
    at_once: int = 0
    seconds: float = 0.0
    drains: bool = False
    seed: int = 0

    def to_json(self) -> str:
        """Write it as an engine reads it."""
        return json.dumps(asdict(self) | {"online": self.online.arrivals}, default=str)


class ServedEngine:
    """One engine and its clients, stopped while it has no turn.

    Args:
        place: Beginning of its files' names; the last part is what it is called.
        model: Its folder.
        engine: Options as vLLM calls them.
        aqua: Options of the adapter; None for a vLLM as it is.
        python: Of an environment with vLLM.

    Attributes:
        fault: A file that, once it is there, has checkpoints come back as zeros.
        samples: How it stood, as it said again and again since its order.
    """

    def __init__(
        self,
        place: Path,
        model: Path,
        engine: Mapping[str, Any],
        aqua: Mapping[str, Any] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.name: Final = place.name
        self.fault: Final = place.with_suffix(".fault")
        self.samples: list[dict[str, float]] = []
        self._is_busy = True  # It starts.
        clock, self._log = place.with_suffix(".clock"), place.with_suffix(".log")
        job = {
            "model": str(model),
            "engine": with_aqua(engine, aqua),
            "clock": str(clock),
            "fault": str(self.fault),
            "co_serves": aqua is not None,
        }
        command = [python, "-m", "aqua_demo.engines.served_engine", json.dumps(job)]
        self._group = TurnGroup(command, clock, self._log)
        self._process = self._group.leader
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._reader = SupervisedThread(self._read, "demo-engine", place.name)
        self._reader.start()

    def await_ready(self) -> None:
        """Wait until it can be given orders; engines start beside each other."""
        self._checked(self._answers.get())
        self._group.pause()
        self._group.give_core(MODEL_PROCESS)

    def close(self) -> None:
        """End it, at once if it is amid something; harmless when repeated."""
        if self._is_busy:
            self._group.end(patience_s=0.0)
        else:
            self._group.end()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def order(self, order: Order) -> None:
        """Have it serve this from its next turn on."""
        assert self._process.stdin is not None
        self.samples = []
        self._is_busy = True
        self._process.stdin.write(order.to_json() + "\n")
        self._process.stdin.flush()

    def turn(self, seconds: float | None) -> Run | None:
        """Let it run for so long, or to its end; what became of its order, if it has ended.

        Raises:
            DemoError: It failed; the end of its log is in the message.
        """
        self._group.resume()
        run: Run | None = None
        with contextlib.suppress(Empty):
            run = self._checked(self._answers.get(timeout=seconds))
        self._group.pause()
        return run

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            with resting():  # It only listens.
                self._listen(self._process.stdout)
        finally:  # Who waits for an answer learns that none comes.
            self._answers.put(None)

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            if not line.endswith("\n"):
                return  # It was killed amid this one.
            if line.startswith("answer "):
                self._answers.put(json.loads(line.removeprefix("answer ")))
            elif line.startswith("sample "):
                self.samples.append(json.loads(line.removeprefix("sample ")))

    def _checked(self, answer: Any) -> Any:  # noqa: ANN401 - a run, or that it is ready
        if answer is None:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise DemoError(
                f"the engine {self.name} ended early:\n{tail}",
                remedy=f"The whole log is {self._log}. An engine needs vLLM beside Aqua: in a"
                " checkout `make demo-coserve` makes an environment with one for CPUs.",
            )
        self._is_busy = False
        return answer


Engines = Mapping[str, ServedEngine]


def race(
    engines: Engines, orders: Mapping[str, Order], on_turn: Callable[[], None] = lambda: None
) -> dict[str, Run]:
    """Engines serve their orders by turns.

    Args:
        engines: By name.
        orders: Of those that take part.
        on_turn: Called after each turn.
    """
    for name, order in orders.items():
        engines[name].order(order)
    drawn = list(orders)
    shuffler = random.Random(0)
    ended: dict[str, Run] = {}
    while len(ended) < len(orders):
        shuffler.shuffle(drawn)
        for name in drawn:
            # The last one waits for no other, but is looked at.
            if name not in ended and (run := engines[name].turn(TURN_S)) is not None:
                ended[name] = run
            on_turn()
    return ended


def serve(engine: ServedEngine, order: Order) -> Run:
    """An engine serves an order while all others stand still."""
    return race({engine.name: engine}, {engine.name: order})[engine.name]


def measure_alone(ask: Callable[[OnlineLoad], Run], lengths: Lengths) -> dict[str, float]:
    """What a request takes by itself, and by it the objectives.

    Args:
        ask: Has an engine without offline work serve a load.
        lengths: Of the requests, which come one by one.

    Returns:
        Seconds: `service_s` on average, `ttft_s` and `tpot_s`.
    """
    rows = [row for pair in lengths for row in ask(OnlineLoad.at_once([pair]))["online"]]
    return {
        "service_s": statistics.fmean(row["end_s"] for row in rows),
        "ttft_s": OBJECTIVE_FACTOR * p99(list(map(ttft, rows))),
        "tpot_s": OBJECTIVE_FACTOR * p99(list(map(tpot, rows))),
    }


# --- Figures --------------------------------------------------------------------------------


def ttft(row: Run) -> float:
    """Seconds from arrival to the first token."""
    return float(row["token_s"][0] - row["arrival_s"])


def tpot(row: Run) -> float:
    """Seconds between two tokens of a request, on average."""
    return float(row["end_s"] - row["token_s"][0]) / max(1, int(row["output_tokens"]) - 1)


def p99_ttft(run: Run) -> float:
    """The 99th percentile over its online requests, seconds."""
    return p99(list(map(ttft, run["online"])))


def p99_tpot(run: Run) -> float:
    """The 99th percentile over its online requests, seconds."""
    return p99(list(map(tpot, run["online"])))


def offline_tokens(run: Run) -> int:
    """Tokens of offline requests, prompts and answers, until the last online request ended."""
    until_s = run["seconds"]
    known = (sum(at_s <= until_s for at_s in row["token_s"]) for row in run["offline"])
    prompts = (row["prompt_tokens"] for row in run["offline"])
    return sum(prompt + count for prompt, count in zip(prompts, known, strict=True) if count)


def offline_rate(run: Run) -> float:
    """Tokens of `offline_tokens` a second."""
    return float(offline_tokens(run) / run["seconds"])


def busy_share(run: Run) -> float:
    """Share of the time in which any online request was unfinished."""
    spans = [(row["arrival_s"], row["end_s"]) for row in run["online"]]
    return busy_s(spans) / float(run["seconds"])


def differing(one: Iterable[Run], other: Iterable[Run]) -> int:
    """Requests whose answers differ, as far as both have tokens."""
    pairs = zip(one, other, strict=False)
    return sum(
        any(a != b for a, b in zip(ours["tokens"], stock["tokens"], strict=False))
        for ours, stock in pairs
    )
