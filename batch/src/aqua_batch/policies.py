"""The policies by name: blended orders and the baselines, for the command line."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aqua_schedulers.admission import AdmissionPolicy
    from aqua_schedulers.blendserve import PreparedPool


class Policy(StrEnum):
    """What decides the order."""

    FORESIGHT = "foresight"
    PAPER = "paper"
    DFS = "dfs"
    FCFS = "fcfs"
    RANDOM = "random"
    BALANCED = "balanced"


def policy_for(
    policy: Policy, prepared: PreparedPool, *, capacity_tokens: int, max_step_tokens: int
) -> AdmissionPolicy:
    """The named policy over a prepared pool."""
    # Loaded late: the command line needs the names long before the policies, if at all.
    from aqua_schedulers.baselines import Baseline, OrderedAdmission
    from aqua_schedulers.blendserve import BlendMode

    if policy in {Policy.FORESIGHT, Policy.PAPER}:
        return prepared.policy(
            capacity_tokens=capacity_tokens,
            mode=BlendMode(policy.value),
            max_step_tokens=max_step_tokens,
        )
    tree = prepared.tree
    density = prepared.cost.density(tree.prompt_tokens, prepared.lengths.mean)
    order = Baseline(policy.value).order(tree, density, seed=0)
    return OrderedAdmission(order, prepared.reserved_tokens, tree, token_budget=max_step_tokens)
