"""Verify a plan against its problem without any solver: plain arithmetic, server by server.

Shares no code with the solvers on purpose; sums, matches and objective values are recomputed from
the problem and the assignments. A plan passes only when every group is placed once on its own
GPUs of one server, pins and sets kept apart hold, every match joins a consumer and a producer of
one server and no producer shard serves twice, groups are served whole or not at all, no pair
blocks (for stable plans), the numbers it states are true, and its bound does not contradict them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, Field, computed_field

from aqua_placer.errors import PlanInvalidError
from aqua_placer.problem.instance import Instance
from aqua_protocol.plan import Assignment, MatchingMode, Objective, Plan

TOLERANCE_GB: Final = 1e-4
"""Sums over 65,536 GPUs of sizes in 10^-6 GB agree far better than this, so
it may be doubled."""


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


@dataclass(frozen=True)
class _Shard:
    group: int
    index: int
    gb: float


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
    verdicts = PlanVerdict()
    if plan.plan_hash and plan.plan_hash != plan.compute_hash():
        verdicts.problems.append("the plan was changed after it was made: its hash differs")
    placed = _placed(instance, plan, verdicts)
    if placed is None:
        return verdicts
    _constraints(instance, placed, verdicts)
    covered = _matches(instance, plan, placed, verdicts)
    _numbers(instance, plan, placed, covered, verdicts)
    return verdicts


def _placed(instance: Instance, plan: Plan, verdicts: PlanVerdict) -> dict[int, Assignment] | None:
    index = {name: group for group, name in enumerate(instance.names)}
    capacity = instance.servers.capacity.tolist()
    names = {instance.servers.name(server): server for server in range(len(capacity))}
    placed: dict[int, Assignment] = {}
    busy: dict[tuple[int, int], str] = {}
    sound = True
    for entry in plan.assignments:
        group = index.get(entry.group)
        if group is None or group in placed:
            what = "is not in the problem" if group is None else "is placed twice"
            verdicts.problems.append(f"group {entry.group!r} {what}")
            sound = sound and group is not None
            continue
        placed[group] = entry
        if names.get(entry.server) != entry.server_index:
            verdicts.problems.append(
                f"group {entry.group!r} is on server {entry.server!r} ({entry.server_index}), "
                "which is not in the problem"
            )
            sound = False
            continue
        if len(entry.gpus) != int(instance.tp[group]) or len(set(entry.gpus)) != len(entry.gpus):
            verdicts.problems.append(
                f"group {entry.group!r} has {int(instance.tp[group])} shards and "
                f"{len(set(entry.gpus))} distinct GPUs"
            )
        for gpu in entry.gpus:
            if not 0 <= gpu < capacity[entry.server_index]:
                verdicts.problems.append(f"{entry.server} has no GPU {gpu} ({entry.group!r})")
            rival = busy.setdefault((entry.server_index, gpu), entry.group)
            if rival != entry.group:
                verdicts.problems.append(
                    f"GPU {gpu} of {entry.server} holds both {rival!r} and {entry.group!r}"
                )
    missing = [name for group, name in enumerate(instance.names) if group not in placed]
    if missing:
        verdicts.problems.append(f"group {missing[0]!r} is not placed ({len(missing)} in all)")
    return placed if sound and not missing else None


def _constraints(instance: Instance, placed: dict[int, Assignment], verdicts: PlanVerdict) -> None:
    for group, mask in instance.allowed.items():
        if not mask[placed[group].server_index]:
            verdicts.problems.append(
                f"group {instance.names[group]!r} is pinned elsewhere than {placed[group].server}"
            )
    for members in instance.apart:
        where = Counter(placed[group].server for group in members)
        for server, count in where.items():
            if count > 1:
                together = [instance.names[g] for g in members if placed[g].server == server]
                verdicts.problems.append(f"{', '.join(together)} must be apart, all on {server}")


def _matches(  # noqa: C901 - one refusal after the other, in the order they make sense
    instance: Instance, plan: Plan, placed: dict[int, Assignment], verdicts: PlanVerdict
) -> float:
    """Coverage recomputed from the matches, in weighted GB."""
    index = {name: group for group, name in enumerate(instance.names)}
    lent: Counter[tuple[int, int]] = Counter()
    served: dict[int, dict[int, _Shard]] = defaultdict(dict)
    for match in plan.matches:
        consumer, producer = index.get(match.consumer, -1), index.get(match.producer, -1)
        label = f"match {match.consumer}:{match.consumer_shard} <- {match.producer}"
        if consumer < 0 or producer < 0:
            verdicts.problems.append(f"{label}: unknown group")
            continue
        here, there = placed[consumer], placed[producer]
        if here.server != there.server or here.server != match.server:
            verdicts.problems.append(f"{label}: on {here.server} and {there.server}")
            continue
        need, spare = -_size(instance, consumer, here), _size(instance, producer, there)
        if need <= 0 or spare <= 0:
            verdicts.problems.append(f"{label}: not a consumer and a producer")
            continue
        if (
            match.producer_shard >= instance.tp[producer]
            or match.consumer_shard in served[consumer]
        ):
            verdicts.problems.append(f"{label}: no such shard, or it has a producer already")
            continue
        lent[producer, match.producer_shard] += 1
        if lent[producer, match.producer_shard] > 1:
            verdicts.problems.append(f"{label}: the producer shard serves two consumers")
        served[consumer][match.consumer_shard] = _Shard(producer, match.producer_shard, spare)
    total = 0.0
    weakest: dict[int, float] = {}
    for consumer, shards in served.items():
        count = int(instance.tp[consumer])
        if sorted(shards) != list(range(count)):
            verdicts.problems.append(
                f"group {instance.names[consumer]!r} is served on {len(shards)} of {count} shards"
            )
            continue
        need = -_size(instance, consumer, placed[consumer])
        weakest[consumer] = min(shard.gb for shard in shards.values())
        total += float(instance.weight[consumer]) * count * min(need, weakest[consumer])
    told = {entry.group for entry in plan.unmatched}
    for group, name in enumerate(instance.names):
        if _size(instance, group, placed[group]) < 0 and (group in served) == (name in told):
            verdicts.problems.append(f"group {name!r} must be matched or listed as unmatched")
    if plan.matching in (MatchingMode.STABLE, MatchingMode.EXACT):
        _blocking(instance, plan, placed, served, weakest, lent, verdicts)
    return total


def _blocking(
    instance: Instance,
    plan: Plan,
    placed: dict[int, Assignment],
    served: dict[int, dict[int, _Shard]],
    weakest: dict[int, float],
    lent: Counter[tuple[int, int]],
    verdicts: PlanVerdict,
) -> None:
    """Count pairs of one server that would both rather have each other."""
    serving = {
        (shard.group, shard.index): consumer
        for consumer, shards in served.items()
        for shard in shards.values()
    }
    by_server: dict[int, list[int]] = defaultdict(list)
    for group, entry in placed.items():
        by_server[entry.server_index].append(group)
    for groups in by_server.values():
        lenders = [
            (group, shard, _size(instance, group, placed[group]))
            for group in groups
            for shard in range(int(instance.tp[group]))
            if _size(instance, group, placed[group]) > 0
        ]
        idle = [entry for entry in lenders if not lent[entry[0], entry[1]]]
        for consumer in groups:
            need = -_size(instance, consumer, placed[consumer])
            if need <= 0:
                continue
            shards = int(instance.tp[consumer])
            if shards > 1:
                if consumer not in served and len(idle) >= shards:
                    _note_blocking(instance, plan, consumer, idle[0][0], verdicts)
                continue
            for producer, shard, spare in lenders:
                rival = serving.get((producer, shard))
                gains = spare > weakest.get(consumer, 0.0) + TOLERANCE_GB
                accepts = rival is None or (
                    instance.tp[rival] == 1
                    and instance.weight[rival] <= instance.weight[consumer]
                    and -_size(instance, rival, placed[rival]) < need - TOLERANCE_GB
                )
                if gains and accepts:
                    _note_blocking(instance, plan, consumer, producer, verdicts)


def _note_blocking(
    instance: Instance, plan: Plan, consumer: int, producer: int, verdicts: PlanVerdict
) -> None:
    verdicts.blocking_pairs += 1
    if plan.matching is MatchingMode.STABLE:
        verdicts.problems.append(
            f"{instance.names[consumer]!r} and {instance.names[producer]!r} would both rather "
            "have each other: the matching is not stable"
        )


def _size(instance: Instance, group: int, entry: Assignment) -> float:
    kind = int(instance.servers.class_of[entry.server_index])
    return float(instance.r_gb[group, kind])


def _numbers(
    instance: Instance,
    plan: Plan,
    placed: dict[int, Assignment],
    covered: float,
    verdicts: PlanVerdict,
) -> None:
    mem = [0.0] * instance.servers.count
    cnt = [0] * instance.servers.count
    for group, entry in placed.items():
        size = _size(instance, group, entry)
        mem[entry.server_index] += int(instance.tp[group]) * size
        cnt[entry.server_index] += int(instance.tp[group]) * ((size > 0) - (size < 0))
    high = float(instance.servers.hbm_gb.max())
    facts = {
        "coverage_gb": covered,
        "max_abs_mem_gb": max(map(abs, mem)),
        "max_abs_cnt": float(max(map(abs, cnt))),
    }
    facts["balance"] = high * facts["max_abs_cnt"] + facts["max_abs_mem_gb"]
    value = {
        Objective.COVERAGE: covered,
        Objective.ABS: facts["balance"],
        Objective.SIGNED: high * max(cnt) + max(mem),
    }[plan.objective]
    facts["value"] = value
    verdicts.facts = facts
    for name, fact in facts.items():
        told = float(getattr(plan, name))
        if abs(told - fact) > TOLERANCE_GB * max(1.0, abs(fact) * 1e-3):
            verdicts.problems.append(f"{name} is {fact:g}, the plan says {told:g}")
    better = plan.bound - value if plan.objective is Objective.COVERAGE else value - plan.bound
    if better < -TOLERANCE_GB * max(1.0, abs(value) * 1e-3):
        verdicts.problems.append(f"the bound {plan.bound:g} is contradicted by {value:g}")
