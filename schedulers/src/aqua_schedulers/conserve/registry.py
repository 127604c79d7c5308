"""Co-serving policies by name: what command lines and engine configurations say."""

from __future__ import annotations

from aqua_protocol.errors import ConfigError
from aqua_schedulers.cfs.registry import DEFAULT_BLOCK_TOKENS
from aqua_schedulers.conserve.policy import ConservePolicy
from aqua_schedulers.conserve.priority import PriorityPolicy
from aqua_schedulers.conserve.profile import StepTimeProfile
from aqua_schedulers.conserve.readings import GuardedReading, Objectives, PaperReading
from aqua_schedulers.conserve.settings import ConserveSettings
from aqua_schedulers.conserve.step_time import StepTimes
from aqua_schedulers.policy_names import PolicyKind


class CoServingPolicyName(PolicyKind):
    """Policies on command lines and in engine configurations."""

    PRIORITY = "priority"
    CONSERVE = "conserve"
    GUARDED = "guarded"

    @classmethod
    def best(cls) -> CoServingPolicyName:
        """Ours; `aqua-sim paper conserve-beyond` says by how much."""
        return cls.GUARDED


def co_serving_policy(
    name: CoServingPolicyName | str,
    objectives: Objectives,
    profile: StepTimeProfile | None,
    settings: ConserveSettings | None = None,
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> ConservePolicy:
    """Make a policy for one engine; without a profile it keeps to a small fixed budget.

    Raises:
        ConfigError: No policy of that name, or objectives that are not positive.
    """
    if min(objectives.ttft_s, objectives.tpot_s) <= 0.0:
        raise ConfigError(
            "objectives must be positive", remedy="Give seconds, for example 1.5 and 0.11."
        )
    settings = settings or ConserveSettings()
    kind = CoServingPolicyName.named(name)
    guarded = GuardedReading(
        objectives, settings.objective_share, settings.wait_share, settings.stretch
    )
    made = PriorityPolicy if kind is CoServingPolicyName.PRIORITY else ConservePolicy
    return made(
        guarded if kind is CoServingPolicyName.GUARDED else PaperReading(objectives),
        objectives,
        StepTimes(profile),
        settings,
        block_tokens=block_tokens,
    )
