"""A fit: every function that a folder of profiles can teach, in one JSON file.

`fit_samples` makes a curve or a surface of every group of samples; `Fit` keeps them by key and
answers for any point. The file carries where each function came from (file, rows) and is all that
an engine needs: the profiles can be thrown away.

Rows held out: `hold_out=k` leaves every k-th row of each function aside, so that a folder can be
fitted and evaluated by itself; the fit remembers how many, and `evaluation` finds which by asking
whether it has seen the row.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float64

from aqua_cli.files import write_text
from aqua_protocol.errors import ConfigError
from aqua_simulator.timing.interpolation import NEIGHBOURS, Curve, Surface
from aqua_simulator.timing.profiles import CURVES, VARIABLES, Samples, work

FORMAT: Final = 1
"""Fixed: version of the file; raised when an older reader would misread it."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """One function and its origin.

    Attributes:
        key, kind: As in `profiles.Samples`.
        file: The profile it was fitted on.
        row_count: Rows it was fitted on.
    """

    key: str
    kind: str
    file: str
    row_count: int
    shape: Curve | Surface

    def __call__(
        self, variables: Float64[np.ndarray, "rows variables"]
    ) -> Float64[np.ndarray, " rows"]:
        """Seconds for each row of `variables`, shape (num_rows, num_variables) -> (num_rows,)."""
        if isinstance(self.shape, Curve):
            return self.shape(variables[:, 0])
        return self.shape(variables, work(self.kind, variables))

    def at(self, *point: float) -> float:
        """Seconds at one point."""
        return float(self(np.array([point], dtype=np.float64))[0])


@dataclass(frozen=True, eq=False)
class Fit:
    """Fitted functions by key."""

    functions: dict[str, Fitted]
    seen: dict[str, frozenset[tuple[float, ...]]] = field(repr=False)

    def __getitem__(self, key: str) -> Fitted:
        if key not in self.functions:
            device = key.split("/", maxsplit=1)[0] + "/"
            near = sorted(name for name in self.functions if name.startswith(device))
            remedy = (
                f"Fitted for that device: {', '.join(near[:12])}." if near else "Fit its profiles."
            )
            raise ConfigError(f"the fit has no {key!r}", remedy=remedy)
        return self.functions[key]

    def __contains__(self, key: str) -> bool:
        return key in self.functions

    def was_fitted_on(
        self,
        key: str,
        variables: Float64[np.ndarray, "rows variables"],
        seconds: Float64[np.ndarray, " rows"],
    ) -> Bool[np.ndarray, " rows"]:
        """Whether the function was fitted on each of these measured rows, shape (num_rows,)."""
        rows = self.seen.get(key, frozenset())
        return np.array(
            [
                _fingerprint(point, time) in rows
                for point, time in zip(variables, seconds, strict=True)
            ]
        )

    def save(self, path: Path) -> None:
        """Write the file; gzip if its name ends so."""
        document = {
            "format": FORMAT,
            "functions": [
                {
                    "key": function.key,
                    "kind": function.kind,
                    "file": function.file,
                    "row_count": function.row_count,
                    **_arrays(function.shape),
                }
                for function in self.functions.values()
            ],
            "seen": {key: sorted(rows) for key, rows in self.seen.items()},
        }
        write_text(path, json.dumps(document, separators=(",", ":")))

    @classmethod
    def load(cls, path: Path) -> Fit:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: Not such a file.
        """
        try:
            raw = path.read_bytes()
            document: dict[str, Any] = json.loads(
                gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
            )
            if document["format"] != FORMAT:
                raise ConfigError(
                    f"{path} has format {document['format']}, not {FORMAT}", remedy=_REFIT
                )
            functions = {
                entry["key"]: Fitted(
                    entry["key"],
                    entry["kind"],
                    entry["file"],
                    entry["row_count"],
                    _shape(entry),
                )
                for entry in document["functions"]
            }
            seen = {
                key: frozenset(tuple(row) for row in rows) for key, rows in document["seen"].items()
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a fit: {error}", remedy=_REFIT) from error
        return cls(functions, seen)


_REFIT: Final = "Make one with `aqua-sim fit DIR -o FILE`."


def _arrays(shape: Curve | Surface) -> dict[str, list[Any]]:
    """The arrays of a shape as plain lists."""
    return {one.name: getattr(shape, one.name).tolist() for one in fields(shape) if one.init}


def _shape(entry: dict[str, Any]) -> Curve | Surface:
    """The inverse of `_arrays`."""
    kind = Curve if entry["kind"] in CURVES else Surface
    return kind(
        **{one.name: np.asarray(entry[one.name], float) for one in fields(kind) if one.init}
    )


def _fingerprint(point: Float64[np.ndarray, " variables"], seconds: float) -> tuple[float, ...]:
    return (*point.tolist(), float(f"{seconds:.9g}"))


def joined(samples: Iterable[Samples]) -> list[Samples]:
    """Rows of one key from several files as one group, named by the first file."""
    groups: dict[str, list[Samples]] = {}
    for group in samples:
        groups.setdefault(group.key, []).append(group)
    return [
        Samples(
            key,
            parts[0].kind,
            np.concatenate([part.variables for part in parts]),
            np.concatenate([part.seconds for part in parts]),
            parts[0].file,
        )
        for key, parts in groups.items()
    ]


def fit_samples(samples: Iterable[Samples], *, hold_out: int = 0) -> Fit:
    """Fit every function; tables of one key are joined.

    Args:
        hold_out: Leave every k-th row of each function aside; 0 uses all.

    Raises:
        ConfigError: A surface with too few rows.
    """
    functions: dict[str, Fitted] = {}
    seen: dict[str, frozenset[tuple[float, ...]]] = {}
    for group in joined(samples):
        assert group.kind in VARIABLES, group.kind
        keep = np.ones(len(group.seconds), dtype=bool)
        if hold_out:
            keep[hold_out - 1 :: hold_out] = False
        variables, seconds = group.variables[keep], group.seconds[keep]
        shape: Curve | Surface
        if group.kind in CURVES:
            shape = Curve.fit(variables[:, 0], seconds)
        elif len(seconds) > NEIGHBOURS:
            shape = Surface.fit(variables, work(group.kind, variables), seconds)
        else:
            raise ConfigError(
                f"{group.file}: {len(seconds)} rows are too few for {group.key}",
                remedy=f"A function of several variables needs more than {NEIGHBOURS} rows.",
            )
        functions[group.key] = Fitted(group.key, group.kind, group.file, len(seconds), shape)
        seen[group.key] = frozenset(
            _fingerprint(point, time) for point, time in zip(variables, seconds, strict=True)
        )
    return Fit(functions, seen)
