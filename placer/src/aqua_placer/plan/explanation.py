"""Plans in words: why this producer, why none, and what would change that.

What would help is told in producers and GB that are missing on the consumer's own server.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from aqua_placer.errors import PlanInvalidError
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_protocol.plan import Assignment, Match, Plan


@dataclass(frozen=True)
class Explanation:
    """What is said about one group."""

    group: str
    server: str
    role: str
    lines: tuple[str, ...]


class Explainer:
    """Answers questions about one plan of one problem."""

    def __init__(self, instance: Instance, plan: Plan) -> None:
        self.instance = instance
        self.plan = plan
        self.index = {name: group for group, name in enumerate(instance.names)}
        self.places = {entry.group: entry for entry in plan.assignments}
        self.of_consumer: dict[str, list[Match]] = defaultdict(list)
        self.of_producer: dict[str, list[Match]] = defaultdict(list)
        self.on_server: dict[str, list[str]] = defaultdict(list)
        for match in plan.matches:
            self.of_consumer[match.consumer].append(match)
            self.of_producer[match.producer].append(match)
        for entry in plan.assignments:
            self.on_server[entry.server].append(entry.group)

    def size_gb(self, group: str) -> float:
        """Spare (> 0) or need (< 0) per shard where the group is."""
        kind = int(self.instance.servers.class_of[self.places[group].server_index])
        return float(self.instance.r_gb[self.index[group], kind])

    def shards(self, group: str) -> int:
        """Shards of the group."""
        return int(self.instance.tp[self.index[group]])

    def explain(self, group: str) -> Explanation:
        """Why this group is where it is and has what it has.

        Raises:
            PlanInvalidError: The plan has no such group.
        """
        place = self.places.get(group)
        if place is None or group not in self.index:
            near = [name for name in self.places if group.lower() in name.lower()][:3]
            raise PlanInvalidError(
                f"the plan has no group {group!r}",
                remedy=f"Did you mean {', '.join(near)}?" if near else "Names are in the problem.",
            )
        size = self.size_gb(group)
        if size < -GRAIN_GB / 2:
            lines, role = self._consumer(group, place, -size), "consumer"
        elif size > GRAIN_GB / 2:
            lines, role = self._producer(group, place, size), "producer"
        else:
            lines, role = ["It neither lends nor needs memory."], "neutral"
        return Explanation(group, place.server, role, tuple(lines))

    def summary(self) -> list[str]:
        """The plan in a few sentences."""
        plan = self.plan
        share = plan.coverage_gb / plan.demand_gb if plan.demand_gb else 1.0
        lines = [
            f"{len(plan.assignments)} groups on {len(self.on_server)} servers.",
            f"{plan.coverage_gb:g} of {plan.demand_gb:g} GB demand covered ({share:.1%}).",
            f"At most {plan.coverage_bound_gb:g} GB could be covered.",
            f"Largest imbalance: {plan.max_abs_mem_gb:g} GB, {plan.max_abs_cnt} shards a server.",
        ]
        if plan.unmatched:
            worst = max(plan.unmatched, key=lambda entry: entry.need_gb)
            lines.append(
                f"{len(plan.unmatched)} consumer groups have no producer; the largest is "
                f"{worst.group} with {worst.need_gb:g} GB per shard on {worst.server}."
            )
            spare = sum(max(self.size_gb(group), 0.0) * self.shards(group) for group in self.places)
            if spare < plan.demand_gb:
                lines.append(
                    f"All producers together spare {spare:g} GB, {plan.demand_gb - spare:g} GB "
                    "less than is needed: no placement can serve everyone."
                )
        else:
            lines.append("Every consumer has its producers.")
        return lines

    def _consumer(self, group: str, place: Assignment, need: float) -> list[str]:
        shards = self.shards(group)
        lines = [self._opening("needs", need, place)]
        matches = sorted(self.of_consumer.get(group, []), key=lambda match: match.consumer_shard)
        if not matches:
            reasons = (entry.reason for entry in self.plan.unmatched if entry.group == group)
            lines.append(f"It has no producer: {next(reasons, 'unknown')}.")
            lines.append(self._remedy(place, need, shards))
            return lines
        weakest = min(self.size_gb(match.producer) for match in matches)
        covered = min(need, weakest)
        lines += [
            f"Shard {match.consumer_shard} is served by {match.producer} "
            f"(shard {match.producer_shard}, {self.size_gb(match.producer):g} GB spare): "
            f"{match.reason}."
            for match in matches
        ]
        if covered < need - GRAIN_GB:
            lines.append(
                f"{need - covered:g} GB per shard stay uncovered"
                + (": the group runs in lockstep with its weakest producer." if shards > 1 else ".")
            )
        else:
            lines.append("Its need is covered in full.")
        return lines

    def _opening(self, verb: str, gb: float, place: Assignment) -> str:
        shards, gpus = self.shards(place.group), ", ".join(map(str, place.gpus))
        each = f"{gb:g} GB" + (f" on each of {shards} shards" if shards > 1 else "")
        return f"It {verb} {each} and runs on {place.server}, GPU {gpus}."

    def _remedy(self, place: Assignment, need: float, shards: int) -> str:
        """What would serve it: producers of what size where."""
        idle = sum(
            self.shards(group) - len(self.of_producer.get(group, []))
            for group in self.on_server[place.server]
            if self.size_gb(group) > 0
        )
        missing = max(shards - idle, 1)
        own = "one more producer" if missing == 1 else f"{missing} more producer shards"
        free = int(self.instance.servers.capacity[place.server_index]) - sum(
            self.shards(other) for other in self.on_server[place.server]
        )
        room = (
            "which has free GPUs for it"
            if free >= missing
            else f"in exchange for {missing - free} shards there that are not needed"
        )
        return (
            f"What would fix it: {own} with at least {need:g} GB spare on {place.server}, {room}."
        )

    def _producer(self, group: str, place: Assignment, spare: float) -> list[str]:
        lines = [self._opening("spares", spare, place)]
        matches = sorted(self.of_producer.get(group, []), key=lambda match: match.producer_shard)
        lines += [
            f"Shard {match.producer_shard} lends {match.covered_gb:g} GB to {match.consumer}: "
            f"{match.reason}."
            for match in matches
        ]
        shards = self.shards(group)
        idle = shards - len(matches)
        if idle:
            waiting = [entry.group for entry in self.plan.unmatched if entry.server == place.server]
            lines.append(
                f"{idle} of {shards} shards lend nothing: "
                + (
                    f"{waiting[0]} here needs more producers at once than are idle."
                    if waiting
                    else "every consumer on this server has its producers."
                )
            )
        return lines
