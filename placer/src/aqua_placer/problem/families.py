"""Seeded families of placement problems: what the benchmarks, tests and `bench` run on.

The mixes follow Aqua section 9.3 (audio 10%, vision 15%, the rest LLMs) with sizes on a grid
of 5 GB of an 80 GB card. Families differ in who lends, in tensor parallelism and in whether sizes
repeat:

    ref50      half of the models lend, single GPU
    refmix     10% audio, 15% vision and 25% small LLMs lend, 50% LLMs need
    scarce     35% of the models lend: producers are the bottleneck
    tpmix      refmix whose consumers are in part groups of 2 and 4 shards
    tpscarce   scarce with such groups

A `-cont` suffix multiplies every size by U(0.7, 1.3), so that no two groups are alike. `occupancy`
below 1 leaves GPUs unused. The same name, size and seed give the same instance everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from aqua_protocol import ConfigError

SPREAD: Final = (0.7, 1.3)
"""Range of the factors that make all sizes of a `-cont` family differ."""


@dataclass(frozen=True)
class Kind:
    """A model of a mix: shards, GB per shard, and its share of the GPUs."""

    name: str
    tp: int
    r_gb: float
    share: float


AUDIO: Final = (("audiogen", 60.0), ("musicgen", 50.0))
VISION: Final = (("stable-diffusion", 40.0), ("kandinsky", 30.0))
SMALL_LLM: Final = (("mistral-7b", 25.0), ("llama-8b", 15.0))
LARGE_LLM: Final = (("opt-30b", -20.0), ("codellama-34b", -30.0), ("llama-8b-long", -40.0))
NEEDING_TP2: Final = (("yi-34b-tp2", -30.0), ("llama-70b-tp2", -40.0))
NEEDING_TP4: Final = (("mixtral-tp4", -30.0),)


def _even(models: tuple[tuple[str, float], ...], share: float, tp: int = 1) -> list[Kind]:
    return [Kind(name, tp, r_gb, share / len(models)) for name, r_gb in models]


def _lending(audio: float, vision: float, small: float) -> list[Kind]:
    return _even(AUDIO, audio) + _even(VISION, vision) + _even(SMALL_LLM, small)


def _parallel(need: float) -> list[Kind]:
    single, pairs, fours = 0.60 * need, 0.25 * need, 0.15 * need
    return _even(LARGE_LLM, single) + _even(NEEDING_TP2, pairs, 2) + _even(NEEDING_TP4, fours, 4)


FAMILIES: Final[dict[str, list[Kind]]] = {
    "ref50": _lending(0.15, 0.20, 0.15) + _even(LARGE_LLM, 0.50),
    "refmix": _lending(0.10, 0.15, 0.25) + _even(LARGE_LLM, 0.50),
    "scarce": _lending(0.07, 0.11, 0.17) + _even(LARGE_LLM, 0.65),
    "tpmix": _lending(0.10, 0.15, 0.25) + _parallel(0.50),
    "tpscarce": _lending(0.07, 0.11, 0.17) + _parallel(0.65),
}


def generate(
    family: str,
    gpus: int,
    seed: int,
    *,
    server_gpus: int = 8,
    hbm_gb: float = 80.0,
    occupancy: float = 1.0,
) -> dict[str, Any]:
    """A problem in column form, ready for a file or for `parser.instance_from`.

    Args:
        family: A name of `FAMILIES`, with or without `-cont`.
        gpus: GPUs of the cluster; a multiple of `server_gpus`.
        occupancy: Share of the GPUs that get a model.

    Raises:
        ConfigError: An unknown family, or a size that does not fill whole servers.
    """
    base = family.removesuffix("-cont")
    if base not in FAMILIES:
        raise ConfigError(
            f"no instance family {family!r}",
            remedy=f"Choose one of {', '.join(FAMILIES)}, with or without -cont.",
        )
    if gpus < server_gpus or gpus % server_gpus:
        raise ConfigError(
            f"{gpus} GPUs are not whole servers of {server_gpus}",
            remedy="Choose a multiple of the GPUs per server.",
        )
    rng = np.random.default_rng([seed, gpus, sorted(FAMILIES).index(base)])
    kinds = FAMILIES[base]
    share = np.array([kind.share for kind in kinds]) / np.array([kind.tp for kind in kinds])
    left = round(gpus * occupancy)
    drawn: list[int] = []
    for index in rng.choice(len(kinds), size=left, p=share / share.sum()):
        if kinds[index].tp <= left:
            drawn.append(int(index))
            left -= kinds[index].tp
        if not left:
            break
    singles = [index for index, kind in enumerate(kinds) if kind.tp == 1]
    drawn += [int(index) for index in rng.choice(singles, size=left)]
    r_gb = np.array([kinds[index].r_gb for index in drawn])
    if family.endswith("-cont"):
        r_gb = np.round(r_gb * rng.uniform(*SPREAD, len(drawn)), 6)
    return {
        "name": f"{family}-{gpus}-s{seed}",
        "servers": [{"count": gpus // server_gpus, "gpus": server_gpus, "hbm_gb": hbm_gb}],
        "groups": {
            "name": [f"{kinds[index].name}.{i}" for i, index in enumerate(drawn)],
            "tp": [kinds[index].tp for index in drawn],
            "r_gb": r_gb.tolist(),
        },
    }
