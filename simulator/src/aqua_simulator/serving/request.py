"""A served request: what arrived, where it stands, and what its user saw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from jaxtyping import Float

from aqua_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as the engine receives it.

    Attributes:
        prefix: Identities of the prompt's leading chunks of `prefix_chunk_tokens`; two requests
            with equal leading identities share these tokens. Empty when nothing is known.
        stored_tokens: Leading prompt tokens whose keys and values are in the engine's page store
            for good, computed by an earlier request; they are copied in at admission.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    prefix_chunk_tokens: int = 0
    stored_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ConfigError(f"request {self.request_id}: lengths must be at least 1")
        if not 0 <= self.stored_tokens < self.prompt_tokens:
            raise ConfigError(f"request {self.request_id}: its last token is always computed")


class Phase(StrEnum):
    """Where a request stands in its engine."""

    WAITING = "waiting"
    RUNNING = "running"
    PAGED_OUT = "paged_out"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Job:
    """A request inside an engine.

    Attributes:
        computed_tokens: Tokens whose keys and values are in memory, as of the last planned step.
        emitted_tokens: Output tokens, planned steps included.
        block_count: Private blocks held.
        shared_chunks: Cached prefix chunks held.
        retired_chunks: Chunks it held when it last left memory.
        paged_tokens: Context in the page store.
        first_token_s, last_token_s: When the user got them; NaN until then.
    """

    arrival: Arrival
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0
    emitted_tokens: int = 0
    block_count: int = 0
    shared_chunks: int = 0
    retired_chunks: int = 0
    paged_tokens: int = 0
    scheduled_s: float = field(default=float("nan"))
    first_token_s: float = field(default=float("nan"))
    last_token_s: float = field(default=float("nan"))
    preemption_count: int = 0

    @property
    def known_tokens(self) -> int:
        """Prompt and output tokens that exist, computed or not."""
        return self.arrival.prompt_tokens + self.emitted_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens that a step has to compute before the next one can be sampled.

        A decoding request always has exactly one: its latest token.
        """
        return self.known_tokens - self.computed_tokens

    @property
    def is_planned_out(self) -> bool:
        """Whether every output token is sampled by a step already planned."""
        return self.emitted_tokens >= self.arrival.output_tokens

    def served(self) -> Served:
        """What its user saw, once it has ended."""
        arrival = self.arrival
        return Served(
            arrival.request_id,
            arrival.arrival_s,
            self.scheduled_s,
            self.first_token_s,
            self.last_token_s,
            arrival.prompt_tokens,
            arrival.output_tokens,
            self.preemption_count,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What a user saw of a request, in seconds of virtual time."""

    request_id: str
    arrival_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int
    preemption_count: int

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; NaN for a single token."""
        if self.output_tokens == 1:
            return float("nan")
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def completion_s(self) -> float:
        """Time from arrival to the last token."""
        return self.last_token_s - self.arrival_s


def summary(served: Iterable[Served]) -> dict[str, Any]:
    """Throughput and latencies of a run.

    Raises:
        ConfigError: Nothing was served.
    """
    rows = list(served)
    found = summary_of(
        np.array([row.arrival_s for row in rows]),
        np.array([row.last_token_s for row in rows]),
        np.array([row.ttft_s for row in rows]),
        np.array([row.tpot_s for row in rows]),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
    )
    return found | {"preemption_count": sum(row.preemption_count for row in rows)}


def summary_of(
    arrival_s: Float[np.ndarray, " requests"],
    last_token_s: Float[np.ndarray, " requests"],
    ttft_s: Float[np.ndarray, " requests"],
    tpot_s: Float[np.ndarray, " requests"],
    *,
    prompt_tokens: int,
    output_tokens: int,
) -> dict[str, Any]:
    """Throughput and latencies of requests; NaN among `tpot_s` are those of a single token.

    Args:
        prompt_tokens, output_tokens: Of all requests together.

    Raises:
        ConfigError: There are none.
    """
    if not len(arrival_s):
        raise ConfigError("no request was served", remedy="Give a trace with requests.")
    makespan_s = float(last_token_s.max() - arrival_s.min())
    completion_s = last_token_s - arrival_s
    tpot_s = tpot_s[~np.isnan(tpot_s)]
    return {
        "request_count": len(arrival_s),
        "makespan_s": makespan_s,
        "tokens_per_s": (prompt_tokens + output_tokens) / makespan_s,
        "output_tokens_per_s": output_tokens / makespan_s,
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p50_s": float(np.quantile(ttft_s, 0.5)),
        "ttft_p99_s": float(np.quantile(ttft_s, 0.99)),
        "ttft_max_s": float(ttft_s.max()),
        "tpot_mean_s": float(tpot_s.mean()) if len(tpot_s) else None,
        "tpot_p99_s": float(np.quantile(tpot_s, 0.99)) if len(tpot_s) else None,
        "completion_mean_s": float(completion_s.mean()),
        "completion_p99_s": float(np.quantile(completion_s, 0.99)),
    }
