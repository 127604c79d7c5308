"""How far a fit is off on rows that it has not seen.

Three levels, each a mean absolute percentage error (MAPE):

- every *operator* by itself. Some take 3 microseconds on a clock of one: their error is the
  clock's, and no iteration notices;
- the *linear operators* of an iteration, summed per tokens and tensor-parallel width as they run;
- the *composite*: measured linear operators plus measured attention of the same batch, against the
  same sum from the fit. Decode iterations pair a measured attention row (batch, context) with the
  measured linear row of the nearest token count within a quarter; prefill iterations likewise.

A row counts as unseen if the fit was not made from it, variables and seconds alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int

from aqua_protocol.decoders import DECODERS, DecoderModel
from aqua_simulator.timing.fit import Fit, joined
from aqua_simulator.timing.iteration import KERNEL_OPERATORS, LINEAR_OPERATORS
from aqua_simulator.timing.profiles import Samples

PROFILED_MODELS: Final[dict[str, DecoderModel]] = {
    "Llama-2-7b-hf": DECODERS["Llama-2-7B"],
    "Llama-2-70b-hf": DECODERS["Llama-2-70B"],
    "Meta-Llama-3-8B": DECODERS["Llama-3-8B"],
    "Meta-Llama-3-70B": DECODERS["Llama-3-70B"],
    "llama31_8b": DECODERS["Llama-3.1-8B"],
    "llama31_70b": DECODERS["Llama-3.1-70B"],
    "qwen3_8b": DECODERS["Qwen3-8B"],
    "qwen3_32b": DECODERS["Qwen3-32B"],
}
"""Names in profile files."""


@dataclass(frozen=True, slots=True)
class Score:
    """Error of one function or composite.

    Attributes:
        level: `operator`, `linear` or `composite`.
        mape_percent: Mean absolute percentage error.
        row_count: Unseen rows it was measured on.
    """

    level: str
    name: str
    mape_percent: float
    row_count: int


def mape(predicted: Float64[np.ndarray, " rows"], measured: Float64[np.ndarray, " rows"]) -> float:
    """Mean absolute percentage error, in percent."""
    return float(np.mean(np.abs(predicted / measured - 1.0)) * 100.0)


def evaluate(fit: Fit, samples: Iterable[Samples]) -> list[Score]:
    """Score every function that the fit and the samples share; functions without unseen rows drop.

    Returns:
        Operators first, then linear sums, then composites, each in the order of names.
    """
    unseen: dict[str, Samples] = {}
    for group in joined(samples):
        if group.key not in fit:
            continue
        new = ~fit.was_fitted_on(group.key, group.variables, group.seconds)
        if new.any():
            unseen[group.key] = Samples(
                group.key, group.kind, group.variables[new], group.seconds[new], group.file
            )
    operators = [
        Score("operator", key, mape(fit[key](group.variables), group.seconds), len(group.seconds))
        for key, group in sorted(unseen.items())
        if np.all(group.seconds > 0.0)
    ]
    linear = _linear_rows(fit, unseen)
    sums = [
        Score("linear", name, mape(rows.predicted, rows.measured), len(rows.tokens))
        for name, rows in sorted(linear.items())
    ]
    return operators + sums + list(_composites(fit, unseen, linear))


def overall(scores: Iterable[Score], level: str) -> float:
    """Row-weighted MAPE of a level, in percent; NaN when the level has no rows."""
    rows = [(score.mape_percent, score.row_count) for score in scores if score.level == level]
    count = sum(size for _, size in rows)
    return sum(error * size for error, size in rows) / count if count else float("nan")


@dataclass(frozen=True, eq=False)
class _LinearRows:
    """Seconds of one layer's linear operators, by tokens."""

    tokens: Float64[np.ndarray, " rows"]
    measured: Float64[np.ndarray, " rows"]
    predicted: Float64[np.ndarray, " rows"]

    def nearest(self, tokens: float) -> int | None:
        """The row whose token count is within a quarter, or None."""
        index = int(np.argmin(np.abs(self.tokens - tokens)))
        return index if abs(self.tokens[index] - tokens) <= tokens / 4 else None


def _linear_rows(fit: Fit, unseen: dict[str, Samples]) -> dict[str, _LinearRows]:
    found: dict[str, _LinearRows] = {}
    widths = defaultdict(set)
    for key, group in unseen.items():
        if group.kind == "tokens":
            prefix, _, operator = key.rpartition("/")
            widths[prefix].add(operator)
    for prefix, names in widths.items():
        layer = LINEAR_OPERATORS if set(LINEAR_OPERATORS) <= names else KERNEL_OPERATORS
        if not set(layer) <= names:
            continue
        by_operator = [_by_tokens(unseen[f"{prefix}/{name}"]) for name in layer]
        shared = sorted(set.intersection(*(set(part) for part in by_operator)))
        if shared:
            at = np.array(shared)
            predicted = np.sum([fit[f"{prefix}/{name}"](at[:, None]) for name in layer], axis=0)
            measured = np.array([sum(part[tokens] for part in by_operator) for tokens in shared])
            found[prefix] = _LinearRows(at, measured, predicted)
    return found


def _by_tokens(group: Samples) -> dict[float, float]:
    rows: dict[float, list[float]] = defaultdict(list)
    for tokens, seconds in zip(group.variables[:, 0].tolist(), group.seconds.tolist(), strict=True):
        rows[tokens].append(seconds)
    return {tokens: float(np.mean(times)) for tokens, times in rows.items()}


def _composites(
    fit: Fit, unseen: dict[str, Samples], linear: dict[str, _LinearRows]
) -> Iterable[Score]:
    for prefix, rows in sorted(linear.items()):
        gpu, model_key, width_name = prefix.split("/")
        if model_key not in PROFILED_MODELS:
            continue
        model, width = PROFILED_MODELS[model_key], int(width_name.removeprefix("tp"))
        heads, kv_heads = model.head_count / width, max(1.0, model.kv_head_count / width)
        for phase in ("decode", "prefill"):
            group = unseen.get(f"{gpu}/{phase}_attention")
            if group is None:
                continue
            batch, tokens, of_heads, of_kv = group.variables.T
            mine = np.flatnonzero((of_heads == heads) & (of_kv == kv_heads))
            step_tokens = batch if phase == "decode" else batch * tokens
            score = _pair(fit, f"{prefix}/{phase}", rows, group, mine, step_tokens)
            if score is not None:
                yield score
        mixed = unseen.get(f"{prefix}/mixed_attention")
        if mixed is not None:
            every = np.arange(len(mixed.seconds))
            step_tokens = mixed.variables[:, 0] + mixed.variables[:, 2]
            score = _pair(fit, f"{prefix}/mixed", rows, mixed, every, step_tokens)
            if score is not None:
                yield score


def _pair(
    fit: Fit,
    name: str,
    rows: _LinearRows,
    attention: Samples,
    chosen: Int[np.ndarray, " rows"],
    step_tokens: Float64[np.ndarray, " rows"],
) -> Score | None:
    """Score linear operators and attention of the same steps together, per layer."""
    pairs = [(int(index), rows.nearest(float(step_tokens[index]))) for index in chosen]
    found = [(index, row) for index, row in pairs if row is not None]
    if not found:
        return None
    of_attention = np.array([index for index, _ in found])
    of_linear = np.array([row for _, row in found])
    measured = attention.seconds[of_attention] + rows.measured[of_linear]
    predicted = fit[attention.key](attention.variables[of_attention]) + rows.predicted[of_linear]
    return Score("composite", name, mape(predicted, measured), len(found))
