"""Placement problems of a family, changed: unlike worth, servers of several sizes, churn."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

WEIGHTS: Final = (1.0, 2.0, 5.0)
"""Worth of a covered GB of a best-effort, a usual and a premium model."""


def weighted(problem: dict[str, Any], seed: int) -> dict[str, Any]:
    """The problem with groups of unlike worth: `WEIGHTS`, drawn evenly."""
    rng = np.random.default_rng([seed, len(problem["groups"]["tp"])])
    weight = rng.choice(WEIGHTS, len(problem["groups"]["tp"])).tolist()
    groups = {**problem["groups"], "weight": weight}
    return {**problem, "name": f"{problem['name']}-weighted", "groups": groups}


def on_mixed_servers(problem: dict[str, Any]) -> dict[str, Any]:
    """The problem with as many GPUs of the same HBM on servers of 16, 8 and 4, a third each."""
    gpus = sum(entry["count"] * entry["gpus"] for entry in problem["servers"])
    hbm_gb = problem["servers"][0]["hbm_gb"]
    wide = gpus // 3 // 16
    usual = gpus // 3 // 8
    narrow, rest = divmod(gpus - 16 * wide - 8 * usual, 4)
    counts = {16: wide, 8: usual, 4: narrow, 1: rest}
    servers = [
        {"count": count, "gpus": size, "hbm_gb": hbm_gb} for size, count in counts.items() if count
    ]
    return {**problem, "name": f"{problem['name']}-mixed", "servers": servers}


def churned(
    problem: dict[str, Any],
    placement: list[int],
    share: float,
    seed: int,
    *,
    in_place: bool = False,
) -> dict[str, Any]:
    """The problem some time later: a share of the groups has left, others of their shape came.

    Args:
        placement: Server of each group today; the groups that stay carry it as `current`.
        share: Of the GPUs; groups are drawn until their shards reach it.
        in_place: The groups stay where they are and only their sizes change: the harder case,
            because newcomers can be placed for free and residents cannot.
    """
    rng = np.random.default_rng([seed, len(placement)])
    groups = problem["groups"]
    tp = np.array(groups["tp"])
    order = rng.permutation(len(tp))
    leaving = order[np.cumsum(tp[order]) <= share * tp.sum()]
    r_gb = np.array(groups["r_gb"])
    names, current = list(groups["name"]), [int(server) for server in placement]
    sizes = r_gb.copy()
    for index in leaving.tolist():
        alike = np.nonzero(tp == tp[index])[0]
        sizes[index] = r_gb[rng.choice(alike)]
        if not in_place:
            names[index] = f"{names[index]}.new"
            current[index] = -1
    columns = {"name": names, "tp": groups["tp"], "r_gb": sizes.tolist(), "current": current}
    return {**problem, "name": f"{problem['name']}-churn{share:g}", "groups": columns}
