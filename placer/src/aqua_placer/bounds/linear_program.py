"""The interface to HiGHS: sparse linear and integer programs in numpy columns.

Owns the translation to highspy, single-threaded and seeded, and the reading of its verdict.
Promises that `bound` is never on the wrong side of the optimum, also when a program ends early, and
that the same model gives the same solution on a busy machine: work is limited by nodes, and the
clock only by what the budget has left. Does not know what the columns mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aqua_placer.problem.instance import PerRow

if TYPE_CHECKING:
    from highspy import Highs
    from jaxtyping import Float64, Int64

    from aqua_placer.budget import Budget

UNLIMITED_NODES: Final = 2**31 - 1
"""Branch-and-bound nodes; HiGHS's own default. Fixed by its 32-bit counter."""

ABSOLUTE_GAP: Final = 1e-9
"""In the unit of the cost (GB), far below `GRAIN_GB`: the relative gap alone ends a search,
also when it is doubled."""


class Verdict(StrEnum):
    """What a solver can say about a model."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Minimise `cost @ x` with `row_lower <= A x <= row_upper` and `lower <= x <= upper`.

    `A` is given by columns (`by_rows`: by rows): `starts` has one entry more than those, `index`
    and `values` are of its entries. `integral` is for all columns, or 0 or 1 for each.
    """

    cost: Float64[np.ndarray, " columns"]
    lower: Float64[np.ndarray, " columns"]
    upper: Float64[np.ndarray, " columns"]
    starts: Int64[np.ndarray, " columns_and_end"]
    index: Int64[np.ndarray, " entries"]
    values: Float64[np.ndarray, " entries"]
    row_lower: PerRow
    row_upper: PerRow
    by_rows: bool = False
    integral: bool | Int64[np.ndarray, " columns"] = False

    @classmethod
    def of(
        cls,
        dense: Float64[np.ndarray, "columns rows"],
        cost: Float64[np.ndarray, " columns"],
        row_lower: PerRow,
        row_upper: PerRow,
        *,
        upper: float = np.inf,
        integral: bool = False,
    ) -> LinearModel:
        """The model whose columns are the *rows* of `dense`, each between 0 and `upper`."""
        column, row = np.nonzero(dense)
        starts = np.zeros(len(dense) + 1, dtype=np.int64)
        np.cumsum(np.bincount(column, minlength=len(dense)), out=starts[1:])
        return cls(
            cost=cost,
            lower=np.zeros(len(cost)),
            upper=np.full(len(cost), upper),
            starts=starts,
            index=row.astype(np.int64),
            values=dense[column, row].astype(np.float64),
            row_lower=row_lower,
            row_upper=row_upper,
            integral=integral,
        )


@dataclass(frozen=True, eq=False)
class Answer:
    """The verdict; `x` when a point is known; `bound` below every feasible cost."""

    verdict: Verdict
    x: Float64[np.ndarray, " columns"] | None
    cost: float
    bound: float
    row_duals: PerRow | None = None


def as_highs(model: LinearModel) -> Highs:
    """The model in HiGHS, silent and unsolved."""
    import highspy

    highs = highspy.Highs()  # type: ignore[no-untyped-call] # highspy has stubs in part
    highs.silent()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.cost), len(model.row_lower)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = model.cost, model.lower, model.upper
    lp.row_lower_, lp.row_upper_ = model.row_lower, model.row_upper
    formats = highspy.MatrixFormat
    lp.a_matrix_.format_ = formats.kRowwise if model.by_rows else formats.kColwise
    lp.a_matrix_.start_ = model.starts.astype(np.int32)
    lp.a_matrix_.index_ = model.index.astype(np.int32)
    lp.a_matrix_.value_ = model.values
    if model.integral is not False:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        whole = np.broadcast_to(np.asarray(model.integral, dtype=np.int64), len(model.cost))
        lp.integrality_ = [kinds[flag] for flag in whole.tolist()]
    highs.passModel(lp)
    return highs


def solve(
    model: LinearModel,
    budget: Budget,
    seed: int = 0,
    *,
    relative_gap: float = 0.0,
    max_nodes: int = UNLIMITED_NODES,
) -> Answer:
    """Solve within what the budget has left; an interrupt ends an integer program early."""
    import highspy

    if budget.expired():
        return Answer(Verdict.UNKNOWN, None, np.inf, -np.inf)
    highs, is_integer = as_highs(model), model.integral is not False
    for option, value in (
        ("threads", 1),
        ("random_seed", seed),
        ("time_limit", budget.remaining_s()),
        ("mip_rel_gap", relative_gap),
        ("mip_abs_gap", ABSOLUTE_GAP),
        ("mip_max_nodes", max_nodes),
    ):
        highs.setOptionValue(option, value)
    if is_integer:

        def stop_when_asked(event: Any) -> None:  # noqa: ANN401 - highspy's callback event
            if budget.expired():
                event.data_in.user_interrupt = True

        highs.cbMipInterrupt += stop_when_asked
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    verdicts = highspy.HighsModelStatus
    if status in (verdicts.kInfeasible, verdicts.kUnboundedOrInfeasible):
        return Answer(Verdict.INFEASIBLE, None, np.inf, np.inf)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        bound = info.mip_dual_bound if is_integer else -np.inf
        return Answer(Verdict.UNKNOWN, None, np.inf, bound)
    solution = highs.getSolution()
    cost = info.objective_function_value
    verdict = Verdict.OPTIMAL if status == verdicts.kOptimal else Verdict.FEASIBLE
    if is_integer:
        return Answer(verdict, np.array(solution.col_value), cost, info.mip_dual_bound)
    bound = cost if verdict is Verdict.OPTIMAL else -np.inf
    return Answer(verdict, np.array(solution.col_value), cost, bound, np.array(solution.row_dual))
