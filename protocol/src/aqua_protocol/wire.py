"""What all messages share: their base, the bounds of their fields, and the protocol's version.

Requests refuse what they do not know, so that a misspelt field is an error instead of a silent
default. `strict` keeps JSON `"12"` from passing as 12 and `true` from passing as 1.

`PROTOCOL_VERSION` counts incompatible changes of the wire: messages, tables, token format. Both
sides say it first and refuse loudly; guessing across versions is how memory gets corrupted.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aqua_protocol.errors import VersionMismatchError
from aqua_protocol.ids import MAX_EPOCH
from aqua_protocol.units import MAX_BYTES

# Fixed: a count of changes.
PROTOCOL_VERSION: Final = 1

# Fixed: a day, the longest time that a message may tell.
MAX_SECONDS: Final = 86_400.0


def require_protocol_version(theirs: int, *, who: str) -> None:
    """Refuse a peer that speaks another protocol version.

    Raises:
        VersionMismatchError: `theirs` differs; `details` carries both numbers.
    """
    if theirs != PROTOCOL_VERSION:
        message = f"{who} speaks protocol {theirs}, this side speaks {PROTOCOL_VERSION}"
        raise VersionMismatchError(message, theirs=theirs, ours=PROTOCOL_VERSION)


class TransportKind(StrEnum):
    """How a slab is shared between two processes."""

    MEMFD = "memfd"
    """Anonymous host memory behind a file descriptor: CPU machines, tests, the demo."""
    CUDA_VMM = "cuda_vmm"
    """CUDA virtual memory management with POSIX descriptors: the primary path on GPUs."""
    CUDA_IPC = "cuda_ipc"
    """Legacy CUDA IPC handles: drivers and containers without VMM export."""


class Wire(BaseModel):
    """A message that crosses a process boundary."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


def first_fault(error: ValidationError, whole: str = "top level") -> str:
    """What was found wrong first: where in the document, or that it is `whole`, and what."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


ByteCount = Annotated[int, Field(ge=0, le=MAX_BYTES, strict=True)]
PositiveBytes = Annotated[int, Field(ge=1, le=MAX_BYTES, strict=True)]
EpochField = Annotated[int, Field(ge=1, le=MAX_EPOCH, strict=True)]
RevisionField = Annotated[int, Field(ge=0, le=MAX_EPOCH, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, strict=True)]
Rate = Annotated[float, Field(ge=0, le=1e15, strict=True)]
Milliseconds = Annotated[float, Field(ge=0, le=1e3 * MAX_SECONDS, strict=True)]
VersionNumber = Annotated[int, Field(ge=0, le=65_535, strict=True)]
Proof = Annotated[str, Field(max_length=64, pattern=r"^[0-9]{1,16}\.[A-Za-z0-9_-]+$")]
Flag = Annotated[bool, Field(strict=True)]
TraceParent = Annotated[
    str, Field(max_length=55, pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
]
"""A span of a trace, as W3C Trace Context writes it."""
