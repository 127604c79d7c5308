"""What to solve a problem for, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from aqua_protocol.plan import MatchingMode, Objective


class Solver(StrEnum):
    """How a placement is found."""

    AUTO = "auto"
    MILP = "milp"


class Backend(StrEnum):
    """Solvers that can take the paper's program."""

    HIGHS = "highs"
    GUROBI = "gurobi"
    CBC = "cbc"


@dataclass(frozen=True)
class Request:
    """What to solve for.

    Attributes:
        backend: Which solver takes the program when `solver` is `milp`.
    """

    objective: Objective = Objective.COVERAGE
    solver: Solver = Solver.AUTO
    backend: Backend = Backend.HIGHS
    matching: MatchingMode = MatchingMode.STABLE
    seed: int = 0

    @property
    def label(self) -> str:
        """The solver as plans name it."""
        suffix = f":{self.backend.value}" if self.solver is Solver.MILP else ""
        return self.solver.value + suffix
