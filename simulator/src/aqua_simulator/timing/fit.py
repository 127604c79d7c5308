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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

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

    def unseen(self, samples: Samples) -> Samples:
        """The rows that the function was not fitted on."""
        seen = self.seen.get(samples.key, frozenset())
        return samples.only(np.array([row not in seen for row in _fingerprints(samples)], bool))

    def save(self, path: Path) -> None:
        """Write the file; gzip if its name ends so."""
        document = {
            "format": FORMAT,
            "functions": [
                {name: getattr(one, name) for name in _FACTS} | _arrays(one.shape)
                for one in self.functions.values()
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
                entry["key"]: Fitted(**{name: entry[name] for name in _FACTS}, shape=_shape(entry))
                for entry in document["functions"]
            }
            seen = {
                key: frozenset(tuple(row) for row in rows) for key, rows in document["seen"].items()
            }
        except (RecursionError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a fit: {error}", remedy=_REFIT) from error
        return cls(functions, seen)


_FACTS: Final = ("key", "kind", "file", "row_count")
"""What the file keeps of a function beside its arrays."""

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


def _fingerprints(samples: Samples) -> Iterator[tuple[float, ...]]:
    """Variables and seconds of each row, as the file keeps them."""
    for point, seconds in zip(samples.variables.tolist(), samples.seconds.tolist(), strict=True):
        yield (*point, float(f"{seconds:.9g}"))


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
        ConfigError: A surface with too few rows, or times that are not positive.
    """
    functions: dict[str, Fitted] = {}
    seen: dict[str, frozenset[tuple[float, ...]]] = {}
    for group in joined(samples):
        assert group.kind in VARIABLES, group.kind
        keep = np.ones(len(group.seconds), dtype=bool)
        if hold_out:
            keep[hold_out - 1 :: hold_out] = False
        rows = group.only(keep)
        shape: Curve | Surface
        if rows.kind in CURVES:
            shape = Curve.fit(rows.variables[:, 0], rows.seconds)
        elif len(rows.seconds) > NEIGHBOURS and np.all(rows.seconds > 0.0):
            shape = Surface.fit(rows.variables, work(rows.kind, rows.variables), rows.seconds)
        else:
            raise ConfigError(
                f"{rows.file}: too few rows for {rows.key}, or times of 0",
                remedy=f"It needs more than {NEIGHBOURS} rows of positive times.",
            )
        functions[rows.key] = Fitted(rows.key, rows.kind, rows.file, len(rows.seconds), shape)
        seen[rows.key] = frozenset(_fingerprints(rows))
    return Fit(functions, seen)
