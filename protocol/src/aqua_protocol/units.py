"""Byte and time units: every size in Aqua is an integer count of bytes.

Owns the constants that wire messages are bounded by and the one parser for human sizes, so that
`64MiB` means the same on a command line, in a settings file and in an error message. Decimal and
binary prefixes are both understood and never mixed up: `GB` is 10^9 (data sheets), `GiB` is 2^30
(allocators).
"""

from __future__ import annotations

import re
from typing import Final

from aqua_protocol.errors import ConfigError

# Fixed by IEC 80000-13.
KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

DEFAULT_SLAB_BYTES: Final = 64 * MIB
"""Unit of an offer and of reclaim. Large enough that one copy saturates NVLink (a 64 MB copy
reaches 200 of 276 GB/s on an A100, Aqua section 7), small enough that the first slab of a reclaim
is back in milliseconds even over a 10 GB/s path. Doubled, so is the time to the first slab, and the
last slab of an offer strands twice the bytes."""

MIN_SLAB_BYTES: Final = 64 * KIB
"""Smaller slabs only make sense in tests: CUDA maps device memory in 2 MiB granules. Doubled, tests
need twice the memory."""

MAX_BYTES: Final = 1 << 50
"""Upper bound of any byte count on the wire (1 PiB): above every rack, below 2^53, so that JSON
and Lua numbers hold it exactly. Doubled three times, they no longer would."""

_FACTORS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_SIZE: Final = re.compile(r"\s*(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Read a human size such as `64MiB`, `1.5 GB` or `4096` into whole bytes.

    Raises:
        ConfigError: Not a size, an unknown unit, a fraction of a byte, or above `MAX_BYTES`.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        message = f"{text!r} is not a size"
        raise ConfigError(message, remedy="Write a number and a unit, for example 512MiB or 10GB.")
    size = float(match["count"]) * factor
    if size > MAX_BYTES or size != int(size):
        message = f"{text!r} is not a whole number of bytes up to {format_bytes(MAX_BYTES)}"
        raise ConfigError(message, remedy="Use a smaller or rounder size.")
    return int(size)


def format_bytes(count: int) -> str:
    """Write a byte count for people, with a binary unit and at most one decimal: `1.5 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":  # noqa: PLR2004 - the binary prefix step
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
