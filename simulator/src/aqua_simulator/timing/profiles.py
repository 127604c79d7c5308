"""Reads profile tables: which file is which, its columns, and its rows as arrays.

A folder of profiles is recognised by file names, as they come from their sources:

- `vidur_<gpu>_<model>_mlp`: every linear operator of one layer against tokens, per tensor-parallel
  width (Vidur).
- `vidur_net_<node>_{all_reduce,send_recv}`: collectives against bytes (Vidur).
- `aic_<gpu>_{gemm,context_attention,generation_attention,custom_allreduce}_perf`: vLLM's kernels
  (aiconfigurator).
- `lss_<gpu>_<model>_{dense,attention,per_sequence}`: one model's kernels (LLMServingSim).

Every file becomes *samples*: a key that names the function, the variables, and measured seconds.
Files of other names are left alone, a file of a known name that lacks its columns is an error.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64

from aqua_protocol.errors import ConfigError

Row = dict[str, str]

MS: Final = 1e-3
US: Final = 1e-6


@dataclass(frozen=True, eq=False)
class Samples:
    """Measured rows of one function.

    Attributes:
        key: Names the function, for example `a100/Llama-2-7b-hf/tp2/mlp_up_proj`.
        kind: What it is a function of; a key of `VARIABLES`.
        variables: Shape (num_rows, num_variables), columns as `VARIABLES[kind]`.
        seconds: Shape (num_rows,).
        file: Name of the file.
    """

    key: str
    kind: str
    variables: Float64[np.ndarray, "rows variables"]
    seconds: Float64[np.ndarray, " rows"]
    file: str


VARIABLES: Final[dict[str, tuple[str, ...]]] = {
    "tokens": ("tokens",),
    "bytes": ("bytes",),
    "sequences": ("sequences",),
    "gemm": ("m", "n", "k"),
    "prefill_attention": ("batch", "tokens", "heads", "kv_heads"),
    "decode_attention": ("batch", "context", "heads", "kv_heads"),
    "mixed_attention": ("chunk", "chunk_context", "decoding", "decode_context"),
}

CURVES: Final = frozenset({"tokens", "bytes", "sequences"})
"""Kinds of one variable; the others are surfaces."""


def work(
    kind: str, variables: Float64[np.ndarray, "rows variables"]
) -> Float64[np.ndarray, "rows terms"]:
    """Work terms of a surface's baseline: a call, then what scales with floats and with bytes.

    Returns:
        Shape (num_rows, num_terms).
    """
    v = variables.T
    one = np.ones(len(variables))
    terms: dict[str, Callable[[], tuple[Float64[np.ndarray, " rows"], ...]]] = {
        "gemm": lambda: (one, v[0] * v[1] * v[2], v[0] * v[1], v[0] * v[2], v[1] * v[2]),
        "prefill_attention": lambda: (
            one,
            v[0] * v[1] ** 2 * v[2],
            v[0] * v[1] * v[2],
            v[0] * v[1] * v[3],
        ),
        "decode_attention": lambda: (one, v[0], v[0] * v[1] * v[3], v[0] * v[1] * v[2]),
        "mixed_attention": lambda: (
            one,
            v[0],
            v[0] * (v[1] + v[0] / 2),
            v[1],
            v[2],
            v[2] * v[3],
        ),
    }
    return np.stack(terms[kind](), axis=1)


def rows_of(path: Path) -> Iterator[Row]:
    """Rows of a CSV file, plain or gzip."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as text:
        yield from csv.DictReader(text)


def read_folder(folder: Path) -> list[Samples]:
    """All samples of a folder, in the order of file names.

    Raises:
        ConfigError: No folder, no profile in it, or a profile without its columns.
    """
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}", remedy="Give the folder with the profile tables.")
    found: list[Samples] = []
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(".gz").removesuffix(".csv")
        for pattern, reader in _READERS:
            match = pattern.fullmatch(name)
            if match and path.name != name:
                try:
                    found += reader(path, match)
                except KeyError as missing:
                    raise ConfigError(
                        f"{path.name}: no column {missing}",
                        remedy="Keep the columns of the source; see the names of this module.",
                    ) from missing
    if not found:
        remedy = f"Known names: {', '.join(pattern.pattern for pattern, _ in _READERS)}."
        raise ConfigError(f"no profile tables in {folder}", remedy=remedy)
    return found


def _grouped(
    path: Path,
    kind: str,
    key: Callable[[Row], str],
    variables: Callable[[Row], tuple[float, ...]],
    seconds: Callable[[Row], float],
) -> list[Samples]:
    groups: dict[str, list[tuple[tuple[float, ...], float]]] = defaultdict(list)
    for row in rows_of(path):
        groups[key(row)].append((variables(row), seconds(row)))
    return [
        Samples(
            name,
            kind,
            np.array([point for point, _ in rows], dtype=np.float64),
            np.array([time for _, time in rows], dtype=np.float64),
            path.name,
        )
        for name, rows in groups.items()
    ]


