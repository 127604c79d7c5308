"""Aqua's bursts on the serving engine: how long requests wait under which policy and link.

A `BurstExperiment` is one of the paper: 25 requests at the stable rate, the rate times a factor for
a minute, then 25 more at the stable rate (the burst's overflow goes to new instances by then, as in
section 9.1). The policies are those of `aqua_schedulers.cfs`.

What the paper leaves open, and what we chose, is in `docs/simulation.md`, "Readings of Aqua".
Step times are a roofline of the data sheet, so absolute times are rough; ratios between policies
share them. Arrivals are Poisson; every number is a mean over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Final

import numpy as np
from jaxtyping import Int64

from aqua_protocol.decoders import DecoderModel, decoder_named
from aqua_protocol.hardware import GpuModel, gpu_named
from aqua_schedulers.cfs import FairSettings, PagingTier, PolicyName, policy_named
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.serving.request import Arrival, Served
from aqua_simulator.timing.iteration import from_data_sheet
from aqua_simulator.workloads.sources import log_normal

STABLE_WAIT_S: Final = 1.0
"""Seconds; section 4.1 gives interactive use one, and long prompts take longer without any queue.
Doubled, bursts start from a higher rate."""

STABLE_REQUESTS: Final = 120
"""Requests of a trial of a rate; its seed is apart from those of the figures. Doubled, a rate is
surer and takes twice as long to find."""

STABLE_SEED: Final = 7919
"""Fixed: a seed, chosen by hand."""

SLOW_FACTOR: Final = 1.25
"""A request is slow whose time per output token is so many times the calm median; the paper tells
by eye. Doubled, hardly any request is slow."""

RATE_TOLERANCE: Final = 0.01
"""Relative width at which the search for a rate ends: far below the scatter between seeds. Doubled,
one step less of bisection."""

PIECE_BYTES: Final = 16 * 4 * 128 * 2
"""Fixed by the paper's engine: keys or values of a 16-token block in one layer and shard, 4 of 8 KV
heads of 128 bf16 values."""

PIECE_S: Final = 5e-6
"""Seconds to launch one small asynchronous copy; drivers take 4 to 6 microseconds. Doubled, copying
piece by piece takes nearly twice as long."""


Draw = Callable[
    [int, np.random.Generator], tuple[Int64[np.ndarray, " count"], Int64[np.ndarray, " count"]]
]
"""Draws prompt and output lengths of so many requests."""

_ARXIV_PROMPT: Final = log_normal(7000 * 1.08, sqrt(2 * np.log(1.08)), low=1500, high=14000)
_ARXIV_OUTPUT: Final = log_normal(230, 0.5, low=30, high=800)


def arxiv_lengths(
    count: int, generator: np.random.Generator
) -> tuple[Int64[np.ndarray, " count"], Int64[np.ndarray, " count"]]:
    """Surrogate of arxiv summarization: the median prompt that section 9 names, short outputs."""
    prompts = _ARXIV_PROMPT.at(generator.random(count))
    outputs = _ARXIV_OUTPUT.at(generator.random(count))
    return prompts.astype(np.int64), outputs.astype(np.int64)


@dataclass(frozen=True)
class BurstExperiment:
    """One experiment of the paper.

    Attributes:
        kv_tokens: KV memory of the engine.
        dram_bytes_per_s, peer_bytes_per_s: Rates of one GPU's links.
        stable_wait_s: What makes a rate stable: the mean wait before a prompt is begun.
    """

    model: DecoderModel
    gpu: GpuModel
    width: int
    lengths: Draw
    kv_tokens: int
    dram_bytes_per_s: float
    peer_bytes_per_s: float
    factor: float = 2.0
    length_s: float = 60.0
    before_count: int = 25
    after_count: int = 25
    budget: int = 512
    slice_iterations: int = 5
    copies_overlap: bool = False
    may_recompute: bool = False
    stable_wait_s: float = STABLE_WAIT_S

    def engine(self, policy: PolicyName, location: PagingTier) -> Engine:
        """An engine whose preempted contexts go there."""
        rates = {PagingTier.HOST: self.dram_bytes_per_s, PagingTier.PEER: self.peer_bytes_per_s}
        store = None
        if location is not PagingTier.NOWHERE:
            rate = rates[location] * self.width
            overlap = self.copies_overlap
            store = PageStore("paper", 10**9, rate, is_overlapped=overlap, location=location)
        settings = EngineSettings(
            max_num_batched_tokens=self.budget,
            kv_bytes_per_token=self.model.kv_bytes_per_token,
            may_recompute=self.may_recompute,
        )
        return Engine(
            "paper",
            settings,
            from_data_sheet(self.gpu, self.model, width=self.width),
            PagedMemory(self.kv_tokens // 16),
            store,
            policy_named(policy, FairSettings(slice_iterations=self.slice_iterations)),
        )

    def arrivals(self, rate_per_s: float, seed: int) -> list[Arrival]:
        """The burst of one seed."""
        generator = np.random.default_rng(seed)
        times = list(np.cumsum(generator.exponential(1.0 / rate_per_s, self.before_count)))
        start_s = end_s = float(times[-1])
        while True:
            end_s += float(generator.exponential(1.0 / (rate_per_s * self.factor)))
            if end_s > start_s + self.length_s:
                break
            times.append(end_s)
        after = generator.exponential(1.0 / rate_per_s, self.after_count)
        times += list(start_s + self.length_s + np.cumsum(after))
        return self._arrivals(times, generator)

    def steady(self, rate_per_s: float) -> list[Arrival]:
        """A steady stream, to try a rate."""
        generator = np.random.default_rng(STABLE_SEED)
        gaps = generator.exponential(1.0, STABLE_REQUESTS)
        return self._arrivals(list(np.cumsum(gaps) / rate_per_s), generator)

    def _arrivals(self, times: Sequence[float], generator: np.random.Generator) -> list[Arrival]:
        prompts, outputs = self.lengths(len(times), generator)
        # Nothing larger than the memory can ever be served; half of it leaves room for a second.
        most = self.kv_tokens // 2
        return [
            Arrival(str(index), float(time_s), min(int(prompt), most), min(int(output), most - 16))
            for index, (time_s, prompt, output) in enumerate(
                zip(times, prompts, outputs, strict=True)
            )
        ]

    def stable_rate_per_s(self) -> float:
        """The highest rate that is stable, found by bisection to one percent."""
        low, high = 0.005, 50.0
        while high / low > 1.0 + RATE_TOLERANCE:
            rate = sqrt(low * high)
            served = self.engine(PolicyName.FCFS, PagingTier.NOWHERE).run(self.steady(rate))
            waits = [row.scheduled_s - row.arrival_s for row in served]
            is_stable = float(np.mean(waits)) < self.stable_wait_s
            low, high = (rate, high) if is_stable else (low, rate)
        return low


@dataclass
class Outcome:
    """A policy on all seeds of a burst; requests in order of arrival."""

    runs: list[list[Served]] = field(default_factory=list)
    preemption_count: int = 0

    def mean(self, of: Callable[[list[Served]], float]) -> float:
        """Mean over the seeds."""
        return float(np.mean([of(run) for run in self.runs]))

    @property
    def ttft_max_s(self) -> float:
        """Longest wait for a first token."""
        return self.mean(lambda run: max(row.ttft_s for row in run))

    @property
    def tpot_mean_s(self) -> float:
        """Mean time per output token."""
        return self.mean(lambda run: float(np.nanmean([row.tpot_s for row in run])))

    @property
    def completion_mean_s(self) -> float:
        """Mean time to the last token."""
        return self.mean(lambda run: float(np.mean([row.completion_s for row in run])))

    @property
    def completion_max_s(self) -> float:
        """Longest time to the last token."""
        return self.mean(lambda run: max(row.completion_s for row in run))

    def last_slow(self, calm_count: int, end_count: int) -> float:
        """The last request up to `end_count` that is slow; mean over the seeds where one is."""
        last: list[float] = []
        for run in self.runs:
            tpot = np.array([row.tpot_s for row in run[:end_count]])
            slow = np.flatnonzero(tpot > SLOW_FACTOR * np.nanmedian(tpot[:calm_count]))
            last += [float(slow[-1] + 1)] if len(slow) else []
        return float(np.mean(last)) if last else 0.0


Line = tuple[str, PolicyName, PagingTier]

LINES: Final[tuple[Line, ...]] = (
    ("FCFS", PolicyName.FCFS, PagingTier.NOWHERE),
    ("CFS over DRAM", PolicyName.CFS, PagingTier.HOST),
    ("CFS over NVLink", PolicyName.CFS, PagingTier.PEER),
    ("first-token over NVLink", PolicyName.FIRST_TOKEN, PagingTier.PEER),
)
"""The paper's three lines, and ours."""


