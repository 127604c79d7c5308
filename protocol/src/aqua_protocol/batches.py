"""How a batch service's batches are going: what it tells operators, and what the console shows.

Counts, times and names. Of requests and answers there is nothing, not even their ids: those are
their tenants'. The two sides are upgraded apart, so what one does not know it leaves alone.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

MOST_BATCHES: Final = 100
"""Told of at once, as OpenAI's listing: three screens. Doubled, so is the answer, 30 KiB."""

Count = Annotated[int, Field(ge=0)]
Label = Annotated[str, Field(max_length=256)]


class JobView(BaseModel):
    """How far one batch is."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    batch_id: Label
    tenant: Label
    endpoint: Label
    model: str | None = Field(
        None, max_length=512, description="None where its requests name several, or not read yet."
    )
    status: Label = Field(description="OpenAI's.")
    created_s: int = Field(description="Unix time.")
    expires_s: int = Field(description="Unix time of its deadline.")
    total: Count = Field(description="Requests; 0 before its input is read.")
    completed: Count
    failed: Count
    fault: Label | None = Field(None, description="Code of what was wrong with its input first.")
    requests_per_s: float | None = Field(
        None, ge=0, description="That ended of late; None where too little is known."
    )
    seconds_left: float | None = Field(
        None, ge=0, description="At this rate; None where nothing ends, or all has."
    )
    is_late: bool = Field(
        default=False,
        description="Its pace so far misses four fifths of its window: it goes first.",
    )


class BatchSummary(BaseModel):
    """All batches that a caller may see, in sums, and the most urgent one by one."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    at_s: float = Field(description="Unix time of the batch service.")
    batches: list[JobView] = Field(
        max_length=MOST_BATCHES, description="Open ones by deadline, then ended ones, newest first."
    )
    counts: dict[Label, Count] = Field(description="Batches by status.")
    open_requests: Count = Field(description="Of running batches, that have not ended.")
    late_batches: Count
    engines: Count
    absent_engines: Count = Field(description="That cannot be reached, or have no room.")
