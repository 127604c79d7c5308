"""What a request's `priority` is worth: its weight, within its tenant where tenants share.

Two signs are in use for the same field. For vLLM the lower number is the more urgent one. For llm-d
(`InferenceObjective`) and the Gateway API's inference extension, and for SGLang, it is the higher.
llm-d's router writes its number into requests, and negates it for backends whose pods carry the
label `llm-d.ai/engine-type: vllm`; without the label it comes as it is. Which one an engine gets is
a fact about its deployment, so it is said by an option and never guessed.

Their sizes differ, too: vLLM's users count 0, 1, 2, llm-d's examples say 100 and -10. A weight
doubles with each `priority_unit`, and stops at four of them either way.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

WEIGHT_STEPS: Final = 4
"""Priorities beyond this many units either way count no further: a share of one sixteenth. Doubled,
a request could get 1/256 of another's share and seem to hang."""


class UrgentPriority(StrEnum):
    """Which numbers are the more urgent ones."""

    LOWER = "lower"
    """As vLLM has it."""
    HIGHER = "higher"
    """As llm-d has it."""


def weight_of(priority: int, urgent: UrgentPriority, unit: int) -> float:
    """The share under contention of a request with this priority; 1.0 for 0."""
    if not priority:
        return 1.0
    units = max(-WEIGHT_STEPS, min(WEIGHT_STEPS, priority / unit))
    return float(2.0 ** (units if urgent is UrgentPriority.HIGHER else -units))
