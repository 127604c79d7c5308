"""Options of a vLLM that lends: what `"lend"` may say.

As everywhere, a wrong or unknown one refuses the engine's start. Where the coordinator is and how
large slabs are is aqualib's affair: `AQUA_*`.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from aqualib.producer.informer import Profile
from aqualib.settings import Size

SPARE_SHARE: Final = 0.5
"""Share of the KV cache that is lent unless the options say how much: by caution, since this engine
has no profile. Doubled, an idle engine lends all but its reserve and has more to take back."""

RESERVE_SHARE: Final = 0.1
"""Share of the KV cache that stays free unless the options say how much: the next requests start
while memory comes back. Doubled, fewer of them wait for a reclaim, and less is lent."""


class LendingOptions(BaseModel):
    """Whether and how much an engine lends; immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: Size | None = Field(
        default=None,
        ge=1,
        description="What is lent while the load is low; half of the KV cache if unset.",
    )
    reserve_bytes: Size | None = Field(
        default=None,
        ge=0,
        description="What stays free in the KV cache after an offer; when less than half of it is "
        "left, memory is taken back. A tenth of the KV cache if unset.",
    )
    calm_s: float = Field(
        default=5.0, ge=0, le=3600, description="How long the load must be low before an offer."
    )
    queue_margin: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="More requests than this left waiting by a step: all memory is taken back.",
    )
    steady_requests_per_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Highest rate within the objective, as aqua-profile finds it; a rate a fifth "
        "above it takes all memory back.",
    )
    metrics_port: int | None = Field(
        default=None, ge=1, le=65535, description="Serve the lender's metrics here, by HTTP."
    )

    def profile(self, *, cache_bytes: int, most_bytes: int, slab_bytes: int) -> Profile:
        """The profile that the informer goes by; `most_bytes` of the cache can be given up."""
        reserve_bytes = self.reserve_of(cache_bytes)
        spare_bytes = int(SPARE_SHARE * cache_bytes) if self.bytes is None else self.bytes
        return Profile(
            slab_bytes,
            # The informer keeps the reserve out of what it offers.
            spare_bytes=min(spare_bytes, most_bytes) + reserve_bytes,
            steady_requests_per_s=self.steady_requests_per_s,
            queue_margin=self.queue_margin,
            reserve_bytes=reserve_bytes,
            least_offer_bytes=slab_bytes,
            calm_s=self.calm_s,
        )

    def reserve_of(self, cache_bytes: int) -> int:
        """Bytes that stay free in a cache of this size."""
        if self.reserve_bytes is None:
            return int(RESERVE_SHARE * cache_bytes)
        return self.reserve_bytes
