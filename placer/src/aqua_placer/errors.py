"""What can be wrong with a problem, a plan or a solver; each error names item and remedy."""

from __future__ import annotations

from aqua_protocol import ConfigError


class ProblemInvalidError(ConfigError):
    """A problem contradicts itself or its schema."""

    code = "problem_invalid"
    http_status = 422


class ProblemInfeasibleError(ConfigError):
    """Every part of the problem is sound, but no placement satisfies all of it."""

    code = "problem_infeasible"
    http_status = 422


class PlanInvalidError(ConfigError):
    """A plan does not belong to the problem, was altered, or is not a plan."""

    code = "plan_invalid"
    http_status = 422


class SolverUnavailableError(ConfigError):
    """A selected solver is not installed, has no licence, or refuses the size."""

    code = "solver_unavailable"
    http_status = 501
    default_remedy = "Use `--solver auto`, which needs no licence."
