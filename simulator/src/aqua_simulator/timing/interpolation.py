"""Two interpolators that turn a profile table into a function: a curve and a surface.

A *curve* has one variable (tokens of a step, bytes of a message) and is profiled densely: the
straight line between neighbours is as good as anything, because kernels move in stairs that no
smooth formula follows. Rows at one point are averaged.

A *surface* has several variables on a coarse grid (batch, context, heads), half of it unmeasured.
Two layers: a physical baseline, `t = sum of c_i * work_i` with non-negative `c_i` (a floor per
call, bytes, floating-point operations), fitted for relative error; then a local linear regression
of what the baseline leaves, in logarithms, over the nearest rows. The baseline carries it where
there are no rows, the regression bends it to the kernel.

Nothing here knows what is measured; `profiles` names the variables and the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from aqua_protocol.errors import ConfigError
from aqua_schedulers.compiled import compiled

NEIGHBOURS: Final = 20
"""Rows that a local regression looks at; 16 to 32 differ by less than half a point of error.
Doubled, it smooths over the stairs of small kernels."""

RIDGE: Final = 1e-3
"""Added to the diagonal where weights are of order 1: keeps a regression defined where all
neighbours share a coordinate. Doubled, slopes shrink by a thousandth more."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A function of one variable, piecewise linear, a straight line beyond its ends.

    Attributes:
        points: Ascending, shape (num_points,).
        seconds: Time at each point, shape (num_points,).
    """

    points: Float64[np.ndarray, " points"]
    seconds: Float64[np.ndarray, " points"]

    @classmethod
    def fit(
        cls, points: Float64[np.ndarray, " points"], seconds: Float64[np.ndarray, " points"]
    ) -> Curve:
        """Average rows at equal points."""
        unique, index = np.unique(points, return_inverse=True)
        sums = np.bincount(index, weights=seconds, minlength=len(unique))
        return cls(unique, sums / np.bincount(index, minlength=len(unique)))

    def __call__(self, point: ArrayLike) -> Float64[np.ndarray, " ..."]:
        """Seconds at each point, same shape."""
        at = np.asarray(point, dtype=np.float64)
        inside = np.interp(at, self.points, self.seconds)
        span = max(1, len(self.points) // 8)
        if len(self.points) > span:
            rise = self.seconds[-1] - self.seconds[-1 - span]
            slope = max(0.0, rise / (self.points[-1] - self.points[-1 - span]))
            inside = inside + slope * np.maximum(0.0, at - self.points[-1])
        return np.asarray(inside, dtype=np.float64)


def non_negative_fit(
    work: Float64[np.ndarray, "rows terms"], seconds: Float64[np.ndarray, " points"]
) -> Float64[np.ndarray, " terms"]:
    """Coefficients >= 0 that minimise the squared relative error of `work @ c`, times positive."""
    scaled = work / seconds[:, None]
    # Columns span ten decades; scaled to unit norm, or the small ones drown in rounding.
    norms = np.linalg.norm(scaled, axis=0)
    coefficients, _ = nnls(scaled / norms, np.ones(len(seconds)))
    if not coefficients.any():
        raise ConfigError("the profile rows fit no mixture of work", remedy="Check the units.")
    return np.asarray(coefficients / norms)


@compiled
def _regress(
    rows: Float64[np.ndarray, "rows variables"],
    residual: Float64[np.ndarray, " rows"],
    query: Float64[np.ndarray, " variables"],
) -> float:
    """Local linear regression of `residual` at `query`; tricube weights over the nearest rows."""
    count, size = rows.shape
    near = min(NEIGHBOURS, count - 1)
    distance = np.empty(count)
    for row in range(count):
        total = 0.0
        for column in range(size):
            total += (rows[row, column] - query[column]) ** 2
        distance[row] = total
    radius = np.sqrt(np.partition(distance, near)[near]) * 1.0001 + 1e-9
    normal = np.zeros((size + 1, size + 1))
    right = np.zeros(size + 1)
    term = np.empty(size + 1)
    for row in range(count):
        ratio = np.sqrt(distance[row]) / radius
        if ratio >= 1.0:
            continue
        weight = (1.0 - ratio**3) ** 3 + 1e-6
        term[0] = 1.0
        for column in range(size):
            term[column + 1] = rows[row, column] - query[column]
        for i in range(size + 1):
            right[i] += weight * term[i] * residual[row]
            for j in range(size + 1):
                normal[i, j] += weight * term[i] * term[j]
    for i in range(1, size + 1):
        normal[i, i] += RIDGE
    return float(np.linalg.solve(normal, right)[0])


@dataclass(frozen=True, eq=False)
class Surface:
    """A function of several variables: baseline x exp(local regression of the rest).

    Attributes:
        coefficients: Of the baseline's work terms, shape (num_terms,).
        rows: Logarithms of the variables (of 1 + variable), shape (num_rows, num_variables).
        residual: Logarithm of measured over baseline, shape (num_rows,).
    """

    coefficients: Float64[np.ndarray, " terms"]
    rows: Float64[np.ndarray, "rows variables"]
    residual: Float64[np.ndarray, " rows"]

    @classmethod
    def fit(
        cls,
        variables: Float64[np.ndarray, "rows variables"],
        work: Float64[np.ndarray, "rows terms"],
        seconds: Float64[np.ndarray, " rows"],
    ) -> Surface:
        """Fit to measured rows, more of them than a regression has neighbours."""
        assert len(seconds) > NEIGHBOURS, len(seconds)
        coefficients = non_negative_fit(work, seconds)
        residual = np.log(seconds / (work @ coefficients))
        # Rounded here, so that a fit read back from its file is the same to the last bit.
        rows = np.asarray(np.round(np.log1p(variables), 9), dtype=np.float64)
        rounded = np.asarray(np.round(residual, 9), dtype=np.float64)
        return cls(coefficients, rows, rounded)

    def __call__(
        self,
        variables: Float64[np.ndarray, "rows variables"],
        work: Float64[np.ndarray, "rows terms"],
    ) -> Float64[np.ndarray, " ..."]:
        """Seconds for each row of `variables` and its `work`.

        Correction beyond the measured range is that of the range's edge.
        """
        low, high = self._range
        queries = np.clip(np.log1p(variables), low, high)
        bend = np.array([self._bend(tuple(query)) for query in queries])
        return np.asarray((work @ self.coefficients) * np.exp(bend), dtype=np.float64)

    @cached_property
    def _range(self) -> tuple[Float64[np.ndarray, " variables"], Float64[np.ndarray, " variables"]]:
        return self.rows.min(axis=0), self.rows.max(axis=0)

    @cached_property
    def _bend(self) -> Callable[[tuple[float, ...]], float]:
        """The regression at a point; engines ask for the same small batches again and again."""
        return lru_cache(MEMORY_LIMIT)(
            lambda query: _regress(self.rows, self.residual, np.array(query))
        )


MEMORY_LIMIT: Final = 1 << 18
"""Regressions remembered per surface. Doubled, a surface may take 40 MB more."""
