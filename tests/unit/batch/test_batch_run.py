from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aqua_batch.batch_run import LEAST_TO_SAMPLE, MOST_DEATHS, BatchProgress, BatchRun
from aqua_batch.engine import CacheCounters
from aqua_batch.feed import BlendFeed, Share
from aqua_batch.fleet import Event, Fleet, LocalFleet, Lost, Ready, Report
from aqua_batch.forecast import SERIES_ROWS, forecast
from aqua_batch.journal import ResultJournal
from aqua_batch.policies import Policy, policy_for
from aqua_batch.records import read_batch
from aqua_batch.target import describe
from aqua_batch.tokenization import plan, tokenize
from aqua_batch.tokens import BYTE_TOKENIZER
from aqua_protocol.errors import ConfigError, UnavailableError
from aqua_schedulers.admission import BatchView, StepPlan
from harness.counting_engine import CountingEngine

pytestmark = pytest.mark.slow


def write_batch(path: Path, count: int) -> Path:
    rng = np.random.default_rng(7)
    rows = []
    for index in range(count):
        kind = index % 3
        body: dict[str, Any] = {"prompt": f"{'grade the answer ' * 10 if kind else 'draw'} {index}"}
        body["max_tokens"] = int(rng.integers(2, 5)) if kind else int(rng.integers(100, 400))
        row = {"custom_id": f"r{index}", "url": "/v1/completions", "body": body}
        rows.append(json.dumps(row))
    file = path / "in.jsonl"
    file.write_text("\n".join(rows))
    return file


def run_over(
    file: Path,
    fleet: Fleet,
    journal: ResultJournal,
    policy: Policy = Policy.FORESIGHT,
    **options: Any,  # noqa: ANN401 - those of BatchRun,  # noqa: ANN401 - those of BatchRun
) -> BatchRun:
    batch = read_batch(file)
    tokenized = tokenize(
        batch,
        BYTE_TOKENIZER,
        longest_tokens=fleet.facts.longest_tokens,
        capacity_tokens=fleet.facts.capacity_tokens,
        to_run=True,
    )
    cost = describe("A100-80GB", None).cost
    return BatchRun(
        batch, tokenized, fleet, journal, model="tiny", cost=cost, policy=policy, **options
    )


def local(engine: CountingEngine) -> LocalFleet:
    return LocalFleet(engine)


def ids_in(out: Path) -> list[str]:
    return [json.loads(raw)["custom_id"] for raw in out.read_text().splitlines()]


@pytest.mark.parametrize("policy", Policy)
def test_a_run_answers_every_request_once(tmp_path: Path, policy: Policy) -> None:
    file = write_batch(tmp_path, 300)
    seen: list[BatchProgress] = []
    engine = CountingEngine()
    with ResultJournal(tmp_path / "out.jsonl") as journal:
        run = run_over(file, local(engine), journal, policy, on_progress=seen.append)
        assert run.finish() == 300
        assert len(journal.finished) == 300
    assert len(engine.submitted) == len(set(engine.submitted)) == 300
    assert seen[-1].done == seen[-1].total == 300
    assert seen[-1].running == 0
    assert [state.done for state in seen] == sorted(state.done for state in seen)
    assert seen[-1].work_done == pytest.approx(1.0)


def test_an_interrupted_run_resumes_without_repeating(tmp_path: Path) -> None:
    file = write_batch(tmp_path, 300)
    out = tmp_path / "out.jsonl"
    with ResultJournal(out) as journal, pytest.raises(KeyboardInterrupt):
        run_over(file, local(CountingEngine(dies_after=150)), journal).finish()
    finished = ids_in(out)
    assert 0 < len(finished) < 300
    second = CountingEngine()
    with ResultJournal(out) as journal:
        ran = run_over(file, local(second), journal).finish()
    assert ran == len(second.submitted) == 300 - len(finished)
    assert sorted(ids_in(out)) == sorted(f"r{index}" for index in range(300))


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    file, out = write_batch(tmp_path, 10), tmp_path / "out.jsonl"
    for ran in (10, 0):
        with ResultJournal(out) as journal:
            assert run_over(file, local(CountingEngine()), journal).finish() == ran
    assert len(ids_in(out)) == 10