def outcomes(
    burst: BurstExperiment, seeds: Sequence[int], lines: Sequence[Line] = LINES
) -> dict[str, Outcome]:
    """Every line on the same arrivals."""
    rate = burst.stable_rate_per_s()
    found: dict[str, Outcome] = {}
    for name, policy, location in lines:
        outcome = found[name] = Outcome()
        for seed in seeds:
            engine = burst.engine(policy, location)
            served = engine.run(burst.arrivals(rate, seed))
            outcome.runs.append(sorted(served, key=lambda row: int(row.request_id)))
            outcome.preemption_count += engine.preemption_count
    return found


def burst_of(
    model: str,
    gpu: str,
    width: int,
    lengths: Draw,
    *,
    memory_share: float,
    dram_bytes_per_s: float,
    factor: float,
) -> BurstExperiment:
    """An experiment by names; the KV memory is what `memory_share` leaves beside the weights."""
    shape, device = decoder_named(model), gpu_named(gpu)
    room = width * device.hbm_bytes * memory_share - shape.weight_bytes
    return BurstExperiment(
        shape,
        device,
        width,
        lengths,
        int(room // shape.kv_bytes_per_token),
        dram_bytes_per_s,
        device.nvlink_bytes_per_s,
        factor=factor,
    )


def piecewise_bytes_per_s(
    link_bytes_per_s: float, *, launch_s: float = PIECE_S, piece_bytes: int = PIECE_BYTES
) -> float:
    """What a link gives when every block, layer, key and value is a copy of its own."""
    return piece_bytes / (launch_s + piece_bytes / link_bytes_per_s)


def cached_prefix_run(
    burst: BurstExperiment,
    location: PagingTier,
    *,
    prefix_tokens: int,
    every: int,
    count: int,
    rate_per_s: float,
    seed: int,
) -> list[Served]:
    """Figure 9(a): every so many requests ask for a long stored prefix; no burst."""
    stream = replace(burst, before_count=count, after_count=0, length_s=0.0)
    plain = stream.arrivals(rate_per_s, seed)
    arrivals = [
        replace(each, prompt_tokens=prefix_tokens + 256, stored_tokens=prefix_tokens)
        if index % every == every // 2
        else each
        for index, each in enumerate(plain)
    ]
    served = burst.engine(PolicyName.FCFS, location).run(arrivals)
    return sorted(served, key=lambda row: int(row.request_id))
