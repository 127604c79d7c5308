"""A plan, as files and responses say it: what runs where, which producer serves which consumer.

A plan stands alone: with the problem it was made for (named by its hash) anyone can verify it
without the solver, and its own hash says whether it was changed since.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from aqua_protocol.wire import Wire

# Fixed: the form of the file; it grows when a reader of the old form would misread a new one.
PLAN_VERSION: Final = 1


class Objective(StrEnum):
    """What a placement is optimised for."""

    COVERAGE = "coverage"
    ABS = "abs"
    SIGNED = "signed"


class MatchingMode(StrEnum):
    """How producers are given to consumers within a server."""

    STABLE = "stable"
    BEST_FIT = "best-fit"
    EXACT = "exact"
    LINKS = "links"


class Assignment(Wire):
    """A group on a server; GPU indices in the order of its shards."""

    group: str
    server: str
    server_index: Annotated[int, Field(ge=0)]
    gpus: list[int]


class Match(Wire):
    """One producer shard for one consumer shard."""

    consumer: str
    consumer_shard: Annotated[int, Field(ge=0)]
    producer: str
    producer_shard: Annotated[int, Field(ge=0)]
    server: str
    covered_gb: float = Field(description="GB of this shard's need that are covered, unweighted.")
    reason: str


class Unmatched(Wire):
    """A consumer group that no producers serve."""

    group: str
    server: str
    need_gb: float = Field(description="Per shard.")
    reason: str


class MoveKind(StrEnum):
    """How a group gets from one server to another."""

    MOVE = "move"
    PARK = "park"
    RESUME = "resume"
    START = "start"
    STOP = "stop"


class Move(Wire):
    """One step: executed in order, none overfills a GPU.

    `park` takes a group off its GPUs (to host memory) where no GPU is free to break a cycle;
    `resume` brings it to its new place. `start` and `stop` are for groups that are new or gone.
    """

    step: Annotated[int, Field(ge=0)]
    kind: MoveKind
    group: str
    from_server: str | None = None
    from_gpus: list[int] = Field(default_factory=list)
    to_server: str | None = None
    to_gpus: list[int] = Field(default_factory=list)


class Plan(Wire):
    """A placement with its matches and its proof."""

    version: Literal[1] = PLAN_VERSION
    problem: str = ""
    problem_hash: str
    objective: Objective
    value: float = Field(description="Covered GB, or H x max cnt + max mem in GB.")
    bound: float = Field(description="No placement is better than this.")
    gap: float = Field(description="Relative distance of value and bound.")
    proven: bool = Field(description="Value and bound meet.")
    coverage_gb: float
    coverage_bound_gb: float
    demand_gb: float
    max_abs_mem_gb: float
    max_abs_cnt: int
    balance: float = Field(description="H x max |cnt| + max |mem|.")
    balance_bound: float = Field(description="No placement balances better, covered or not.")
    hbm_gb: float
    matching: MatchingMode
    solver: str
    seed: int
    solve_seconds: float
    cpu_seconds: float
    assignments: list[Assignment]
    matches: list[Match]
    unmatched: list[Unmatched]
    migrations: int = Field(default=0, description="Shards that leave their server.")
    migrations_bound: int = Field(
        default=0, description="Always 0: that fewer would not do is not proven."
    )
    moves: list[Move] = Field(default_factory=list)
    plan_hash: str = ""

    def compute_hash(self) -> str:
        """SHA-256 over what the plan says to do; independent of times and of its own hash."""
        content = {
            "problem": self.problem_hash,
            "assignments": sorted((a.group, a.server_index, a.gpus) for a in self.assignments),
            "matches": sorted(
                (m.consumer, m.consumer_shard, m.producer, m.producer_shard) for m in self.matches
            ),
            "moves": [(m.kind, m.group, m.to_server, m.to_gpus) for m in self.moves],
        }
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
