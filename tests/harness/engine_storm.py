"""A real vLLM under Aqua that works by a seed until told to rest, and compares every answer.

The program (this file, run as a script) keeps `LIVE` requests in flight, of two classes and of any
length, out of a pool of prompts whose greedy answers are known. All the while something happens
every `EVERY_STEPS` steps, drawn from a bag that is emptied before it is filled again, so that each
`Happening` comes however fast the machine is. One that cannot be yet, say a reset while blocks are
loaded, goes back into the bag.

It obeys lines of JSON: `work`, which looks for others meanwhile (`look`) and ends with `rest`,
once the bag was emptied since; `zero` and `control`. Each is answered by figures.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
from collections import Counter
from enum import StrEnum
from typing import Any, Final

from harness.bounds import HANG_S
from harness.program import Program, say
from harness.vllm_program import (
    START_WITHIN_S,
    Scenario,
    Steps,
    find_worker,
    make_engine,
    prompts_of,
    zero_loads,
)

LIVE: Final = 14
"""Requests in flight: more than the engine's blocks hold. Doubled, most of them wait."""
EVERY_STEPS: Final = 20
"""Between two happenings, by judgement: some requests end undisturbed. Doubled, twice as many."""
TOKENS: Final = (10, 100)
"""Shortest and longest answer; the pool's answers have the most."""
OFFLINE_SHARE: Final = 0.4
"""Of the requests, by judgement: both classes hold memory at most times."""
SLEEP_STEPS: Final = 3
"""Steps that an engine is asked for while it sleeps; one would do."""


class Happening(StrEnum):
    """What happens to requests in the engine."""

    ABORT = "abort"
    """A client goes away."""
    EVICT = "evict"
    RESUME = "resume"
    RESET = "reset"
    """All KV is forgotten, that of running requests, too."""
    SLEEP = "sleep"
    """The engine sleeps with its requests (level 0), and wakes."""
    SWITCH = "switch"
    """Slices and paging are turned off, or on again."""


WEIGHTS: Final = {Happening.ABORT: 6, Happening.EVICT: 2, Happening.RESUME: 2, Happening.SWITCH: 2}
"""How often each is in the bag; once if it is not here."""