def test_a_large_batch_of_unknown_lengths_is_sampled_first(tmp_path: Path) -> None:
    file = write_batch(tmp_path, 3 * LEAST_TO_SAMPLE)
    engine = CountingEngine()
    seen: list[BatchProgress] = []
    with ResultJournal(tmp_path / "out.jsonl") as journal:
        run_over(file, local(engine), journal, on_progress=seen.append).finish()
    kinds = {prompt.startswith("draw") for prompt in engine.submitted[:6]}
    assert kinds == {True, False}, "the sample holds both kinds of request"
    sampled = next(state for state in seen if state.done == 6)
    assert sampled.work_done < 0.1, "time left is reckoned over the run, not over the sample"


def test_answers_wanted_of_one_line_come_in_one_line(tmp_path: Path) -> None:
    body = {"prompt": ["left", "right"], "n": 2, "max_tokens": 3, "seed": 5, "model": "mine"}
    row = {"custom_id": "several", "url": "/v1/completions", "body": body}
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps(row))
    with ResultJournal(out) as journal:
        assert run_over(file, local(CountingEngine()), journal, clock_s=lambda: 7.0).finish() == 1
    (line,) = out.read_text().splitlines()
    response = json.loads(line)["response"]["body"]
    made = [json.loads(choice["text"]) for choice in response["choices"]]
    assert [each["prompt"] for each in made] == ["left", "left", "right", "right"]
    assert [each["wish"]["seed"] for each in made] == [5, 6, 7, 8], "or all would be the same"
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    assert response["usage"]["prompt_tokens"] == len("left") + len("right")
    assert response["usage"]["completion_tokens"] == 4 * 3
    assert (response["model"], response["created"]) == ("mine", 7)


# --- Several engines -----------------------------------------------------------------------


class PaperFleet:
    """Engines in this process that take turns; `plan` says what happens before which turn.

    Args:
        plan: Events by turn. A lost engine's unreported answers are lost, as in a real fleet.
    """

    def __init__(self, count: int, plan: Mapping[int, Event] | None = None) -> None:
        self.engines = {node: CountingEngine() for node in range(count)}
        self.facts = self.engines[0].facts
        self.lives = [self.engines[node] for node in self.engines]
        self._plan = dict(plan or {})
        self._runs: dict[int, BlendFeed] = {}
        self._turn = 0

    def ready_nodes(self) -> list[int]:
        return list(self.engines)

    def begin(self, node: int, share: Share) -> None:
        assert node not in self._runs, "it has a share already"
        self._runs[node] = BlendFeed.of(share.packed(), self.engines[node])

    def wait(self) -> list[Event]:
        self._turn += 1
        event = self._plan.pop(self._turn, None)
        if isinstance(event, Lost):
            del self.engines[event.node]
            self._runs.pop(event.node, None)
            return [event]
        if isinstance(event, Ready):
            self.engines[event.node] = CountingEngine()
            self.lives.append(self.engines[event.node])
            return [event]
        reports: list[Event] = []
        for node, run in list(self._runs.items()):
            run.step(0.0)
            answers = self.engines[node].take_outputs()
            if run.left_count == 0:
                del self._runs[node]
            reports.append(Report(node, answers, run.running_count, run.left_count))
        assert reports or self._plan, "nothing will ever happen again"
        return reports

    def cache_counters(self) -> CacheCounters:
        return CacheCounters(0, 0)


def test_engines_share_a_batch_evenly_and_answer_each_request_once(tmp_path: Path) -> None:
    file, out = write_batch(tmp_path, 300), tmp_path / "out.jsonl"
    fleet = PaperFleet(3)
    with ResultJournal(out) as journal:
        assert run_over(file, fleet, journal).finish() == 300
    assert sorted(ids_in(out)) == sorted(f"r{index}" for index in range(300))
    work = [len(engine.submitted) for engine in fleet.lives]
    assert sum(work) == 300
    assert min(work) > 60, f"an engine had little to do: {work}"


@pytest.mark.parametrize(
    "plan",
    [
        {20: Lost(1, "gone")},
        {20: Lost(1, "gone"), 21: Lost(0, "gone")},
        {20: Lost(1, "gone"), 22: Ready(1)},
        {20: Lost(0, "gone"), 30: Lost(1, "gone"), 31: Lost(2, "gone"), 32: Ready(1), 33: Ready(0)},
        {1: Lost(2, "gone"), 400: Ready(2)},
    ],
    ids=["one", "two", "one comes back", "all, two come back", "at once"],
)
def test_what_a_lost_engine_had_not_answered_is_answered_by_others(
    tmp_path: Path, plan: dict[int, Event]
) -> None:
    file, out = write_batch(tmp_path, 150), tmp_path / "out.jsonl"
    fleet = PaperFleet(3, plan)
    said: list[str] = []
    with ResultJournal(out) as journal:
        assert run_over(file, fleet, journal, on_loss=said.append).finish() == 150
    names = ids_in(out)
    assert len(names) == len(set(names)) == 150
    lost = sum(isinstance(event, Lost) for event in plan.values())
    assert len(said) == lost
    assert all("gone" in each for each in said)


