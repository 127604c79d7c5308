"""Makes steps that can be executed in order of a set of new places.

No step overfills a GPU: a group moves only onto GPUs that are free at that moment. Where groups
wait for each other in a circle and no GPU is free, one of them is parked (its state goes to host
memory, which Aqua's consumers do with theirs anyway) and resumes in its new place when the circle
has turned. Groups that do not move keep their GPUs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from aqua_placer.problem.instance import Instance, Placement
from aqua_protocol.plan import Move, MoveKind


class _Occupancy:
    """Who holds which GPU while the steps are written."""

    def __init__(self, instance: Instance, today: Sequence[list[int] | None]) -> None:
        self.instance = instance
        self.where: list[int] = instance.current.tolist()
        self.gpus: list[list[int]] = [list(own or ()) for own in today]
        self.free = [set(range(int(count))) for count in instance.servers.capacity]
        self.moves: list[Move] = []
        for group, server in enumerate(self.where):
            if server >= 0:
                self.free[server] -= set(self.gpus[group])

    def has_room(self, group: int, server: int) -> bool:
        """Whether the server has enough free GPUs now."""
        return len(self.free[server]) >= int(self.instance.tp[group])

    def step(self, kind: MoveKind, group: int, onto: int) -> None:
        """Take the group off its GPUs, and put it on free ones of `onto` unless that is -1."""
        source, before = self.where[group], self.gpus[group]
        after: list[int] = []
        if onto >= 0:
            after = sorted(self.free[onto])[: int(self.instance.tp[group])]
            self.free[onto] -= set(after)
        if source >= 0:
            self.free[source] |= set(before)
        name = self.instance.servers.name
        self.moves.append(
            Move(
                step=len(self.moves),
                kind=kind,
                group=self.instance.names[group],
                from_server=name(source) if source >= 0 else None,
                from_gpus=before if source >= 0 else [],
                to_server=name(onto) if onto >= 0 else None,
                to_gpus=after,
            )
        )
        self.where[group], self.gpus[group] = onto, after


def order_moves(
    instance: Instance,
    target: Placement,
    today: Sequence[list[int] | None],
    gone: Mapping[str, tuple[int, list[int]]] | None = None,
) -> tuple[list[Move], list[list[int]]]:
    """Executable steps from `instance.current` to `target`, and the GPUs everyone ends up on.

    Args:
        target: Server of each group, every one of them with room for all its groups.
        today: GPUs of each group's shards; None for groups that run nowhere.
        gone: Groups that are stopped first: name to (server, GPUs).
    """
    cluster = _Occupancy(instance, today)
    for name, (server, own) in (gone or {}).items():
        cluster.moves.append(
            Move(
                step=len(cluster.moves),
                kind=MoveKind.STOP,
                group=name,
                from_server=instance.servers.name(server),
                from_gpus=own,
            )
        )
    goals: list[int] = target.tolist()
    changing = [group for group, goal in enumerate(goals) if cluster.where[group] != goal]
    # Migrations first: groups that start can wait for their GPUs without harm.
    changing.sort(key=lambda group: (cluster.where[group] < 0, -int(instance.tp[group])))
    new = {group for group in changing if cluster.where[group] < 0}
    waiting = deque(changing)
    refused = 0
    while waiting:
        group = waiting.popleft()
        if cluster.has_room(group, goals[group]):
            runs = cluster.where[group] >= 0
            rested = MoveKind.START if group in new else MoveKind.RESUME
            cluster.step(MoveKind.MOVE if runs else rested, group, goals[group])
            refused = 0
            continue
        waiting.append(group)
        refused += 1
        if refused > len(waiting):
            # Everyone waits: somebody who is to leave this server makes room for this group.
            leaving = [other for other in waiting if cluster.where[other] == goals[group]]
            assert leaving, ("no room and no group leaves", instance.names[group])
            victim = min(leaving, key=lambda other: (int(instance.tp[other]), other))
            cluster.step(MoveKind.PARK, victim, -1)
            refused = 0
    return cluster.moves, cluster.gpus
