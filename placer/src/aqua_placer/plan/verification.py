"""Verify a plan against its problem without any solver: plain arithmetic, server by server.

Shares no code with the solvers on purpose; sums, matches and objective values are recomputed from
the problem and the assignments. A plan passes only when every group is placed once on its own
GPUs of one server, pins and sets kept apart hold, every match joins a consumer and a producer of
one server and no producer shard serves twice, groups are served whole or not at all, no pair
blocks (for stable plans), the numbers it states are true, and its bound does not contradict them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final, TypeAlias

from pydantic import BaseModel, Field, computed_field

from aqua_placer.errors import PlanInvalidError
from aqua_placer.problem.instance import Instance
from aqua_protocol.plan import Assignment, Match, MatchingMode, Objective, Plan

TOLERANCE_GB: Final = 1e-4
"""Sums over 65,536 GPUs of sizes in 10^-6 GB agree far better, so it may be doubled."""


_Shard: TypeAlias = tuple[int, int]
"""A group and the number of one of its shards."""


class PlanVerdict(BaseModel):
    """What was found; a plan passes when `problems` is empty."""

    problems: list[str] = Field(default_factory=list)
    facts: dict[str, float] = Field(default_factory=dict)
    blocking_pairs: int = 0

    @computed_field  # type: ignore[prop-decorator] # as pydantic asks for
    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def check_plan(instance: Instance, plan: Plan) -> PlanVerdict:
    """All that is wrong with `plan`, in words.

    Raises:
        PlanInvalidError: It was made for another problem; nothing can be compared.
    """
    if instance.digest and plan.problem_hash != instance.digest:
        raise PlanInvalidError(
            f"the plan is for problem {plan.problem or plan.problem_hash[:12]!r} "
            f"({plan.problem_hash[:12]}), not for {instance.name!r} ({instance.digest[:12]})",
            remedy="Check it against the file it was solved from, or solve again.",
        )
    check = _Check(instance, plan)
    if plan.plan_hash and plan.plan_hash != plan.compute_hash():
        check.problem("the plan was changed after it was made: its hash differs")
    if check.placed_soundly():
        check.constraints()
        check.numbers(check.matched())
    return check.verdict


class _Check:
    """One plan beside its problem; every method notes in `verdict` what it finds wrong.

    Attributes:
        placed: The place of each group, once `placed_soundly` has found one.
        size_gb: Spare (> 0) or need (< 0) per shard of each group where it is placed.
        served: Spare GB behind each shard of each matched consumer group.
        serving: The consumer group of each producer shard that lends.
    """

    def __init__(self, instance: Instance, plan: Plan) -> None:
        self.instance, self.plan, self.verdict = instance, plan, PlanVerdict()
        self.index = {name: group for group, name in enumerate(instance.names)}
        self.shards: list[int] = instance.tp.tolist()
        self.placed: dict[int, Assignment] = {}
        self.size_gb: dict[int, float] = {}
        self.served: dict[int, dict[int, float]] = defaultdict(dict)
        self.serving: dict[_Shard, int] = {}

    def problem(self, what: str) -> None:
        """Note what is wrong."""
        self.verdict.problems.append(what)

    def placed_soundly(self) -> bool:
        """Whether every group is on one server of the problem, so that the rest can be checked."""
        servers, names = self.instance.servers, self.instance.names
        capacity = servers.capacity.tolist()
        numbers = {servers.name(server): server for server in range(len(capacity))}
        busy: dict[tuple[int, int], str] = {}
        sound = True
        for entry in self.plan.assignments:
            group = self.index.get(entry.group)
            if group is None or group in self.placed:
                what = "is not in the problem" if group is None else "is placed twice"
                self.problem(f"group {entry.group!r} {what}")
                sound = sound and group is not None
                continue
            self.placed[group] = entry
            if numbers.get(entry.server) != entry.server_index:
                self.problem(
                    f"group {entry.group!r} is on server {entry.server!r} ({entry.server_index}), "
                    "which is not in the problem"
                )
                sound = False
                continue
            kind = int(servers.class_of[entry.server_index])
            self.size_gb[group] = float(self.instance.r_gb[group, kind])
            shards, distinct = self.shards[group], len(set(entry.gpus))
            if len(entry.gpus) != shards or distinct != shards:
                self.problem(
                    f"group {entry.group!r} has {shards} shards and {distinct} distinct GPUs"
                )
            for gpu in entry.gpus:
                if not 0 <= gpu < capacity[entry.server_index]:
                    self.problem(f"{entry.server} has no GPU {gpu} ({entry.group!r})")
                rival = busy.setdefault((entry.server_index, gpu), entry.group)
                if rival != entry.group:
                    self.problem(
                        f"GPU {gpu} of {entry.server} holds both {rival!r} and {entry.group!r}"
                    )
        missing = [name for group, name in enumerate(names) if group not in self.placed]
        if missing:
            self.problem(f"group {missing[0]!r} is not placed ({len(missing)} in all)")
        return sound and not missing

    def constraints(self) -> None:
        """Pins and sets kept apart."""
        names = self.instance.names
        for group, mask in self.instance.allowed.items():
            place = self.placed[group]
            if not mask[place.server_index]:
                self.problem(f"group {names[group]!r} is pinned elsewhere than {place.server}")
        for members in self.instance.apart:
            where: dict[str, list[str]] = defaultdict(list)
            for group in members:
                where[self.placed[group].server].append(names[group])
            for server, together in where.items():
                if len(together) > 1:
                    self.problem(f"{', '.join(together)} must be apart, all on {server}")

    def matched(self) -> float:
        """Coverage recomputed from the matches, in weighted GB."""
        for match in self.plan.matches:
            wrong = self._wrong_with(match)
            label = f"match {match.consumer}:{match.consumer_shard} <- {match.producer}"
            if wrong:
                self.problem(f"{label}: {wrong}")
                continue
            consumer, producer = self.index[match.consumer], self.index[match.producer]
            if (producer, match.producer_shard) in self.serving:
                self.problem(f"{label}: the producer shard serves two consumers")
            self.serving[producer, match.producer_shard] = consumer
            self.served[consumer][match.consumer_shard] = self.size_gb[producer]
        total, names = 0.0, self.instance.names
        for consumer, shards in self.served.items():
            count = self.shards[consumer]
            if sorted(shards) != list(range(count)):
                self.problem(
                    f"group {names[consumer]!r} is served on {len(shards)} of {count} shards"
                )
                continue
            covered = min(-self.size_gb[consumer], *shards.values())
            total += float(self.instance.weight[consumer]) * count * covered
        told = {entry.group for entry in self.plan.unmatched}
        for group, name in enumerate(names):
            if self.size_gb[group] < 0 and (group in self.served) == (name in told):
                self.problem(f"group {name!r} must be matched or listed as unmatched")
        if self.plan.matching in (MatchingMode.STABLE, MatchingMode.EXACT):
            pairs = list(self._blocking_pairs())
            self.verdict.blocking_pairs = len(pairs)
            for one, other in pairs if self.plan.matching is MatchingMode.STABLE else ():
                self.problem(
                    f"{names[one]!r} and {names[other]!r} would both rather have each other: "
                    "the matching is not stable"
                )
        return total

    def _wrong_with(self, match: Match) -> str | None:
        """Why a match cannot be, the first reason that makes sense; None when it can."""
        consumer, producer = self.index.get(match.consumer), self.index.get(match.producer)
        if consumer is None or producer is None:
            return "unknown group"
        here, there = self.placed[consumer].server, self.placed[producer].server
        if here != there or here != match.server:
            return f"on {here} and {there}"
        if self.size_gb[consumer] >= 0 or self.size_gb[producer] <= 0:
            return "not a consumer and a producer"
        taken = match.consumer_shard in self.served.get(consumer, {})
        if match.producer_shard >= self.shards[producer] or taken:
            return "no such shard, or it has a producer already"
        return None

    def _blocking_pairs(self) -> Iterator[tuple[int, int]]:
        """Consumers and producers of one server that would both rather have each other."""
        by_server: dict[int, list[int]] = defaultdict(list)
        for group, entry in self.placed.items():
            by_server[entry.server_index].append(group)
        size_gb, weight = self.size_gb, self.instance.weight
        for groups in by_server.values():
            lending = [group for group in groups if size_gb[group] > 0]
            lenders = [(group, shard) for group in lending for shard in range(self.shards[group])]
            idle = [lender for lender in lenders if lender not in self.serving]
            for consumer in groups:
                need, shards = -size_gb[consumer], self.shards[consumer]
                if need > 0 and shards > 1:
                    if consumer not in self.served and len(idle) >= shards:
                        yield consumer, idle[0][0]
                    continue
                has_gb = self.served.get(consumer, {}).get(0, 0.0)
                for lender in lenders if need > 0 else ():
                    rival = self.serving.get(lender)
                    accepts = rival is None or (
                        self.shards[rival] == 1
                        and weight[rival] <= weight[consumer]
                        and -size_gb[rival] < need - TOLERANCE_GB
                    )
                    if size_gb[lender[0]] > has_gb + TOLERANCE_GB and accepts:
                        yield consumer, lender[0]

    def numbers(self, covered: float) -> None:
        """The numbers that the plan states, against what they are."""
        plan, count = self.plan, self.instance.servers.count
        mem, cnt = [0.0] * count, [0] * count
        for group, entry in self.placed.items():
            size, shards = self.size_gb[group], self.shards[group]
            mem[entry.server_index] += shards * size
            cnt[entry.server_index] += shards * ((size > 0) - (size < 0))
        high = float(self.instance.servers.hbm_gb.max())
        most_mem, most_cnt = max(map(abs, mem)), max(map(abs, cnt))
        balance = high * most_cnt + most_mem
        value = {
            Objective.COVERAGE: covered,
            Objective.ABS: balance,
            Objective.SIGNED: high * max(cnt) + max(mem),
        }[plan.objective]
        self.verdict.facts = {
            "coverage_gb": covered,
            "max_abs_mem_gb": most_mem,
            "max_abs_cnt": float(most_cnt),
            "balance": balance,
            "value": value,
        }
        for name, fact in self.verdict.facts.items():
            told = float(getattr(plan, name))
            if abs(told - fact) > TOLERANCE_GB * max(1.0, abs(fact) * 1e-3):
                self.problem(f"{name} is {fact:g}, the plan says {told:g}")
        better = plan.bound - value if plan.objective is Objective.COVERAGE else value - plan.bound
        if better < -TOLERANCE_GB * max(1.0, abs(value) * 1e-3):
            self.problem(f"the bound {plan.bound:g} is contradicted by {value:g}")
