"""Small placement problems for Hypothesis, and their answers by exhaustion.

`best_by_exhaustion` tries every assignment of groups to servers (up to renaming equal servers) and
every matching within them, with arithmetic of its own: it shares nothing with the solvers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Best:
    """The optimum of each objective."""

    coverage: float
    abs: float
    signed: float


@st.composite
def small_problems(
    draw: st.DrawFn, *, weights: bool = False, classes: bool = False
) -> dict[str, Any]:
    """Problems in column form: up to 3 servers of up to 4 GPUs and up to 7 groups.

    Args:
        classes: Servers may be of two sizes, up to 6 GPUs.
    """
    gpus = draw(st.integers(1, 4))
    servers = [{"count": draw(st.integers(1, 3)), "gpus": gpus, "hbm_gb": 80}]
    if classes:
        servers[0]["count"] = draw(st.integers(1, 2))
        servers.append({"count": 1, "gpus": draw(st.integers(1, 6)), "hbm_gb": 80})
    room = sizes_of(servers)
    tp: list[int] = []
    for _ in range(draw(st.integers(1, 7))):
        size = draw(st.sampled_from([1, 1, 1, 2, 4]))
        fits = [index for index, free in enumerate(room) if free >= size]
        if fits:
            room[fits[0]] -= size
            tp.append(size)
    if not tp:
        tp = [1]
    size_gb = st.one_of(
        st.integers(-8, 8).map(lambda value: value * 5.0),
        st.floats(-60, 60).map(lambda value: round(value, 3)),
    )
    columns: dict[str, Any] = {
        "name": [f"g{index}" for index in range(len(tp))],
        "tp": tp,
        "r_gb": [draw(size_gb) for _ in tp],
    }
    if weights:
        worth = st.one_of(
            st.sampled_from([1.0, 2.0, 0.5]),
            st.floats(0.1, 10).map(lambda value: round(value, 3)),
        )
        columns["weight"] = [draw(worth) for _ in tp]
    return {"servers": servers, "groups": columns}


def sizes_of(servers: list[dict[str, Any]]) -> list[int]:
    """GPUs of each server."""
    return [entry["gpus"] for entry in servers for _ in range(entry["count"])]


def placements(tp: list[int], sizes: list[int]) -> Iterator[list[list[int]]]:
    """Every division of the groups over servers of these sizes, each once up to renaming."""
    held: list[list[int]] = [[] for _ in sizes]
    free = list(sizes)

    def place(group: int) -> Iterator[list[list[int]]]:
        if group == len(tp):
            yield [list(members) for members in held]
            return
        empty_seen = set()
        for server, gpus in enumerate(sizes):
            if not held[server]:
                if gpus in empty_seen:
                    continue
                empty_seen.add(gpus)
            if free[server] >= tp[group]:
                held[server].append(group)
                free[server] -= tp[group]
                yield from place(group + 1)
                held[server].pop()
                free[server] += tp[group]

    yield from place(0)


def covered_by_exhaustion(
    members: list[int], tp: list[int], r_gb: list[float], weight: list[float]
) -> float:
    """Most weighted GB that one server's groups can cover, over all orders of serving."""
    shards = sorted((r_gb[g] for g in members for _ in range(tp[g]) if r_gb[g] > 0), reverse=True)
    consumers = [g for g in members if r_gb[g] < 0]
    best = 0.0
    for order in permutations(consumers):
        for count in range(len(order) + 1):
            at, total = 0, 0.0
            for group in order[:count]:
                block = shards[at : at + tp[group]]
                if len(block) < tp[group]:
                    break
                total += weight[group] * tp[group] * min(-r_gb[group], *block)
                at += tp[group]
            best = max(best, total)
    return best


def best_by_exhaustion(problem: dict[str, Any]) -> Best:
    """The optimum of every objective over all placements."""
    sizes, columns = sizes_of(problem["servers"]), problem["groups"]
    tp, r_gb = columns["tp"], columns["r_gb"]
    weight = columns.get("weight") or [1.0] * len(tp)
    hbm = max(entry["hbm_gb"] for entry in problem["servers"])
    cache: dict[tuple[int, ...], float] = {}
    coverage, least_abs, least_signed = 0.0, float("inf"), float("inf")
    for held in placements(tp, sizes):
        mem = [sum(tp[g] * r_gb[g] for g in members) for members in held]
        cnt = [sum(tp[g] * ((r_gb[g] > 0) - (r_gb[g] < 0)) for g in members) for members in held]
        least_abs = min(least_abs, max(map(abs, mem)) + hbm * max(map(abs, cnt)))
        least_signed = min(least_signed, max(mem) + hbm * max(cnt))
        total = 0.0
        for members in held:
            key = tuple(members)
            if key not in cache:
                cache[key] = covered_by_exhaustion(members, tp, r_gb, weight)
            total += cache[key]
        coverage = max(coverage, total)
    return Best(coverage, least_abs, least_signed)
