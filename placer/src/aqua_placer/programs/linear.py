"""One door to HiGHS: sparse linear and integer programs in numpy columns.

Owns the translation to highspy, single-threaded and seeded so that the same model gives the same
answer, and the reading of its verdict. Promises that `bound` is never on the wrong side of the
optimum, also after a time limit. Does not know what the columns mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from aqua_placer.budget import Budget
    from aqua_placer.problem.columns import Floats, Ints

FEASIBILITY_TOLERANCE: Final = 1e-7
"""HiGHS's own default for rows and columns, stated because rounding below relies on it."""


UNLIMITED_NODES: Final = 2**31 - 1
"""HiGHS's own default."""


class Verdict(StrEnum):
    """What a solver can say about a model."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, eq=False)
class Model:
    """Minimise `cost @ x` with `row_lower <= A x <= row_upper` and `0 <= x <= upper`.

    `A` is given by columns: `starts` (num_cols + 1), `rows` and `values` of its entries.
    """

    cost: Floats
    upper: Floats
    starts: Ints
    rows: Ints
    values: Floats
    row_lower: Floats
    row_upper: Floats
    lower: Floats | None = None
    integral: bool | Ints = False


@dataclass(frozen=True, eq=False)
class Answer:
    """The verdict; `x` when a point is known; `bound` below every feasible cost."""

    verdict: Verdict
    x: Floats | None
    cost: float
    bound: float
    row_duals: Floats | None = None


def columns_of(dense: Floats) -> tuple[Ints, Ints, Floats]:
    """Column form (starts, rows, values) of `dense`, whose *rows* are the model's columns."""
    column, row = np.nonzero(dense)
    starts = np.zeros(len(dense) + 1, dtype=np.int64)
    np.cumsum(np.bincount(column, minlength=len(dense)), out=starts[1:])
    return starts, row.astype(np.int64), dense[column, row].astype(np.float64)


def solve(
    model: Model,
    budget: Budget,
    *,
    limit_s: float,
    seed: int = 0,
    gap: float = 0.0,
    max_nodes: int | None = None,
) -> Answer:
    """Solve within `limit_s` and what the budget has left; an interrupt ends it early.

    Args:
        max_nodes: Where to stop searching by work instead of by time, so that the same model
            gives the same answer on a busy machine.
    """
    import highspy

    remaining_s = min(limit_s, budget.remaining_s())
    if remaining_s <= 0:
        return Answer(Verdict.UNKNOWN, None, np.inf, -np.inf)
    highs = highspy.Highs()  # type: ignore[no-untyped-call] # highspy has stubs in part
    for option, value in (
        ("output_flag", False),
        ("threads", 1),
        ("random_seed", seed),
        ("time_limit", remaining_s),
        ("mip_rel_gap", gap),
        ("mip_abs_gap", 1e-9),
        ("mip_max_nodes", UNLIMITED_NODES if max_nodes is None else max_nodes),
    ):
        highs.setOptionValue(option, value)
    lp = highspy.HighsLp()
    lp.num_col_ = len(model.cost)
    lp.num_row_ = len(model.row_lower)
    lp.col_cost_ = model.cost
    lp.col_lower_ = np.zeros(len(model.cost)) if model.lower is None else model.lower
    lp.col_upper_ = model.upper
    lp.row_lower_ = model.row_lower
    lp.row_upper_ = model.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = model.starts.astype(np.int32)
    lp.a_matrix_.index_ = model.rows.astype(np.int32)
    lp.a_matrix_.value_ = model.values
    is_mip = model.integral is not False
    if is_mip:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        flags = (
            np.ones(len(model.cost), dtype=int)
            if isinstance(model.integral, bool)
            else model.integral
        )
        lp.integrality_ = [kinds[flag] for flag in flags]
    highs.passModel(lp)
    if is_mip:

        def stop_when_asked(event: Any) -> None:  # noqa: ANN401 - highspy's callback event
            if budget.expired():
                event.data_in.user_interrupt = True

        highs.cbMipInterrupt += stop_when_asked
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    verdicts = highspy.HighsModelStatus
    if status in (verdicts.kInfeasible, verdicts.kUnboundedOrInfeasible):
        return Answer(Verdict.INFEASIBLE, None, np.inf, np.inf)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not found:
        bound = info.mip_dual_bound if is_mip else -np.inf
        return Answer(Verdict.UNKNOWN, None, np.inf, bound)
    solution = highs.getSolution()
    cost = info.objective_function_value
    verdict = Verdict.OPTIMAL if status == verdicts.kOptimal else Verdict.FEASIBLE
    if is_mip:
        return Answer(verdict, np.array(solution.col_value), cost, info.mip_dual_bound)
    bound = cost if verdict is Verdict.OPTIMAL else -np.inf
    return Answer(verdict, np.array(solution.col_value), cost, bound, np.array(solution.row_dual))


class GrowingProgram:
    """A linear program that columns are added to; each solve starts where the last one ended.

    Maximises, unlike `solve`, because its columns are worths. Rows stay as they were given.
    """

    def __init__(self, row_lower: Floats, row_upper: Floats) -> None:
        import highspy

        self._highs = highspy.Highs()  # type: ignore[no-untyped-call] # highspy has stubs in part
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            self._highs.setOptionValue(option, value)
        self._highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
        count = len(row_lower)
        none = np.zeros(0, dtype=np.int32)
        starts = np.zeros(count, dtype=np.int32)
        self._highs.addRows(count, row_lower, row_upper, 0, starts, none, np.zeros(0))

    def add(self, worth: Floats, starts: Ints, rows: Ints, values: Floats) -> None:
        """Add columns with lower bound 0, in the form of `Model`."""
        count = len(worth)
        self._highs.addCols(
            count,
            worth,
            np.zeros(count),
            np.full(count, np.inf),
            len(rows),
            starts[:-1].astype(np.int32),
            rows.astype(np.int32),
            values,
        )

    def solve(self, limit_s: float) -> tuple[float, Floats, Floats] | None:
        """(worth, columns, duals of the rows) of the optimum; None when there is none in time.

        The duals are the worth of one more unit of a row.
        """
        import highspy

        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + limit_s)
        self._highs.run()
        if self._highs.getModelStatus() == highspy.HighsModelStatus.kUnknown:
            # Numbers got in the way of the last basis.
            self._highs.clearSolver()
            self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = self._highs.getSolution()
        worth = self._highs.getInfo().objective_function_value
        return worth, np.array(solution.col_value), np.array(solution.row_dual)
