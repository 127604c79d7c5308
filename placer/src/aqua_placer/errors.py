"""What can be wrong with a problem, a plan, a solver or a rollout; each names item and remedy."""

from __future__ import annotations

from aqua_protocol import AquaError, ConfigError


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


class MappingInvalidError(ConfigError):
    """A mapping of a plan to a cluster is none, or contradicts itself."""

    code = "mapping_invalid"
    default_remedy = "Correct the named place; docs/operations/plans.md lists what a mapping says."


class MappingIncompleteError(ConfigError):
    """A mapping says nothing of a group or server that a plan has."""

    code = "mapping_incomplete"
    default_remedy = (
        "Add these to the file that --mapping names; `defaults` are for all models, and a name "
        "with * is for all that match. docs/operations/plans.md has an example."
    )


class DomainTooLargeError(ConfigError):
    """A server of a plan cannot be one node's GPUs in one ResourceClaim."""

    code = "domain_too_large"


class StepFailedError(AquaError):
    """A step of a re-placement was not carried out; those before it were."""

    code = "step_failed"
    http_status = 409


class StepUnconfirmedError(StepFailedError):
    """A step's hook ended well, but the coordinator does not see its result."""

    code = "step_unconfirmed"


class StartDiffersError(AquaError):
    """A cluster is not where a re-placement begins."""

    code = "start_differs"
    http_status = 409


class RolloutJournalError(ConfigError):
    """A journal is of another plan, in use, or not a journal."""

    code = "rollout_journal"
