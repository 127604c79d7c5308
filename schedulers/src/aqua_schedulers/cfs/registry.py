"""Policies by name, with their settings: what command lines and engine configurations say."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from aqua_schedulers.cfs.policy import FairPolicy
from aqua_schedulers.cfs.ranking import (
    FairShare,
    FirstComeFirstServed,
    FirstTokenFirst,
    LeastServedFirst,
    Ranking,
)
from aqua_schedulers.cfs.tenants import TenantSettings
from aqua_schedulers.policy_names import PolicyKind

DEFAULT_BLOCK_TOKENS: Final = 16
"""Tokens of a KV block, vLLM's default. Doubled, requests are reckoned in coarser pieces."""


class PolicyName(PolicyKind):
    """Policies on command lines and in engine configurations."""

    FCFS = "fcfs"
    CFS = "cfs"
    LEAST_SERVED = "least-served"
    FIRST_TOKEN = "first-token"  # noqa: S105 - a policy, not a password

    @classmethod
    def best(cls) -> PolicyName:
        """Ours; `benchmarks/fair_policies.py` says by how much."""
        return cls.FIRST_TOKEN


class FairSettings(BaseModel):
    """The settings that may be tuned; `benchmarks/fair_policies.py` says what the defaults give.

    Attributes:
        slice_iterations: Engine steps of a time slice; the paper leaves the number open. Doubled, a
            prompt that finds memory full waits up to twice as long, and less is paged.
        granularity_tokens: For `cfs`: a decode keeps its memory until it is so many tokens ahead of
            one that waits. Doubled, half as much is paged, and decodes take longer turns; at 0, the
            paper's, the batch is chosen anew at every slice.
        stint_tokens: For `first-token`: output of each request that goes before all further output,
            by judgement. Doubled, answers pause later and prompts may wait longer.
        patience_turns: Slices of waiting after which a request goes before all others: a bound
            against starvation, not a target. Doubled, the longest wait may double.
        fcfs_on_host: First come, first served while paged state would go to host memory.
        tenants: How tenants share the engine, whatever the policy within each; None does not ask
            whose a request is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    slice_iterations: int = Field(default=5, ge=1, le=10_000)
    granularity_tokens: int = Field(default=0, ge=0, le=1 << 20)
    stint_tokens: int = Field(default=4, ge=1, le=1 << 20)
    patience_turns: int = Field(default=1000, ge=1, le=1 << 20)
    fcfs_on_host: bool = False
    tenants: TenantSettings | None = None


def policy_named(
    name: PolicyName | str,
    settings: FairSettings | None = None,
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> FairPolicy:
    """Make a policy for an engine with KV blocks of `block_tokens`.

    Raises:
        ConfigError: No policy of that name.
    """
    settings = settings or FairSettings()
    rankings: dict[PolicyName, Ranking] = {
        PolicyName.FCFS: FirstComeFirstServed(),
        PolicyName.CFS: FairShare(settings.slice_iterations, settings.granularity_tokens),
        PolicyName.LEAST_SERVED: LeastServedFirst(settings.slice_iterations),
        PolicyName.FIRST_TOKEN: FirstTokenFirst(settings.slice_iterations, settings.stint_tokens),
    }
    return FairPolicy(
        rankings[PolicyName.named(name)],
        block_tokens=block_tokens,
        patience_turns=settings.patience_turns,
        fcfs_on_host=settings.fcfs_on_host,
        tenants=settings.tenants,
    )
