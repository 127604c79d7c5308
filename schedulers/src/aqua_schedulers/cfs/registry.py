"""Policies by name, with their settings: what command lines and engine configurations say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from aqua_protocol.errors import ConfigError
from aqua_schedulers.cfs.policy import FairPolicy
from aqua_schedulers.cfs.ranking import (
    FairShare,
    FirstComeFirstServed,
    FirstTokenFirst,
    LeastServedFirst,
    Ranking,
)


class PolicyName(StrEnum):
    """Policies on command lines and in engine configurations."""

    FCFS = "fcfs"
    CFS = "cfs"
    LEAST_SERVED = "least-served"
    FIRST_TOKEN = "first-token"  # noqa: S105 - a policy, not a password

    @classmethod
    def named(cls, name: str) -> PolicyName:
        """The policy of that name; `best` is the best we have.

        Raises:
            ConfigError: No policy of that name.
        """
        if name == "best":
            return cls.FIRST_TOKEN
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(cls)
            raise ConfigError(f"no policy named {name!r}", remedy=f"Known: {known}.") from None


@dataclass(frozen=True, slots=True)
class FairSettings:
    """The settings that may be tuned; `benchmarks/fair_policies.py` says what the defaults give.

    Attributes:
        block_tokens: Tokens of a KV block of the engine; vLLM's default.
        slice_iterations: Engine steps of a time slice; the paper leaves the number open. Doubled, a
            prompt that finds memory full waits up to twice as long, and less is paged.
        stint_tokens: For `first-token`: output of each request that goes before all further output,
            by judgement. Doubled, answers pause later and prompts may wait longer.
        patience_turns: Slices of waiting after which a request goes before all others: a bound
            against starvation, not a target. Doubled, the longest wait may double.
        fcfs_on_host: First come, first served while paged state would go to host memory.
    """

    block_tokens: int = 16
    slice_iterations: int = 5
    stint_tokens: int = 4
    patience_turns: int = 1000
    fcfs_on_host: bool = False

    def __post_init__(self) -> None:
        for name in ("block_tokens", "slice_iterations", "stint_tokens", "patience_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")


def policy_named(name: PolicyName | str, settings: FairSettings | None = None) -> FairPolicy:
    """Make a policy.

    Raises:
        ConfigError: No policy of that name.
    """
    settings = settings or FairSettings()
    rankings: dict[PolicyName, Ranking] = {
        PolicyName.FCFS: FirstComeFirstServed(),
        PolicyName.CFS: FairShare(settings.slice_iterations),
        PolicyName.LEAST_SERVED: LeastServedFirst(settings.slice_iterations),
        PolicyName.FIRST_TOKEN: FirstTokenFirst(settings.slice_iterations, settings.stint_tokens),
    }
    return FairPolicy(
        rankings[PolicyName.named(name)],
        block_tokens=settings.block_tokens,
        patience_turns=settings.patience_turns,
        fcfs_on_host=settings.fcfs_on_host,
    )
