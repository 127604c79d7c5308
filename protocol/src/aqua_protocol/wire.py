"""The base of every wire message: frozen, closed to unknown fields, bounded.

Requests refuse what they do not know, so that a misspelt field is an error instead of a silent
default. `strict` keeps JSON `"12"` from passing as 12 and `true` from passing as 1.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from aqua_protocol.ids import MAX_EPOCH
from aqua_protocol.units import MAX_BYTES


class Wire(BaseModel):
    """A message that crosses a process boundary."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


ByteCount = Annotated[int, Field(ge=0, le=MAX_BYTES, strict=True)]
PositiveBytes = Annotated[int, Field(ge=1, le=MAX_BYTES, strict=True)]
EpochField = Annotated[int, Field(ge=1, le=MAX_EPOCH, strict=True)]
RevisionField = Annotated[int, Field(ge=0, le=MAX_EPOCH, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=86_400, strict=True)]
Rate = Annotated[float, Field(ge=0, le=1e15, strict=True)]
Milliseconds = Annotated[float, Field(ge=0, le=86_400_000, strict=True)]
VersionNumber = Annotated[int, Field(ge=0, le=65_535, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
