"""Length distributions of the single-modality traces that BlendServe blends.

The traces themselves are not shipped, and some cannot be had at all. A source is therefore its
quantiles (prompt and output lengths, joined by a rank correlation), with a word on where they come
from: measured on a public half of the trace, or a surrogate. Where the paper
states a property that the quantiles alone do not give (Table 3), the surrogate is calibrated to it
and says so; every other property of Table 3 is then a check.

Between quantiles lengths are interpolated in logarithms. A draw is reproducible: it takes a seeded
generator and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

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


_LEVELS: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
_FEW_LEVELS: Final = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

MAX_CONTEXT_TOKENS: Final = 131_072
"""Fixed by Llama-3.1-8B: no video of the surrogate is longer."""

SHAREGPT: Final = Source(
    name="ShareGPT",
    prompt=Quantiles(_LEVELS, (1, 12, 28, 73, 591, 1739, 3737, 5695, 6560, 7419, 7894, 8141)),
    output=Quantiles(_LEVELS, (2, 6, 43, 84, 228, 414, 629, 834, 920, 997, 1021, 1024)),
    rank_correlation=0.05,
    system_tokens=55,
    provenance="measured",
    origin="sharegpt_8k_filtered, Llama-2 tokenizer (project-etalon/etalon), 15,366 rows",
)

WILDCHAT: Final = Source(
    name="WildChat",
    prompt=log_normal(296.0, 1.2, low=2, high=8000),
    output=log_normal(256.0, 0.85, low=1, high=4096),
    rank_correlation=0.25,
    system_tokens=130,
    provenance="surrogate",
    origin="lognormal of the published means (user turn 296 tokens; output 256, A.1 of the paper)",
)

AZURE: Final = Source(
    name="Azure-Trace",
    prompt=Quantiles(_LEVELS, (6, 18, 74, 148, 573, 1454, 2748, 5152, 7325, 7436, 7437, 7437)),
    output=Quantiles(_LEVELS, (6, 6, 6, 7, 9, 13, 22, 54, 85, 247, 858, 1899)),
    rank_correlation=-0.02,
    system_tokens=20,
    provenance="measured",
    origin="AzureLLMInferenceTrace_code (2023), 4,409 rows: the half whose density fits Table 3",
)

BURSTGPT: Final = Source(
    name="BurstGPT",
    prompt=Quantiles(_FEW_LEVELS, (2, 18, 74, 360, 1291, 1697, 3023, 6142)),
    output=Quantiles(_FEW_LEVELS, (1, 3, 6, 44, 146, 186, 276, 2670)),
    rank_correlation=-0.3,
    system_tokens=9,
    provenance="surrogate",
    origin="quantiles of the first 59,999 rows of BurstGPT_1; outputs scaled to Table 3",
)

OPENVID: Final = Source(
    name="OpenVid",
    prompt=log_normal(100.0, 0.4, low=10, high=512),
    output=log_normal(176 * 256 * 16 / 45, 0.82, low=256, high=MAX_CONTEXT_TOKENS - 1024),
    rank_correlation=0.0,
    system_tokens=8,
    provenance="surrogate",
    origin="lognormal of mean 176 frames x 256 tokens x 16/45; spread from the paper's density",
    known_output=True,
)

MMLU: Final = Source(
    name="MMLU",
    prompt=Quantiles(_LEVELS, (20, 30, 38, 43, 55, 81, 159, 313, 374, 508, 658, 868)),
    output=Quantiles((0.0, 1.0), (2, 2)),
    rank_correlation=0.0,
    system_tokens=1,
    provenance="measured",
    origin="characters / 4.3 of 7,687 questions of 29 subjects; shots scaled to Table 3's sharing",
    group_count=57,
    group_tokens=Quantiles(
        _LEVELS, (260, 275, 325, 340, 450, 850, 1220, 1560, 1650, 1680, 1720, 1740)
    ),
)

SOURCES: Final[dict[str, Source]] = {
    source.name: source for source in (SHAREGPT, WILDCHAT, AZURE, OPENVID, BURSTGPT, MMLU)
}

LONGBENCH: Final = Source(
    name="LongBench summaries",
    prompt=Quantiles(_LEVELS, (1, 65, 748, 1232, 1981, 2722, 3363, 3696, 3807, 3932, 4009, 4054)),
    output=Quantiles(_LEVELS, (5, 36, 61, 79, 115, 167, 241, 373, 512, 512, 512, 512)),
    rank_correlation=-0.11,
    system_tokens=0,
    provenance="surrogate",
    origin="arxiv_summarization of Vidur, Llama-2 tokenizer, up to 4,096 tokens, 14,129 rows; with "
    "the 512 output tokens at which LongBench ends its summaries",
)

BURSTGPT_CHATS: Final = Source(
    name="BurstGPT",
    prompt=Quantiles(_FEW_LEVELS, (2, 18, 74, 360, 1291, 1697, 3023, 4000)),
    output=Quantiles((0.0, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0), (1, 14, 100, 401, 510, 757, 2000)),
    rank_correlation=-0.3,
    system_tokens=0,
    provenance="surrogate",
    origin="quantiles of the first 59,999 rows of BurstGPT_1, cut to the 4,096 tokens of Llama-2",
)

CO_SERVED: Final[dict[str, Source]] = {
    source.name: source for source in (LONGBENCH, BURSTGPT_CHATS)
}
"""What ConServe serves; not part of BlendServe's tables."""
