"""Aqua's bursts on the serving engine: how long requests wait under which policy and link.

A `BurstExperiment` is one of the paper: 25 requests at the stable rate, the rate times a factor for
a minute, then the stable rate again. The rise is noticed within five seconds and new instances take
a minute to come; from then on newly arriving requests are redirected to them until as many have
been as the burst brought beyond the stable rate; then 25 more are served (section 9.1).

The stable rate is a share of the capacity, of what is finished per second with everything there at
once. `benchmarks/_bursts.py` draws the same burst at the same share for a real engine.

What the paper leaves open, and what we chose, is in `docs/simulation.md`, "Readings of Aqua".
Step times are a roofline of the data sheet, so absolute times are rough; ratios between policies
share them. Arrivals are Poisson; every number is a mean over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Int64

from aqua_protocol.decoders import DecoderModel, decoder_named
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GpuModel, gpu_named
from aqua_schedulers.cfs import FairSettings, PagingTier, PolicyName, policy_named
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.serving.request import Arrival, Served
from aqua_simulator.timing.iteration import from_data_sheet
from aqua_simulator.workloads.arrivals import read_lengths
from aqua_simulator.workloads.sources import log_normal

STABLE_SHARE: Final = 2 / 3
"""Of the capacity; chosen knowing the result: a minute of twice the rate leaves Figure 8's 20 s of
backlog if twice the rate is four thirds of the capacity. Doubled, the rate is not stable."""

CAPACITY_REQUESTS: Final = 120
"""Requests whose serving gives the capacity; their seed is apart from those of the figures.
Doubled, it is surer and takes twice as long to find."""

CAPACITY_SEED: Final = 7919
"""Fixed: a seed, chosen by hand."""

NOTICE_S: Final = 5.0
"""Fixed by the paper: seconds between two looks at the request rate."""

SLOW_FACTOR: Final = 1.25
"""A request is slow whose time per output token is so many times the calm median; the paper tells
by eye. Doubled, hardly any request is slow."""

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


def recorded_lengths(folder: Path, name: str) -> Draw:
    """Lengths of a recorded file in a folder or below it, drawn row by row with replacement.

    Args:
        name: How the file's name begins.

    Raises:
        ConfigError: No such file, or a broken one.
    """
    found = sorted(folder.rglob(f"{name}*.csv*"))
    if not found:
        raise ConfigError(
            f"no {name}*.csv[.gz] in {folder}",
            remedy="Give a folder with lengths as CSV: prompt_tokens,output_tokens.",
        )
    rows = read_lengths(found[0])

    def draw(
        count: int, generator: np.random.Generator
    ) -> tuple[Int64[np.ndarray, " count"], Int64[np.ndarray, " count"]]:
        drawn = rows[generator.integers(0, len(rows), count)]
        return drawn[:, 0], drawn[:, 1]

    return draw


@dataclass(frozen=True)
class BurstExperiment:
    """One experiment of the paper.

    Attributes:
        kv_tokens: KV memory of the engine.
        dram_bytes_per_s, peer_bytes_per_s: Rates of one GPU's links.
        stable_share: Of the capacity, the stable rate.
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
    stable_share: float = STABLE_SHARE

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
        surplus = round(len(times) - self.before_count - rate_per_s * self.length_s)
        time_s, last = start_s + self.length_s, len(times) + self.after_count
        redirected_s = time_s + NOTICE_S
        while len(times) < last:
            time_s += float(generator.exponential(1.0 / rate_per_s))
            if time_s >= redirected_s and surplus > 0:
                surplus -= 1
            else:
                times.append(time_s)
        return self._arrivals(times, generator)

    def steady(self, rate_per_s: float) -> list[Arrival]:
        """A steady stream."""
        generator = np.random.default_rng(CAPACITY_SEED)
        gaps = generator.exponential(1.0, CAPACITY_REQUESTS)
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
        """Requests per second at the stable share of the capacity."""
        waiting = [replace(each, arrival_s=0.0) for each in self.steady(1.0)]
        served = self.engine(PolicyName.FCFS, PagingTier.NOWHERE).run(waiting)
        return self.stable_share * len(served) / max(row.last_token_s for row in served)


@dataclass
class Outcome:
    """A policy on all seeds of a burst; requests in order of arrival.

    Attributes:
        swap_tokens: The most tokens that were paged out at once.
    """

    runs: list[list[Served]] = field(default_factory=list)
    preemption_count: int = 0
    swap_tokens: int = 0

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
    ("least-served over DRAM", PolicyName.LEAST_SERVED, PagingTier.HOST),
    ("least-served over NVLink", PolicyName.LEAST_SERVED, PagingTier.PEER),
    ("first-token over NVLink", PolicyName.FIRST_TOKEN, PagingTier.PEER),
)
"""The paper's three lines, its section 7 taken word by word, and ours."""


def outcomes(
    burst: BurstExperiment,
    seeds: Sequence[int],
    lines: Sequence[Line] = LINES,
    *,
    rate_per_s: float | None = None,
) -> dict[str, Outcome]:
    """Every line on the same arrivals, at the stable rate unless another is given."""
    rate = burst.stable_rate_per_s() if rate_per_s is None else rate_per_s
    found: dict[str, Outcome] = {}
    for name, policy, location in lines:
        outcome = found[name] = Outcome()
        for seed in seeds:
            engine = burst.engine(policy, location)
            served = engine.run(burst.arrivals(rate, seed))
            outcome.runs.append(sorted(served, key=lambda row: int(row.request_id)))
            outcome.preemption_count += engine.preemption_count
            if engine.store is not None:
                outcome.swap_tokens = max(outcome.swap_tokens, engine.store.peak_tokens)
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
