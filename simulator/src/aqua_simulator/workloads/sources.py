"""Length distributions of the single-modality traces that BlendServe blends.

The traces themselves are not shipped, and some cannot be had at all. A source is therefore its
quantiles (prompt and output lengths, joined by a rank correlation), with a word on where they come
from: measured on a public half of the trace, or a surrogate (`sources.toml`). Where the paper
states a property that the quantiles alone do not give (Table 3), the surrogate is calibrated to it
and says so; every other property of Table 3 is then a check.

Between quantiles lengths are interpolated in logarithms. A draw is reproducible: it takes a seeded
generator and nothing else.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float64, Int64
from scipy.special import ndtr, ndtri


@dataclass(frozen=True, slots=True)
class Quantiles:
    """An inverse distribution function, piecewise linear in the logarithm of the value."""

    levels: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, level: Float64[np.ndarray, " ..."]) -> Float64[np.ndarray, " ..."]:
        """Values at levels in 0..1."""
        return np.asarray(np.exp(np.interp(level, self.levels, np.log(self.values))))


def log_normal(mean: float, sigma: float, *, low: float, high: float) -> Quantiles:
    """Quantiles of a lognormal of that mean before it is cut to low..high."""
    levels = np.concatenate([[0.0, 0.0005, 0.005], np.linspace(0.02, 0.98, 49), [0.995, 0.9995, 1]])
    scores = ndtri(np.clip(levels, 1e-6, 1 - 1e-6))
    values = np.clip(mean * np.exp(sigma * scores - sigma**2 / 2), low, high)
    return Quantiles(tuple(levels.tolist()), tuple(values.tolist()))


@dataclass(frozen=True, slots=True)
class Source:
    """One single-modality trace.

    Attributes:
        prompt, output: Lengths in tokens, the system prompt not included.
        rank_correlation: Between prompt and output, -1 to 1.
        system_tokens: Prefix that all requests of the source share.
        group_count: Groups with a further shared prefix each (subjects of MMLU); 0 for none.
        group_tokens: Length of that prefix.
        known_output: Output length is known in advance (generation media).
        provenance: How close it is to the trace of that name.
        origin: Where the quantiles come from.
    """

    name: str
    prompt: Quantiles
    output: Quantiles
    rank_correlation: float
    system_tokens: int
    provenance: Literal["measured", "surrogate"]
    origin: str
    group_count: int = 0
    group_tokens: Quantiles | None = None
    known_output: bool = False

    def lengths(
        self, count: int, generator: np.random.Generator
    ) -> tuple[Int64[np.ndarray, " count"], Int64[np.ndarray, " count"]]:
        """Draw prompt and output lengths of `count` requests, each at least 1.

        Stratified: one draw from each of `count` equally likely slices. A blend holds a few hundred
        videos and their squares make its density; independent draws would miss it by a tenth.
        """
        slices = np.stack([generator.permutation(count) for _ in range(2)])
        levels = (slices + generator.random((2, count))) / count
        scores = ndtri(np.clip(levels, 1e-9, 1 - 1e-9))
        rho = self.rank_correlation
        joined = rho * scores[0] + np.sqrt(1.0 - rho * rho) * scores[1]
        prompts = self.prompt.at(ndtr(scores[0]))
        outputs = self.output.at(ndtr(joined))
        return _whole(prompts), _whole(outputs)

    def group_lengths(self) -> Int64[np.ndarray, " groups"]:
        """Prefix length of every group; the same in every draw, as the benchmark's shots are."""
        if self.group_tokens is None:
            return np.empty(0, dtype=np.int64)
        return _whole(self.group_tokens.at((np.arange(self.group_count) + 0.5) / self.group_count))


def _whole(values: Float64[np.ndarray, " ..."]) -> Int64[np.ndarray, " ..."]:
    return np.asarray(np.maximum(1, np.rint(values)), dtype=np.int64)


def _read_sources(paper: str) -> dict[str, Source]:
    """The sources of a paper in `sources.toml`, by name."""
    tables = tomllib.loads(Path(__file__).with_name("sources.toml").read_text())

    def quantiles(row: dict[str, Any]) -> Quantiles:
        if "mean" in row:
            return log_normal(**row)
        return Quantiles(tuple(tables["levels"][row["levels"]]), tuple(row["values"]))

    def source(name: str, table: dict[str, Any]) -> Source:
        lengths = {key: quantiles(row) for key, row in table.items() if isinstance(row, dict)}
        return Source(name, **{**table, **lengths})

    return {name: source(name, table) for name, table in tables[paper].items()}


SOURCES: Final = _read_sources("blendserve")
SHAREGPT, BURSTGPT, MMLU, OPENVID = (
    SOURCES[name] for name in ("ShareGPT", "BurstGPT", "MMLU", "OpenVid")
)
WILDCHAT, AZURE = SOURCES["WildChat"], SOURCES["Azure-Trace"]

CO_SERVED: Final = _read_sources("conserve")
"""What ConServe serves; not part of BlendServe's tables."""

LONGBENCH, BURSTGPT_CHATS = CO_SERVED["LongBench summaries"], CO_SERVED["BurstGPT"]
