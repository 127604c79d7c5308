from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aqua_batch.engine import StepEvents
from aqua_batch.feed import BlendFeed
from aqua_batch.forecast import SERIES_ROWS, forecast
from aqua_batch.hardware import describe
from aqua_batch.journal import Journal
from aqua_batch.planning import plan, tokenize
from aqua_batch.policies import Policy, policy_for
from aqua_batch.records import Entry, read_batch
from aqua_batch.running import LEAST_TO_SAMPLE, Progress, Run
from aqua_batch.tokens import ByteTokenizer
from aqua_protocol.errors import CapacityError, ConfigError
from aqua_schedulers.admission import BatchView, StepPlan


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


class CountingEngine:
    """Generates `max_tokens` letters for each request; dies on demand."""

    capacity_tokens = 20_000
    max_step_tokens = 512

    def __init__(self, dies_after: int | None = None) -> None:
        self.submitted: list[str] = []
        self._left: dict[int, int] = {}
        self._new: list[int] = []
        self._dies_after = dies_after
        self._results: list[dict[str, Any]] = []

    def serve(
        self,
        prompt_of: Callable[[int], list[int]],
        entry_of: Callable[[int], tuple[Entry, dict[str, Any]]],
    ) -> None:
        self._prompt_of, self._entry_of = prompt_of, entry_of

    def submit(self, request: int) -> None:
        entry, body = self._entry_of(request)
        assert self._prompt_of(request) == list(body["prompt"].encode())
        self.submitted.append(entry.custom_id)
        self._left[request] = body["max_tokens"]
        self._new.append(request)

    def step(self, token_budget: int) -> StepEvents:
        if self._dies_after is not None and len(self.submitted) >= self._dies_after:
            raise KeyboardInterrupt
        started, self._new = self._new, []
        finished, tokens = [], []
        for request in list(self._left):
            self._left[request] -= 1
            if self._left[request] == 0:
                del self._left[request]
                entry, body = self._entry_of(request)
                finished.append(request)
                tokens.append(body["max_tokens"])
                usage = {"completion_tokens": body["max_tokens"]}
                answer = {"custom_id": entry.custom_id, "response": {"body": {"usage": usage}}}
                self._results.append(answer)
        return StepEvents(started, finished, tokens)

    def take_results(self) -> list[dict[str, Any]]:
        taken, self._results = self._results, []
        return taken


def run_of(
    file: Path, engine: CountingEngine, journal: Journal, seen: list[Progress], policy: Policy
) -> Run:
    batch = read_batch(file)
    tokenized = tokenize(batch, ByteTokenizer(), longest_tokens=None)
    cost = describe("A100-80GB", None).cost
    return Run(batch, tokenized, engine, journal, cost, policy, lambda: 0.0, seen.append)


@pytest.mark.parametrize("policy", Policy)
def test_a_run_answers_every_request_once(tmp_path: Path, policy: Policy) -> None:
    file = write_batch(tmp_path, 300)
    seen: list[Progress] = []
    engine = CountingEngine()
    with Journal(tmp_path / "out.jsonl") as journal:
        assert run_of(file, engine, journal, seen, policy).finish() == 300
        assert len(journal.finished) == 300
    assert sorted(engine.submitted) == sorted(f"r{index}" for index in range(300))
    assert seen[-1].done == seen[-1].total == 300
    assert seen[-1].running == 0
    assert [state.done for state in seen] == sorted(state.done for state in seen)


def test_an_interrupted_run_resumes_without_repeating(tmp_path: Path) -> None:
    file = write_batch(tmp_path, 300)
    seen: list[Progress] = []
    out = tmp_path / "out.jsonl"
    first = CountingEngine(dies_after=150)
    with Journal(out) as journal, pytest.raises(KeyboardInterrupt):
        run_of(file, first, journal, seen, Policy.FORESIGHT).finish()
    finished = {json.loads(raw)["custom_id"] for raw in out.read_text().splitlines()}
    assert 0 < len(finished) < 300
    second = CountingEngine()
    with Journal(out) as journal:
        ran = run_of(file, second, journal, seen, Policy.FORESIGHT).finish()
    assert ran == 300 - len(finished)
    assert not finished & set(second.submitted)
    ids = [json.loads(raw)["custom_id"] for raw in out.read_text().splitlines()]
    assert sorted(ids) == sorted(f"r{index}" for index in range(300))


def test_a_large_batch_of_unknown_lengths_is_sampled_first(tmp_path: Path) -> None:
    file = write_batch(tmp_path, 3 * LEAST_TO_SAMPLE)
    seen: list[Progress] = []
    engine = CountingEngine()
    with Journal(tmp_path / "out.jsonl") as journal:
        run_of(file, engine, journal, seen, Policy.FORESIGHT).finish()
    sample = engine.submitted[:6]
    kinds = {int(name[1:]) % 3 == 0 for name in sample}
    assert kinds == {True, False}, "the sample holds both kinds of request"


def test_a_prompt_that_never_fits_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    file = write_batch(tmp_path, 3)
    engine = CountingEngine()
    engine.capacity_tokens = 100
    with Journal(tmp_path / "out.jsonl") as journal, pytest.raises(CapacityError):
        run_of(file, engine, journal, [], Policy.FORESIGHT).finish()
    assert engine.submitted == []


class NeverAdmits:
    def plan(self, view: BatchView) -> StepPlan:
        return StepPlan([], 1)


def test_a_policy_that_admits_nothing_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    batch = read_batch(write_batch(tmp_path, 3))
    tokenized = tokenize(batch, ByteTokenizer(), longest_tokens=None)
    tree = tokenized.pool({}).tree
    feed = BlendFeed(NeverAdmits(), tree, CountingEngine(), capacity_tokens=1000)
    with pytest.raises(ConfigError, match="admits none"):
        feed.step(0.0)


@pytest.mark.parametrize("policy", Policy)
def test_a_forecast_admits_every_request_once_and_never_beats_the_bound(
    tmp_path: Path, policy: Policy
) -> None:
    batch = read_batch(write_batch(tmp_path, 200))
    tokenized = tokenize(batch, ByteTokenizer(), longest_tokens=None)
    target = describe("A100-80GB", None, capacity_tokens=20_000)
    lengths = {f"r{i}": 300 if i % 3 == 0 else 3 for i in range(200)}
    prepared = plan(tokenized, target, lengths)
    chosen = policy_for(policy, prepared, capacity_tokens=20_000, max_step_tokens=512)
    course = forecast(prepared, chosen, capacity_tokens=20_000, max_step_tokens=512)
    assert sorted(course.admitted.tolist()) == list(range(200))
    assert course.makespan_s >= course.optimal_s * (1 - 1e-9)
    assert len(course.compute_s) <= SERIES_ROWS
    assert course.computed_prompt_tokens >= prepared.tree.distinct_tokens
