"""Policies of `aqua_schedulers` for a workload: they see its pool, not the truth it runs on.

A policy is given what a planner would have: prompts as a prefix tree, output lengths of media,
and the lengths of a small sample. The workload's true lengths go to the engine alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Final

import numpy as np

from aqua_schedulers.admission import AdmissionPolicy, BatchView, StepPlan
from aqua_schedulers.baselines import Baseline, OrderedAdmission
from aqua_schedulers.blendserve.cost import ResourceCost
from aqua_schedulers.blendserve.lengths import UNKNOWN, RequestPool, choose_sample
from aqua_schedulers.blendserve.preparation import BlendMode, prepare
from aqua_schedulers.blendserve.tree import PrefixTree
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.workload import OfflineWorkload

DENSE_BATCH_TOKENS: Final = 2048
"""Tokens of a step of the baselines: NanoFlow's dense batch for an 8B model on an A100. Doubled,
the baselines' steps prefill more at once."""

DENSE_EFFICIENCY: Final = 0.8
"""Share of their full rate at which linear layers count as dense; shares from 0.76 to 0.83 give the
same `DENSE_TOKENS`, and it cannot be doubled."""

TILE_TOKENS: Final = 128
"""Fixed by the hardware: rows of a matrix tile on an A100; kernels take the next multiple."""


def dense_tokens(
    *, floor_s: float, s_per_token: float, exponent: float, efficiency: float = DENSE_EFFICIENCY
) -> int:
    """Fewest tokens, in whole tiles, at which linear layers reach a share of their full rate.

    Args:
        floor_s, s_per_token, exponent: `t = (floor^n + (b T)^n)^(1/n)`, as measured.
    """
    # b T / t = efficiency, solved for T.
    ratio: float = (efficiency**-exponent - 1.0) ** (-1.0 / exponent)
    return TILE_TOKENS * ceil(ratio * floor_s / (s_per_token * TILE_TOKENS))


DENSE_TOKENS: Final = dense_tokens(floor_s=9.09e-3, s_per_token=67.7e-6, exponent=1.28)
"""Fewest tokens of a step in the published mode, 384: NanoFlow forms dense batches for the tensor
cores. The floor, slope and exponent are Vidur's profile of Llama-3-8B on an A100. The paper gives
no number; any efficiency from 76 to 83 percent gives this one, and Figure 6's sensitivity shows
what others do: about 2.5 points of gain for every 64 tokens."""


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
    tree = PrefixTree.from_segments(workload.node_parent, workload.node_tokens, workload.leaf)
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


class DenseSteps:
    """A policy that is never asked for less than a dense step.

    The published policy paces a step to the context that it reads; an engine with a smallest dense
    batch reads, as far as pacing goes, at least the context that this batch would hide.
    """

    def __init__(self, policy: AdmissionPolicy, least_context_tokens: int) -> None:
        self._policy = policy
        self._least = least_context_tokens

    def plan(self, view: BatchView) -> StepPlan:
        """The policy's plan, for a context that is not below the least."""
        view.logical_kv_tokens = max(view.logical_kv_tokens, self._least)
        return self._policy.plan(view)


def _blended(
    name: OfflinePolicy, pool: RequestPool, costs: ResourceCost, settings: PlanSettings
) -> AdmissionPolicy:
    prepared = prepare(pool, costs)
    mode = BlendMode.PAPER if name is OfflinePolicy.PAPER else BlendMode.FORESIGHT
    policy = prepared.policy(
        capacity_tokens=settings.capacity_tokens,
        mode=mode,
        max_step_tokens=settings.max_step_tokens,
    )
    if mode is BlendMode.FORESIGHT:
        return policy
    hidden = prepared.order.root_density * costs.decode_s_per_kv_token
    return DenseSteps(policy, int(settings.dense_tokens * costs.linear_s_per_token / hidden))
