"""Reads profile tables: which file is which, its columns, and its rows as arrays.

A folder of profiles is recognised by file names, as they come from their sources:

- `vidur_<gpu>_<model>_mlp`: every linear operator of one layer against tokens, per tensor-parallel
  width (Vidur).
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
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from aqua_protocol.errors import ConfigError

Row = dict[str, str]


@dataclass(frozen=True, eq=False)
class Samples:
    """Measured rows of one function.

    Attributes:
        key: Names the function, for example `a100/Llama-2-7b-hf/tp2/mlp_up_proj`.
        kind: What it is a function of; a key of `VARIABLES`.
        variables: Shape (num_rows, num_variables), columns as `VARIABLES[kind]`.
        seconds: Shape (num_rows,).
    """

    key: str
    kind: str
    variables: Float64[np.ndarray, "rows variables"]
    seconds: Float64[np.ndarray, " rows"]
    file: str

    def only(self, rows: Bool[np.ndarray, " rows"]) -> Samples:
        """These rows of it, shape (num_rows,)."""
        return replace(self, variables=self.variables[rows], seconds=self.seconds[rows])


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
    """Work terms of a surface's baseline: a call, then what scales with floats and with bytes."""
    v, one = variables.T, np.ones(len(variables))
    terms: dict[str, Callable[[], tuple[Float64[np.ndarray, " rows"], ...]]] = {
        "gemm": lambda: (one, v[0] * v[1] * v[2], v[0] * v[1], v[0] * v[2], v[1] * v[2]),
        "prefill_attention": lambda: (
            one,
            v[0] * v[1] ** 2 * v[2],
            v[0] * v[1] * v[2],
            v[0] * v[1] * v[3],
        ),
        "decode_attention": lambda: (one, v[0], v[0] * v[1] * v[3], v[0] * v[1] * v[2]),
        "mixed_attention": lambda: (one, v[0], v[0] * (v[1] + v[0] / 2), v[1], v[2], v[2] * v[3]),
    }
    return np.stack(terms[kind](), axis=1)


def rows_of(path: Path) -> Iterator[Row]:
    """Rows of a CSV file, plain or gzip.

    Raises:
        ConfigError: It is no such file, or breaks off.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        # Spreadsheets begin a file with a byte order mark, which is no part of a name.
        with opener(path, "rt", newline="", encoding="utf-8-sig") as text:
            yield from csv.DictReader(text)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", remedy="Check that the file is whole, and CSV."
        ) from error


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
        for table in _TABLES:
            match = re.fullmatch(table.file, name)
            if match and path.name != name:
                try:
                    found += table.samples(path, match)
                except KeyError as missing:
                    raise ConfigError(
                        f"{path.name}: no column {missing}",
                        remedy="Keep the columns of the source; see the names of this module.",
                    ) from missing
    if not found:
        remedy = f"Known names: {', '.join(table.file for table in _TABLES)}."
        raise ConfigError(f"no profile tables in {folder}", remedy=remedy)
    return found


@dataclass(frozen=True, slots=True)
class _Table:
    """How the rows of a kind of file become samples.

    Attributes:
        file: Pattern of the name.
        kind: As in `Samples`.
        key: As in `Samples`, made of parts of the name and of columns.
        variables: Columns; those joined by `+` are added.
        seconds: Pattern of the columns of times, each a function of its own; microseconds if a
            column ends so. In the key, `operator` is the column without its unit.
    """

    file: str
    kind: str
    key: str
    variables: tuple[str, ...]
    seconds: str

    def samples(self, path: Path, match: re.Match[str]) -> list[Samples]:
        """The samples in the rows of one file, grouped by key."""
        rows = list(rows_of(path))
        groups: dict[str, list[tuple[tuple[float, ...], float]]] = defaultdict(list)
        columns = [name for name in (rows[0] if rows else ()) if re.fullmatch(self.seconds, name)]
        if not columns:
            raise KeyError(self.seconds)
        for column in columns:
            unit_s = 1e-6 if column.endswith("_us") else 1e-3
            facts = {**match.groupdict(), "operator": column.removesuffix("_ms")}
            for row in rows:
                point = tuple(
                    sum(float(row[name]) for name in names.split("+")) for names in self.variables
                )
                key = self.key.format_map({**row, **facts})
                groups[key].append((point, float(row[column]) * unit_s))
        return [
            Samples(
                key,
                self.kind,
                np.array([point for point, _ in found], dtype=np.float64),
                np.array([time for _, time in found], dtype=np.float64),
                path.name,
            )
            for key, found in groups.items()
        ]


_ATTENTION: Final = ("batch_size", "isl+step", "num_heads", "num_key_value_heads")
"""`step` tokens are in the cache when the kernel runs on `isl` new ones."""

_AIC: Final = r"aic_(?P<gpu>[a-z0-9]+)_sxm_"
_LSS: Final = r"lss_(?P<gpu>[A-Za-z0-9-]+)_(?P<model>.+)_"
_LAYER: Final = "{gpu}/{model}/tp1/{layer}"
_MIXED: Final = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")

_TABLES: Final = (
    _Table(
        r"vidur_(?P<gpu>[a-z0-9]+)_(?P<model>.+)_mlp",
        "tokens",
        "{gpu}/{model}/tp{num_tensor_parallel_workers}/{operator}",
        ("num_tokens",),
        ".+_ms",
    ),
    _Table(rf"{_AIC}gemm_perf", "gemm", "{gpu}/gemm", ("m", "n", "k"), "latency_ms"),
    *(
        _Table(rf"{_AIC}{phase}_attention_perf", kind, f"{{gpu}}/{kind}", _ATTENTION, "latency_ms")
        for phase, kind in (("context", "prefill_attention"), ("generation", "decode_attention"))
    ),
    _Table(
        rf"{_AIC}custom_allreduce_perf",
        "bytes",
        "{gpu}/{backend}_all_reduce/{num_gpus}",
        ("message_size",),
        "latency_ms",
    ),
    _Table(rf"{_LSS}dense", "tokens", _LAYER, ("tokens",), "time_us"),
    _Table(rf"{_LSS}per_sequence", "sequences", _LAYER, ("sequences",), "time_us"),
    _Table(
        rf"{_LSS}attention",
        "mixed_attention",
        "{gpu}/{model}/tp1/mixed_attention",
        _MIXED,
        "time_us",
    ),
)