class EngineStorm(Program):
    """The test's side.

    Args:
        scenario: The engine, and the prompts of the pool.
        answers: The answer of each prompt, as an engine of vLLM's alone gives it.
        seed: Of everything.
        environment: Further variables.
    """

    def __init__(
        self, scenario: dict[str, Any], answers: list[list[int]], seed: int, **environment: str
    ) -> None:
        super().__init__(
            __file__,
            json.dumps({"scenario": scenario, "answers": answers, "seed": seed}),
            within_s=START_WITHIN_S,
            **{"OMP_NUM_THREADS": "1", **environment},
        )

    def ask(self, verb: str) -> dict[str, Any]:
        """Say one word and wait for the answer."""
        self.tell(verb)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next figures."""
        while not (line := self.line()).startswith("{"):
            """Between them, whatever vLLM prints."""
        answer: dict[str, Any] = json.loads(line)
        return answer


# --- The program ----------------------------------------------------------------------------


class _Storm:
    def __init__(self, scenario: Scenario, answers: list[list[int]], seed: int) -> None:
        self._engine = make_engine(scenario)
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._worker = find_worker(scenario)
        self._prompts = prompts_of(scenario)
        self._answers = answers
        self._draw = random.Random(seed)
        self._steps = Steps(self._engine)
        self._live: dict[str, tuple[int, int]] = {}
        self._counts = Counter[str]()
        self._are_on = True

    def figures(self) -> dict[str, Any]:
        """What has happened so far, and how the engine stands."""
        paging, pool = self._scheduler.paging, self._scheduler.kv_cache_manager.block_pool
        stats = self._worker.aqua.stats()
        return {
            "counts": dict(self._counts),
            "forced": self._scheduler.forced_preemptions,
            "restored_tokens": paging.counts.restored_tokens,
            "prefix_hit_tokens": paging.counts.prefix_hit_tokens,
            "lost_blocks": paging.counts.lost_blocks,
            "leased_bytes": stats.leased_bytes,
            "spilled_bytes": stats.spilled_bytes,
            "drained_bytes": stats.drained_bytes,
            "requests": len(self._scheduler.requests),
            "held_places": paging.table.held_count,
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }

    def work(self) -> None:
        """Until told to rest, and until the bag was emptied since; then come to rest."""
        next_at = self._counts["steps"] + EVERY_STEPS
        bag = self._new_bag()
        is_told = False
        while bag or not is_told:
            while len(self._live) < LIVE:
                self._add(self._draw.randrange(len(self._prompts)), self._draw.randint(*TOKENS))
            if self._counts["steps"] >= next_at:
                bag = bag or self._new_bag()
                what = bag.pop()
                if self._happens(what):
                    self._counts[what] += 1
                    next_at += EVERY_STEPS
                else:
                    bag.insert(0, what)
            self._step()
            if select.select([sys.stdin], [], [], 0)[0]:
                is_told = is_told or sys.stdin.readline().strip() == "rest"
                if not is_told:
                    say(self.figures())
        self.rest()

    def rest(self) -> None:
        """Let all requests end, and have the engine forget what it keeps for others."""
        self._turn(on=True)
        while self._live:
            for each in self._scheduler.evictions():
                self._scheduler("resume", {"id": each["request_id"]})
            self._step()
        self._steps.settle()
        assert self._engine.reset_prefix_cache(), "an engine at rest cannot forget"
        self._scheduler.paging.table.audit()

    def zero(self) -> None:
        """Have what comes back be zeros from now on."""
        zero_loads(self._worker)

    def control(self) -> None:
        """Ask for the whole pool at once, with nothing else happening."""
        for index in range(len(self._prompts)):
            self._add(index, TOKENS[1])
        self.rest()

    def _add(self, index: int, token_count: int) -> None:
        from vllm import SamplingParams

        self._counts["asked"] += 1
        name = f"{self._counts['asked']}"
        is_offline = self._draw.random() < OFFLINE_SHARE
        params = SamplingParams(
            temperature=0,
            max_tokens=token_count,
            ignore_eos=True,
            extra_args={"aqua_class": "offline" if is_offline else "online"},
        )
        self._engine.add_request(name, {"prompt_token_ids": self._prompts[index]}, params)
        self._live[name] = index, token_count

    def _step(self) -> None:
        self._counts["steps"] += 1
        for output in self._steps.make():
            # An answer that was on its way when its client went away has no reader.
            if output.finished and output.request_id in self._live:
                index, token_count = self._live.pop(output.request_id)
                self._counts["answers"] += 1
                found = list(output.outputs[0].token_ids)
                self._counts["wrong"] += found != self._answers[index][:token_count]

    def _new_bag(self) -> list[Happening]:
        bag = [each for each in Happening for _ in range(WEIGHTS.get(each, 1))]
        self._draw.shuffle(bag)
        return bag

    def _happens(self, what: Happening) -> bool:
        """Have something happen; whether it could."""
        match what:
            case Happening.ABORT:
                name = self._draw.choice(list(self._live))
                self._engine.abort_request([name])
                del self._live[name]
            case Happening.EVICT:
                return self._evict()
            case Happening.RESUME:
                evicted = self._scheduler.evictions()
                for each in evicted:
                    self._scheduler("resume", {"id": each["request_id"]})
                if not evicted:
                    self._evict()  # What was has been aborted since; the next try finds some.
                return bool(evicted)
            case Happening.RESET:
                return self._reset()
            case Happening.SLEEP:
                self._engine.sleep(level=0, mode="keep")
                for _ in range(SLEEP_STEPS):
                    self._step()
                self._engine.wake_up(["scheduling"])
            case Happening.SWITCH:
                self._turn(on=not self._are_on)
        return True

    def _reset(self) -> bool:
        from vllm.v1.request import RequestStatus

        try:
            return bool(self._engine.reset_prefix_cache(reset_running_requests=True))
        except RuntimeError:
            # vLLM gives up over loads under way, of requests that have been aborted, too.
            if any(
                each.status == RequestStatus.WAITING_FOR_REMOTE_KVS or each.is_finished()
                for each in self._scheduler.requests.values()
            ):
                return False
            raise

    def _evict(self) -> bool:
        count = self._draw.randint(1, 3)
        return "result" in self._scheduler("evict", {"count": count, "hold_s": HANG_S})

    def _turn(self, *, on: bool) -> None:
        self._are_on = on
        answer = self._scheduler("change-switches", {"slicing": on, "paging": on})
        assert "result" in answer, answer


def _main(options: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from aqualib.leasing import demand

    # A consumer waits after a reclaim so as not to thrash; here it is to thrash.
    demand.CALM_S = 0.2  # type: ignore[misc] # faster than real
    demand.MAX_CALM_S = 1.0  # type: ignore[misc] # as above
    storm = _Storm(Scenario(**options["scenario"]), options["answers"], options["seed"])
    verbs = {each.__name__: each for each in (storm.work, storm.zero, storm.control)}
    say(storm.figures())
    for line in sys.stdin:
        verbs[line.strip()]()
        say(storm.figures())


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
