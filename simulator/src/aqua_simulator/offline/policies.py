"""Policies of `aqua_schedulers` for a workload: they see its pool, not the truth it runs on.

A policy is given what a planner would have: prompts as a prefix tree, output lengths of media,
and the lengths of a small sample. The workload's true lengths go to the engine alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from aqua_schedulers.admission import AdmissionPolicy
from aqua_schedulers.baselines import Baseline, OrderedAdmission
from aqua_schedulers.blendserve.cost import ResourceCost
from aqua_schedulers.blendserve.lengths import UNKNOWN, RequestPool, choose_sample
from aqua_schedulers.blendserve.paper import DENSE_TOKENS
from aqua_schedulers.blendserve.preparation import BlendMode, prepare
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.workload import OfflineWorkload

DENSE_BATCH_TOKENS: Final = 2048
"""Tokens of a step of the baselines: NanoFlow's dense batch for an 8B model on an A100. Doubled,
the baselines' steps prefill more at once."""


class OfflinePolicy(StrEnum):
    """Orders and policies that can be compared."""

    DFS = "dfs"
    FCFS = "fcfs"
    RANDOM = "random"
    BALANCED = "balanced"
    PAPER = "blendserve"
    FORESIGHT = "foresight"


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a planner knows and may use.

    Attributes:
        sample_probability: Share of requests whose output length is found out beforehand.
        media_known: Whether media requests state their length (section 3.2); False samples them
            like all others.
        all_known: Whether every length is known: the oracle.
        dense_tokens: Fewest tokens to which the published policy paces a step; see `DENSE_TOKENS`.
        seed: Of the sample and of random orders.
    """

    capacity_tokens: int
    sample_probability: float = 0.01
    media_known: bool = True
    all_known: bool = False
    max_step_tokens: int = 8192
    dense_tokens: int = DENSE_TOKENS
    seed: int = 0


def pool_of(workload: OfflineWorkload, settings: PlanSettings) -> RequestPool:
    """What a planner sees of the workload."""
    tree = workload.tree
    truth = workload.output_tokens.astype(np.int32)
    unknown = np.full(len(truth), UNKNOWN, np.int32)
    known = unknown
    if settings.all_known:
        known = truth
    elif settings.media_known:
        known = np.where(workload.known_output, truth, UNKNOWN).astype(np.int32)
    sample = choose_sample(tree, known, probability=settings.sample_probability, seed=settings.seed)
    sampled = unknown.copy()
    sampled[sample] = truth[sample]
    return RequestPool(tree, known, sampled)


def policy_for(
    name: OfflinePolicy, workload: OfflineWorkload, cost: StepCost, settings: PlanSettings
) -> AdmissionPolicy:
    """The named policy over the workload's pool."""
    pool = pool_of(workload, settings)
    # What a policy knows of the cost; the interference it does not.
    costs = ResourceCost(*cost[:3], linear_floor_s=cost.linear_floor_s)
    if name in {OfflinePolicy.PAPER, OfflinePolicy.FORESIGHT}:
        return _blended(name, pool, costs, settings)
    lengths, tree = pool.estimate(), pool.tree
    density = costs.density(tree.prompt_tokens, lengths.mean)
    return OrderedAdmission(
        Baseline(name.value).order(tree, density, seed=settings.seed),
        tree.prompt_tokens + np.ceil(lengths.mean).astype(np.int64),
        tree,
        token_budget=DENSE_BATCH_TOKENS,
    )


def _blended(
    name: OfflinePolicy, pool: RequestPool, costs: ResourceCost, settings: PlanSettings
) -> AdmissionPolicy:
    mode = BlendMode.PAPER if name is OfflinePolicy.PAPER else BlendMode.FORESIGHT
    return prepare(pool, costs).policy(
        capacity_tokens=settings.capacity_tokens,
        mode=mode,
        max_step_tokens=settings.max_step_tokens,
        dense_tokens=settings.dense_tokens,
    )