def test_finished_requests_of_a_lost_engine_are_not_repeated(tmp_path: Path) -> None:
    file, out = write_batch(tmp_path, 150), tmp_path / "out.jsonl"
    fleet = PaperFleet(2, {200: Lost(1, "gone")})
    first = fleet.engines[1]
    with ResultJournal(out) as journal:
        run_over(file, fleet, journal).finish()
    runs = [json.loads(raw) for raw in out.read_text().splitlines()]
    answered = {
        json.loads(each["response"]["body"]["choices"][0]["text"])["prompt"] for each in runs
    }
    assert len(answered) == 150
    again = set(first.submitted) & set(fleet.engines[0].submitted)
    assert 0 < len(again) < len(first.submitted)


def test_engines_that_die_together_are_no_sign_of_bad_requests(tmp_path: Path) -> None:
    file, out = write_batch(tmp_path, 150), tmp_path / "out.jsonl"
    plan: dict[int, Event] = {1 + death: Lost(death, "power cut") for death in range(MOST_DEATHS)}
    with ResultJournal(out) as journal:
        assert run_over(file, PaperFleet(MOST_DEATHS + 1, plan), journal).finish() == 150


def test_an_engine_that_dies_whatever_it_is_given_ends_the_run(tmp_path: Path) -> None:
    file, out = write_batch(tmp_path, 60), tmp_path / "out.jsonl"
    plan: dict[int, Event] = {}
    for death in range(MOST_DEATHS):
        plan |= {2 * death + 1: Lost(0, "segmentation fault"), 2 * death + 2: Ready(0)}
    with ResultJournal(out) as journal, pytest.raises(UnavailableError, match="segmentation fault"):
        run_over(file, PaperFleet(1, plan), journal).finish()
    with ResultJournal(out) as journal:
        assert run_over(file, PaperFleet(1), journal).finish() == 60


def test_the_death_of_an_engine_without_work_stops_nothing(tmp_path: Path) -> None:
    file, out = write_batch(tmp_path, 3), tmp_path / "out.jsonl"
    plan: dict[int, Event] = {1 + death: Lost(4 + death, "gone") for death in range(MOST_DEATHS)}
    with ResultJournal(out) as journal:
        assert run_over(file, PaperFleet(4 + MOST_DEATHS, plan), journal).finish() == 3


class NeverAdmits:
    def plan(self, view: BatchView) -> StepPlan:
        return StepPlan([], 1)


def test_a_policy_that_admits_nothing_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    batch = read_batch(write_batch(tmp_path, 3))
    tokenized = tokenize(batch, BYTE_TOKENIZER, longest_tokens=None)
    tree = tokenized.prompts.pool().tree
    feed = BlendFeed(NeverAdmits(), tree, CountingEngine(), capacity_tokens=1000)
    with pytest.raises(ConfigError, match="admits none"):
        feed.step(0.0)


@pytest.mark.parametrize("policy", Policy)
def test_a_forecast_admits_every_request_once_and_never_beats_the_bound(
    tmp_path: Path, policy: Policy
) -> None:
    batch = read_batch(write_batch(tmp_path, 200))
    tokenized = tokenize(batch, BYTE_TOKENIZER, longest_tokens=None)
    target = describe("A100-80GB", None, capacity_tokens=20_000)
    lengths = {f"r{i}": 300 if i % 3 == 0 else 3 for i in range(200)}
    prepared = plan(tokenized, target, lengths)
    chosen = policy_for(policy, prepared, capacity_tokens=20_000, max_step_tokens=512)
    course = forecast(prepared, chosen, capacity_tokens=20_000)
    assert sorted(course.admitted.tolist()) == list(range(200))
    assert course.makespan_s >= course.optimal_s * (1 - 1e-9)
    assert len(course.compute_s) <= SERIES_ROWS
    assert course.computed_prompt_tokens >= prepared.tree.distinct_tokens
