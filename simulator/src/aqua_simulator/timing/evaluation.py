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
from functools import reduce
from typing import Final

import numpy as np
from jaxtyping import Float64

from aqua_protocol.decoders import DECODERS, DecoderModel
from aqua_simulator.timing.fit import Fit, joined
from aqua_simulator.timing.interpolation import Curve
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
        new = fit.unseen(group)
        if group.key in fit and len(new.seconds):
            unseen[group.key] = new
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
        parts = [unseen[f"{prefix}/{name}"] for name in layer]
        means = [Curve.fit(part.variables[:, 0], part.seconds) for part in parts]
        shared = reduce(np.intersect1d, (curve.points for curve in means))
        if len(shared):
            predicted = np.sum([fit[part.key](shared[:, None]) for part in parts], axis=0)
            measured = np.sum([curve(shared) for curve in means], axis=0)
            found[prefix] = _LinearRows(shared, measured, predicted)
    return found


def _composites(
    fit: Fit, unseen: dict[str, Samples], linear: dict[str, _LinearRows]
) -> Iterable[Score]:
    """Score linear operators and attention of the same steps together, per layer."""
    for prefix, rows in sorted(linear.items()):
        gpu, model_key, width_name = prefix.split("/")
        if model_key not in PROFILED_MODELS:
            continue
        model, width = PROFILED_MODELS[model_key], int(width_name.removeprefix("tp"))
        heads, kv_heads = model.head_count / width, max(1.0, model.kv_head_count / width)
        for phase in ("decode", "prefill", "mixed"):
            owner = prefix if phase == "mixed" else gpu
            group = unseen.get(f"{owner}/{phase}_attention")
            if group is None:
                continue
            # Columns as in `profiles.VARIABLES`.
            one, two, three, four = group.variables.T
            mine = np.ones(len(one), bool)
            if phase == "mixed":
                step_tokens = one + three
            else:
                mine = (three == heads) & (four == kv_heads)
                step_tokens = one if phase == "decode" else one * two
            nearest = [(index, rows.nearest(step_tokens[index])) for index in np.flatnonzero(mine)]
            pairs = [(index, row) for index, row in nearest if row is not None]
            if not pairs:
                continue
            of_attention, of_linear = np.array(pairs).T
            measured = group.seconds[of_attention] + rows.measured[of_linear]
            attention = fit[group.key](group.variables[of_attention])
            error = mape(attention + rows.predicted[of_linear], measured)
            yield Score("composite", f"{prefix}/{phase}", error, len(pairs))
