"""Where a plan's groups are after each of its steps, and under which names they report.

A plan says where groups end up and by which moves; what holds in between follows from both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from aqua_placer.errors import PlanInvalidError
from aqua_placer.plan.files import member_name
from aqua_protocol.plan import Move, Plan


@dataclass(frozen=True)
class Position:
    """GPUs of one server, in the order of a group's shards."""

    server: str
    gpus: tuple[int, ...]


def positions_after(plan: Plan, step_count: int | None = None) -> dict[str, Position]:
    """Groups that run after the first `step_count` moves (all if None), and where.

    Raises:
        PlanInvalidError: The plan has fewer moves.
    """
    if step_count is not None and not 0 <= step_count <= len(plan.moves):
        raise PlanInvalidError(
            f"the plan has {len(plan.moves)} steps, there is none after {step_count}",
            remedy=f"Choose from 0 (before the first) to {len(plan.moves)}.",
        )
    positions = {
        entry.group: Position(entry.server, tuple(entry.gpus)) for entry in plan.assignments
    }
    for move in reversed(plan.moves):  # Back to the first step, then forth.
        positions.pop(move.group, None)
        if move.from_server is not None:
            positions[move.group] = Position(move.from_server, tuple(move.from_gpus))
    for move in islice(plan.moves, step_count):
        positions.pop(move.group, None)
        if (target := target_of(move)) is not None:
            positions[move.group] = target
    return positions


def target_of(move: Move) -> Position | None:
    """Where a step puts its group; None if it takes it away."""
    return None if move.to_server is None else Position(move.to_server, tuple(move.to_gpus))


def members_of(group: str, shard_count: int) -> list[str]:
    """Names under which a group's shards report, in their order."""
    return [member_name(group, shard, shard_count) for shard in range(shard_count)]
