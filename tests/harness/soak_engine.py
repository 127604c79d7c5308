"""`make soak-engine`: one real vLLM under Aqua in a storm, and whether any answer changes.

    python -m harness.soak_engine --minutes 30        rounds until then
    python -m harness.soak_engine --minutes 0.5       one round at least

A round is everything once, in an order drawn by the seed: what `harness.engine_storm` has happen to
requests inside the engine, and meanwhile each `Fault` to the cluster around it: a coordinator, and
producers whose memory the engine pages to. Faults wait for what they mean to meet, so a slow
machine has as many of them as a fast one, in more time. Then everybody rests and is counted.

It fails if an answer differs from that of vLLM alone, if something is left at rest or grows over
the rounds, or if the storm did not happen. At the end loads are zeroed: answers must change then,
or nothing was shown.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

import httpx

from aqua_cli.output import say
from aqua_cli.program import ExitCode
from aqua_cli.progress import progress
from aqua_protocol import MIB
from harness.bounds import HANG_S, until
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.engine_storm import EngineStorm, Happening
from harness.growth import trend_of
from harness.lender_process import LenderProcess
from harness.soak_counts import JUDGED, of_process, slabs_of
from harness.tiny_llama import write_tiny_llama
from harness.vllm_program import Scenario, run

SLABS: Final = 16
POOL: Final = 16
"""Prompts, each of which is asked for many times, so that prefixes are found again."""
BESIDE_STEPS: Final = 20
"""That the engine makes while a fault lasts. Doubled, faults last twice as long."""
LOG_EVERY_S: Final = 60.0
NOTHING_KEPT: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "LRU_CACHE_CAPACITY": "1"}
"""For torch on a CPU, which else keeps what it has compiled for each number of tokens in a step: up
to 1024 of them, 300 MiB after 150 rounds, beside which no leak would be seen."""
AQUA: Final[dict[str, Any]] = {
    "policy": "cfs",
    "slice_iterations": 4,
    "granularity_tokens": 0,
    "mode": "checkpoint",
    "prefix_tier": True,
    "store_bytes": f"{SLABS}MiB",
    # Objectives that steps keep to however busy the machine, and both classes in one step.
    "co_serving": {"policy": "conserve", "ttft_s": 1000.0, "tpot_s": 60.0},
}


class Fault(StrEnum):
    """What is done to the cluster while the engine works."""

    RECLAIM = "reclaim"
    """The producer takes all back, and offers it again."""
    KILL = "producer killed"
    """SIGKILL; another producer comes."""
    PAUSE = "producer paused"
    """SIGSTOP for a while."""
    COORDINATOR = "coordinator restarted"
    """SIGKILL of it and of its store, and a start from what is on disk."""


@dataclass
class Verdict:
    """What a storm has shown.

    Attributes:
        rounds: That ended.
        counts: What happened, by what it was.
        engine: The engine's figures at the end.
        processes: At the end of each round, what the engine's process had.
        control_wrong: Answers of the pool that changed when loads were zeroed.
        left: What was left at rest, a sentence each.
    """

    rounds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    engine: dict[str, Any] = field(default_factory=dict)
    processes: list[dict[str, float]] = field(default_factory=list)
    control_wrong: int = 0
    left: list[str] = field(default_factory=list)

    def found(self) -> list[str]:
        """What is wrong, a sentence each; nothing of a storm that happened and changed nothing."""
        return [*self.left, *self._missing(), *self._growing()]

    def _missing(self) -> Iterator[str]:
        if wrong := self.counts["wrong"]:
            yield f"{wrong} of {self.counts['answers']} answers are not those of vLLM alone"
        for name in ("answers", *Happening, *Fault):
            if not self.counts[name]:
                yield f"the storm did not happen: no {name}"
        for name in ("forced", "restored_tokens", "prefix_hit_tokens", "drained_bytes"):
            if not self.engine.get(name):
                yield f"the storm did not happen: no {name.replace('_', ' ')}"
        if not self.control_wrong:
            yield "no answer changed when loads were zeroed, so they decide nothing"

    def _growing(self) -> Iterator[str]:
        for name in self.processes[0] if self.processes else ():
            values = [each[name] for each in self.processes]
            trend = trend_of([values])
            if trend is not None and name in JUDGED and trend.at_least > JUDGED[name]:
                yield f"{name} grow by {trend.per_period:.2f} a round, from {values[0]:g}"


class EngineSoak:
    """An engine and the cluster around it; a context manager that leaves neither behind.

    Args:
        folder: Of the model, and of sockets; with a short path.
        seed: Of everything that is drawn.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.verdict: Final = Verdict()
        self._folder = folder
        self._seed = seed
        self._draw = random.Random(seed)
        self._stack = ExitStack()
        self._lenders = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            model = str(write_tiny_llama(self._folder / "model"))
            scenario = Scenario(
                model,
                aqua=AQUA,
                engine={"enable_prefix_caching": True},
                request_count=POOL,
                await_leased_bytes=SLABS * MIB,
            )
            stock = run(Scenario(model, request_count=POOL))["tokens"]
            answers = [stock[f"0-{index}"] for index in range(POOL)]
            assert len(set(map(tuple, answers))) == POOL, "degenerate answers would prove nothing"
            self._coordinator = CoordinatorProcess(stack.enter_context(data_dir()))
            self._lender = self._start_lender()
            stack.callback(self._end_cluster)
            self._storm = stack.enter_context(
                EngineStorm(
                    asdict(scenario),
                    answers,
                    self._seed,
                    AQUA_COORDINATOR_URL=self._coordinator.url,
                    AQUA_SLAB_BYTES=str(MIB),
                    AQUA_WANTED_BYTES=str(SLABS * MIB),
                    AQUA_HEARTBEAT_S="0.1",
                    AQUA_NODE="node",
                    AQUA_DOMAIN="domain",
                    AQUA_GPU_UUID="GPU-consumer",
                    **NOTHING_KEPT,
                )
            )
            self._storm.hear()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run_round(self) -> None:
        """Everything once, and a rest."""
        self._storm.tell("work")
        for fault in self._draw.sample(list(Fault), len(Fault)):
            self._await_loan()
            self._bring(fault)
            self.verdict.counts[fault] += 1
        self._await_loan()
        self.verdict.rounds += 1
        self._rest()

    def control(self) -> None:
        """Zero what comes back, and ask for the whole pool."""
        self._storm.ask("zero")
        before = self.verdict.counts["wrong"]
        self._storm.tell("control")
        self.verdict.control_wrong = self._storm.hear()["counts"]["wrong"] - before

    def _await_loan(self) -> None:
        try:
            until(lambda: self._lender.slabs()["leased"] == SLABS, "all that is offered is lent")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._told()}") from None

    def _told(self) -> dict[str, Any]:
        """What each side says of the loan."""
        paths = ("/v1/producers", "/v1/consumers", "/v1/leases")
        url = self._coordinator.url
        told: dict[str, Any] = {
            path: httpx.get(url + path, timeout=HANG_S).json() for path in paths
        }
        told["lender"] = self._lender.slabs()
        told["faults"] = {str(fault): self.verdict.counts[fault] for fault in Fault}
        told["engine"] = self._storm.ask("look")["counts"]
        return told

    def _bring(self, fault: Fault) -> None:
        match fault:
            case Fault.RECLAIM:
                self._lender.reclaim(SLABS)
                self._lender.await_reclaimed()
                self._lender.offer(SLABS)
            case Fault.KILL:
                self._lender.__exit__()
                self._work_on()
                self._lender = self._start_lender()
            case Fault.PAUSE:
                self._lender.freeze()
                self._work_on()
                self._lender.thaw()
            case Fault.COORDINATOR:
                self._coordinator.kill()
                self._work_on()
                old = self._coordinator
                self._coordinator = CoordinatorProcess(old.data_dir, port=old.port)

    def _work_on(self) -> None:
        """Let the engine make some steps."""
        until_step = self._storm.ask("look")["counts"]["steps"] + BESIDE_STEPS
        while self._storm.ask("look")["counts"]["steps"] < until_step:
            """Each answer comes with a step."""

    def _start_lender(self) -> LenderProcess:
        self._lenders += 1
        name = f"producer-{self._lenders}"
        return LenderProcess(
            self._folder / f"{name}.sock",
            slab_bytes=MIB,
            slab_count=SLABS,
            url=self._coordinator.url,
            producer_id=name,
        ).__enter__()

    def _end_cluster(self) -> None:
        self._lender.__exit__()
        self._coordinator.kill()

    def _rest(self) -> None:
        """Come to rest, and say what is left there."""
        verdict = self.verdict
        verdict.engine = self._storm.ask("rest")
        verdict.counts |= verdict.engine["counts"]
        for name in ("requests", "held_places", "used_blocks"):
            if number := verdict.engine[name]:
                verdict.left.append(f"round {verdict.rounds}: {number} {name.replace('_', ' ')}")
        pid = self._storm.process.pid
        lent = slabs_of(self._lender.process.pid)
        until(lambda: slabs_of(pid) <= lent, "slabs of producers that are gone are let go")
        verdict.processes.append(of_process(pid)[0])


def main() -> int:
    """Soak; the exit status is that of every command of Aqua."""
    parser = argparse.ArgumentParser(prog="harness.soak_engine")
    parser.add_argument("--minutes", type=float, default=30.0, help="a round more ends after them")
    parser.add_argument("--seed", type=int, default=0, help="of all that happens")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error("minutes are positive")
    total_s = options.minutes * 60
    began_s = time.monotonic()
    with (
        progress("Starting", total=total_s, quiet=options.json, log_every_s=LOG_EVERY_S) as shown,
        tempfile.TemporaryDirectory(prefix="aqua-", dir="/tmp") as folder,
        EngineSoak(Path(folder), options.seed) as soak,
    ):
        while (done_s := time.monotonic() - began_s) < total_s or not soak.verdict.rounds:
            title = f"Round {soak.verdict.rounds + 1}"
            shown.update(done=done_s, title=title, note=f"{soak.verdict.counts['answers']} answers")
            soak.run_round()
        soak.control()
    summary = vars(soak.verdict) | {
        "seed": options.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "found": soak.verdict.found(),
    }
    if options.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        for key, value in summary.items():
            say(f"{key}: {value}")
    return ExitCode.FAILED if summary["found"] else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