def _linear(path: Path, match: re.Match[str]) -> list[Samples]:
    prefix = f"{match['gpu']}/{match['model']}"
    found: list[Samples] = []
    rows = list(rows_of(path))
    for operator in (name for name in rows[0] if name.endswith("_ms")):
        by_width: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_width[row["num_tensor_parallel_workers"]].append(row)
        found += [
            Samples(
                f"{prefix}/tp{width}/{operator.removesuffix('_ms')}",
                "tokens",
                np.array([[float(row["num_tokens"])] for row in part]),
                np.array([float(row[operator]) * MS for row in part]),
                path.name,
            )
            for width, part in by_width.items()
        ]
    return found


def _collective(path: Path, match: re.Match[str]) -> list[Samples]:
    name = match["name"]
    return _grouped(
        path,
        "bytes",
        lambda row: (
            f"{match['node']}/{name}/{row['num_workers']}x"
            f"{row['devices_per_node']}of{row['max_devices_per_node']}"
        ),
        lambda row: (float(row["size"]),),
        lambda row: float(row[f"time_stats.{name}.median"]) * MS,
    )


def _custom_all_reduce(path: Path, match: re.Match[str]) -> list[Samples]:
    return _grouped(
        path,
        "bytes",
        lambda row: f"{match['gpu']}/{row['backend']}_all_reduce/{row['num_gpus']}",
        lambda row: (float(row["message_size"]),),
        lambda row: float(row["latency_ms"]) * MS,
    )


def _gemm(path: Path, match: re.Match[str]) -> list[Samples]:
    return _grouped(
        path,
        "gemm",
        lambda _row: f"{match['gpu']}/gemm",
        lambda row: (float(row["m"]), float(row["n"]), float(row["k"])),
        lambda row: float(row["latency_ms"]) * MS,
    )


def _attention(path: Path, match: re.Match[str]) -> list[Samples]:
    kind = "prefill_attention" if match["phase"] == "context" else "decode_attention"

    def variables(row: Row) -> tuple[float, ...]:
        heads, kv_heads = float(row["num_heads"]), float(row["num_key_value_heads"])
        # `step` tokens are in the cache when the kernel runs on `isl` new ones.
        return float(row["batch_size"]), float(row["isl"]) + float(row["step"]), heads, kv_heads

    return _grouped(
        path,
        kind,
        lambda _row: f"{match['gpu']}/{kind}",
        variables,
        lambda row: float(row["latency_ms"]) * MS,
    )


def _dense(path: Path, match: re.Match[str]) -> list[Samples]:
    return _grouped(
        path,
        "tokens",
        lambda row: f"{match['gpu']}/{match['model']}/tp1/{row['layer']}",
        lambda row: (float(row["tokens"]),),
        lambda row: float(row["time_us"]) * US,
    )


def _per_sequence(path: Path, match: re.Match[str]) -> list[Samples]:
    return _grouped(
        path,
        "sequences",
        lambda row: f"{match['gpu']}/{match['model']}/tp1/{row['layer']}",
        lambda row: (float(row["sequences"]),),
        lambda row: float(row["time_us"]) * US,
    )


def _mixed(path: Path, match: re.Match[str]) -> list[Samples]:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    return _grouped(
        path,
        "mixed_attention",
        lambda _row: f"{match['gpu']}/{match['model']}/tp1/mixed_attention",
        lambda row: tuple(float(row[name]) for name in names),
        lambda row: float(row["time_us"]) * US,
    )


_READERS: Final = tuple(
    (re.compile(pattern), reader)
    for pattern, reader in (
        (r"vidur_net_(?P<node>.+)_(?P<name>all_reduce|send_recv)", _collective),
        (r"vidur_(?P<gpu>[a-z0-9]+)_(?P<model>.+)_mlp", _linear),
        (r"aic_(?P<gpu>[a-z0-9]+)_sxm_gemm_perf", _gemm),
        (r"aic_(?P<gpu>[a-z0-9]+)_sxm_(?P<phase>context|generation)_attention_perf", _attention),
        (r"aic_(?P<gpu>[a-z0-9]+)_sxm_custom_allreduce_perf", _custom_all_reduce),
        (r"lss_(?P<gpu>[A-Za-z0-9-]+)_(?P<model>.+)_dense", _dense),
        (r"lss_(?P<gpu>[A-Za-z0-9-]+)_(?P<model>.+)_per_sequence", _per_sequence),
        (r"lss_(?P<gpu>[A-Za-z0-9-]+)_(?P<model>.+)_attention", _mixed),
    )
)
