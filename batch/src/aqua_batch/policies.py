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
    policy: Policy,
    prepared: PreparedPool,
    *,
    capacity_tokens: int,
    max_step_tokens: int,
    seed: int = 0,
) -> AdmissionPolicy:
    """The named policy over a prepared pool."""
    # Loaded late: the command line needs the names long before the policies, if at all.
    import numpy as np

    from aqua_schedulers import baselines
    from aqua_schedulers.blendserve import BlendMode
    from aqua_schedulers.blendserve.order import charged

    if policy in {Policy.FORESIGHT, Policy.PAPER}:
        return prepared.policy(
            capacity_tokens=capacity_tokens,
            mode=BlendMode(policy.value),
            max_step_tokens=max_step_tokens,
        )
    tree = prepared.tree
    if policy is Policy.DFS:
        order = baselines.dfs_order(tree)
    elif policy is Policy.FCFS:
        order = baselines.fcfs_order(tree.request_count)
    elif policy is Policy.RANDOM:
        order = baselines.random_order(tree.request_count, seed=seed)
    else:
        order = baselines.balanced_order(
            prepared.cost.density(tree.prompt_tokens, prepared.lengths.mean)
        )
    fresh = np.empty(tree.request_count, np.int64)
    fresh[order] = charged(tree, tree.edge_tokens.astype(np.float64), order).astype(np.int64)
    return baselines.OrderedAdmission(
        order, prepared.reserved_tokens, fresh, token_budget=max_step_tokens
    )
