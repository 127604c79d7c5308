"""The paper's program over group x server binaries, as referee: one model, three solvers.

    min  H x C + M          |cnt_s| <= C, |mem_s| <= M for every server (signed: one side only)
    max  sum w tp t_c       t_c <= need, t_c <= spare of every producer that c uses

C and M are free variables: all-consumer clusters stay feasible, which the artifact's form (maxima
with lower bound 0, tied by equality) is not. Pins and sets kept apart are rows like any other. It
is slow beyond a few hundred GPUs, because servers of a class are interchangeable; `auto` is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jaxtyping import Int64

from aqua_placer.bounds.linear_program import LinearModel, Verdict
from aqua_placer.budget import Budget
from aqua_placer.errors import ProblemInfeasibleError, ProblemInvalidError
from aqua_placer.plan.assembly import SolveResult
from aqua_placer.problem.instance import GRAIN_GB, Instance, Placement
from aqua_placer.problem.request import Backend, Request
from aqua_placer.search.construction import any_placement
from aqua_placer.search.repair import repair
from aqua_placer.solve.backends import BACKENDS
from aqua_protocol.plan import Objective

MAX_VARIABLES: Final = 400_000
"""Beyond, the model alone takes gigabytes and no solver finishes; doubled, twice the memory."""

MAX_ROWS: Final = 1_000_000
"""Rows of the coverage program: consumers x producers x servers; doubled, twice the memory."""


@dataclass
class Rows:
    """A program being written, row by row."""

    columns: list[tuple[float, float, float, bool]] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    entries: list[tuple[int, float]] = field(default_factory=list)
    sides: list[tuple[float, float]] = field(default_factory=list)

    def variable(self, cost: float, lower: float, upper: float, *, whole: bool) -> int:
        """A new column; returns its index."""
        self.columns.append((cost, lower, upper, whole))
        return len(self.columns) - 1

    def row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        """A new row: lower <= sum of value x column <= upper; without terms it says nothing."""
        if terms:
            self.entries += terms
            self.starts.append(len(self.entries))
            self.sides.append((lower, upper))

    def model(self) -> LinearModel:
        """The program as solvers take it."""
        index, values = zip(*self.entries, strict=True)
        cost, lower, upper, integral = np.array(self.columns, dtype=np.float64).T
        row_lower, row_upper = np.array(self.sides).T
        return LinearModel(
            cost,
            lower,
            upper,
            np.array(self.starts),
            np.array(index),
            np.array(values),
            row_lower,
            row_upper,
            by_rows=True,
            integral=integral.astype(np.int64),
        )


def solve_paper_program(instance: Instance, request: Request, budget: Budget) -> SolveResult:
    """The strategy: the program's placement with what it proved.

    Raises:
        SolverUnavailableError, ProblemInfeasibleError, ProblemInvalidError: As `solve_program`.
    """
    placement, bound = solve_program(
        instance, request.objective, request.backend, budget, request.seed
    )
    if placement is None:
        # Out of time before the first solution: any placement, with the bound as far as proven.
        placement = any_placement(instance, budget)
        if instance.is_constrained:
            placement = repair(instance, placement, request.seed)
    elif not instance.is_constrained:
        placement = _in_order(instance, placement)
    return SolveResult.of(request.objective, placement, bound)


def solve_program(
    instance: Instance, objective: Objective, backend: Backend, budget: Budget, seed: int
) -> tuple[Placement | None, float]:
    """The best placement known for `objective`, if there is one, and the bound that is proven.

    Raises:
        SolverUnavailableError: Not installed, no licence, or too large for the licence.
        ProblemInfeasibleError: Proven that no placement satisfies pins and sets kept apart.
        ProblemInvalidError: Too large for this formulation.
    """
    if instance.num_groups * instance.servers.count > MAX_VARIABLES:
        raise ProblemInvalidError(
            f"{instance.num_groups} groups on {instance.servers.count} servers are too many for "
            "the group x server program",
            remedy="Use `--solver auto`.",
        )
    rows = Rows()
    x = _assignment(instance, rows)
    if objective is Objective.COVERAGE:
        _coverage(instance, rows, x)
    else:
        _minmax(instance, rows, x, objective)
    budget.report(f"{backend} starts")
    answer = BACKENDS[backend](rows.model(), budget, seed)
    if answer.verdict is Verdict.INFEASIBLE:
        raise ProblemInfeasibleError(
            "no placement satisfies group sizes, pins and sets kept apart together",
            remedy="Loosen a pin or an anti-affinity, or add a server.",
        )
    placement = None if answer.x is None else answer.x[x].argmax(axis=1).astype(np.int64)
    sign = -1.0 if objective is Objective.COVERAGE else 1.0
    return placement, sign * answer.bound


def _assignment(instance: Instance, rows: Rows) -> Int64[np.ndarray, "groups servers"]:
    servers = instance.servers
    x = np.zeros((instance.num_groups, servers.count), dtype=np.int64)
    for group in range(instance.num_groups):
        mask = instance.allowed.get(group)
        for server in range(servers.count):
            fits = instance.tp[group] <= servers.capacity[server]
            may = fits and (mask is None or mask[server])
            x[group, server] = rows.variable(0.0, 0.0, float(may), whole=True)
        rows.row([(int(column), 1.0) for column in x[group]], 1.0, 1.0)
    for server in range(servers.count):
        terms = [(int(x[g, server]), float(instance.tp[g])) for g in range(instance.num_groups)]
        rows.row(terms, -np.inf, float(servers.capacity[server]))
        for members in instance.apart:
            rows.row([(int(x[g, server]), 1.0) for g in members], -np.inf, 1.0)
    return x


def _minmax(
    instance: Instance, rows: Rows, x: Int64[np.ndarray, "groups servers"], objective: Objective
) -> None:
    most = float((instance.tp[:, None] * np.abs(instance.r_gb)).sum())
    lower = 0.0 if objective is Objective.ABS else -most
    mem = rows.variable(1.0, lower, most, whole=False)
    shards = float(instance.tp.sum())
    # cnt is a whole number anyway; saying so lets the solver branch on it.
    cnt_lower = 0.0 if objective is Objective.ABS else -shards
    cnt = rows.variable(instance.hbm_gb, cnt_lower, shards, whole=True)
    for server in range(instance.servers.count):
        kind = int(instance.servers.class_of[server])
        for maximum, column in ((mem, instance.r_gb), (cnt, instance.sign)):
            terms = [
                (int(x[g, server]), float(instance.tp[g] * column[g, kind]))
                for g in range(instance.num_groups)
                if column[g, kind]
            ]
            rows.row([*terms, (maximum, -1.0)], -np.inf, 0.0)
            if objective is Objective.ABS:
                rows.row([*terms, (maximum, 1.0)], 0.0, np.inf)


def _coverage(instance: Instance, rows: Rows, x: Int64[np.ndarray, "groups servers"]) -> None:
    """Which producers each consumer uses, on one server; sizes must not depend on the class."""
    if not (np.abs(instance.r_gb - instance.r_gb[:, :1]) < GRAIN_GB).all():
        raise ProblemInvalidError(
            "coverage as a program needs sizes that are the same on every server class",
            remedy="Use `--solver auto`, or the objective abs.",
        )
    r_gb = instance.r_gb[:, 0]
    consumers = np.nonzero(r_gb < -GRAIN_GB / 2)[0].tolist()
    producers = np.nonzero(r_gb > GRAIN_GB / 2)[0].tolist()
    if len(consumers) * len(producers) * instance.servers.count > MAX_ROWS:
        raise ProblemInvalidError(
            f"coverage of {len(consumers)} consumers by {len(producers)} producers on "
            f"{instance.servers.count} servers is too large for the program over binaries",
            remedy="Use `--solver auto`.",
        )
    lent: dict[int, list[int]] = {producer: [] for producer in producers}
    for consumer in consumers:
        need, shards = -float(r_gb[consumer]), float(instance.tp[consumer])
        worth = float(instance.weight[consumer]) * shards
        covered = rows.variable(-worth, 0.0, need, whole=False)
        served = rows.variable(0.0, 0.0, 1.0, whole=True)
        rows.row([(covered, 1.0), (served, -need)], -np.inf, 0.0)
        taken = []
        for producer in producers:
            spare = float(r_gb[producer])
            uses = rows.variable(0.0, 0.0, 1.0, whole=True)
            most = float(min(instance.tp[consumer], instance.tp[producer]))
            amount = rows.variable(0.0, 0.0, most, whole=True)
            rows.row([(amount, 1.0), (uses, -most)], -np.inf, 0.0)
            if spare < need:
                rows.row([(covered, 1.0), (uses, need - spare)], -np.inf, need)
            for server in range(instance.servers.count):
                here, there = int(x[consumer, server]), int(x[producer, server])
                rows.row([(here, 1.0), (there, -1.0), (uses, 1.0)], -np.inf, 1.0)
            taken.append((amount, 1.0))
            lent[producer].append(amount)
        rows.row([*taken, (served, -shards)], 0.0, 0.0)
    for producer in producers:
        rows.row([(a, 1.0) for a in lent[producer]], -np.inf, float(instance.tp[producer]))


def _in_order(instance: Instance, placement: Placement) -> Placement:
    """The same placement with the servers of a class renamed in the order of their first groups.

    Some solvers (CBC) answer the same question now with one and now with another of the
    placements that differ in server names alone.
    """
    servers, first = np.unique(placement, return_index=True)
    renamed = np.arange(instance.servers.count)
    class_of = instance.servers.class_of
    for kind in range(len(instance.servers.counts)):
        held = servers[class_of[servers] == kind]
        by_first = held[np.argsort(first[np.isin(servers, held)], kind="stable")]
        renamed[by_first] = np.nonzero(class_of == kind)[0][: len(held)]
    result: Placement = renamed[placement]
    return result
