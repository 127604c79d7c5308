"""Placement problems that are measured: by family, and every kind there is beyond."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aqua_placer.problem.families import FAMILIES, generate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.changed_problems import on_mixed_servers, weighted

SERVER_GPUS = 8
"""Of the families, where nothing else is said."""


def family(
    name: str, gpus: int, seed: int, *, server_gpus: int = SERVER_GPUS, occupancy: float = 1.0
) -> tuple[str, dict[str, Any]]:
    """Label and problem."""
    label = f"{name}-{gpus}-s{seed}"
    if server_gpus != SERVER_GPUS:
        label += f"-ser{server_gpus}"
    if occupancy != 1.0:
        label += f"-occ{occupancy:g}"
    return label, generate(name, gpus, seed, server_gpus=server_gpus, occupancy=occupancy)


def with_groups_of_16(problem: dict[str, Any]) -> dict[str, Any]:
    """The problem with a third of its single consumers joined into groups of 16 shards."""
    groups = list(zip(problem["groups"]["tp"], problem["groups"]["r_gb"], strict=True))
    single = [size for shards, size in groups if shards == 1 and size < 0]
    count = max(1, len(single) // 48)
    joined = [(16, statistics.mean(single[16 * i : 16 * i + 16])) for i in range(count)]
    rest = [(1, size) for size in single[16 * count :]]
    others = [group for group in groups if group[0] > 1 or group[1] >= 0]
    everything = [*joined, *rest, *others]
    columns = {
        "name": [f"g{index}" for index in range(len(everything))],
        "tp": [shards for shards, _ in everything],
        "r_gb": [size for _, size in everything],
    }
    return {**problem, "groups": columns}


def on_two_cards(problem: dict[str, Any]) -> dict[str, Any]:
    """The problem with half of its servers on cards of 96 GB, where models spare 16 GB more."""
    (servers,) = problem["servers"]
    half = servers["count"] // 2
    counts = Counter(zip(problem["groups"]["tp"], problem["groups"]["r_gb"], strict=True))
    return {
        "servers": [
            {**servers, "name": "old", "count": servers["count"] - half},
            {**servers, "name": "new", "count": half, "hbm_gb": 96},
        ],
        "models": [
            {
                "name": f"m{index}",
                "tp": shards,
                "memory_gb": size,
                "replicas": count,
                "profiled_hbm_gb": servers["hbm_gb"],
            }
            for index, ((shards, size), count) in enumerate(counts.items())
        ],
    }


def sweep_problems() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind of problem, small: label and problem."""
    for name in FAMILIES:
        for suffix in ("", "-cont"):
            for seed in range(2):
                yield family(name + suffix, 128, seed)
    for name in ("ref50", "tpmix", "tpscarce"):
        for suffix in ("", "-cont"):
            yield family(name + suffix, 1024, 0)
    for server_gpus in (2, 3, 4, 5, 6, 12, 16, 72):
        # Groups of four do not fit servers of two or three GPUs.
        names = ("refmix", "scarce") if server_gpus < 4 else ("tpmix", "tpscarce")
        gpus = {5: 120, 72: 288}.get(server_gpus, 144)
        for name in names:
            for suffix in ("", "-cont"):
                yield family(name + suffix, gpus, 0, server_gpus=server_gpus)
    yield from unusual_problems()


def unusual_problems() -> Iterator[tuple[str, dict[str, Any]]]:
    """Weights, servers and cards of several sizes, unused GPUs, groups of 16 shards."""
    for name in ("tpmix", "tpscarce", "tpmix-cont", "tpscarce-cont"):
        label, problem = family(name, 128, 1)
        yield f"{label}-weighted", weighted(problem, 1)
        yield f"{label}-mixed", on_mixed_servers(problem)
        yield f"{label}-mixed-weighted", on_mixed_servers(weighted(problem, 1))
        yield f"{label}-two-cards", on_two_cards(problem)
        yield family(name, 128, 1, occupancy=0.6)
        yield family(name, 128, 1, occupancy=0.9)
        label, problem = family(name, 144, 2, server_gpus=16)
        yield f"{label}-weighted", weighted(problem, 2)
        for gpus, server_gpus in ((256, 32), (288, 72)):
            label, problem = family(name, gpus, 1, server_gpus=server_gpus)
            yield f"{label}-tp16", with_groups_of_16(problem)
