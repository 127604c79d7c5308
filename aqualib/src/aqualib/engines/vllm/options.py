"""Options of the vLLM adapter: what `kv_connector_extra_config` may say.

Every field has a default that works; a wrong or unknown one refuses the engine's start with the
field's name, because a misspelt option that is ignored looks like a slow system. Settings that are
not about vLLM (coordinator, token, transport, checksums) are those of aqualib, `AQUA_*`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from aqua_protocol import ConfigError
from aqua_protocol.profile import ModelProfile, ProfileKind
from aqua_protocol.units import MAX_BYTES
from aqua_schedulers.cfs import FairSettings, PolicyName
from aqua_schedulers.conserve import CoServingPolicyName
from aqualib.engines.vllm.plugin import CONNECTOR
from aqualib.engines.vllm.requests.priority import UrgentPriority
from aqualib.engines.vllm.requests.tenant_key import TenantSource
from aqualib.producer.profile import Profile
from aqualib.settings import Size, load_settings

ADDITIONAL_CONFIG_KEY: Final = "aqua"
"""Where the scheduler finds its options when no connector is configured (`--additional-config`)."""

SEVERAL: Final = "MultiConnector"
"""vLLM's connector that has several others do the work."""

MAX_NAME: Final = 256
"""Characters of a profile's name at most; fixed by its schema."""

MAX_PORT: Final = 65535
"""Fixed by TCP."""

SPARE_SHARE: Final = 0.5
"""Share of the KV cache that is lent unless the options say how much: by caution, since this engine
has no profile. Doubled, an idle engine lends all but its reserve and has more to take back."""

RESERVE_SHARE: Final = 0.1
"""Share of the KV cache that stays free unless the options say how much: the next requests start
while memory comes back. Doubled, fewer of them wait for a reclaim, and less is lent."""


GRANULARITY_TOKENS: Final = 16
"""Lead at which a decode gives way to one that waits, in tokens, by measurement: what fair shares
cost a step of 256 requests. Doubled, half as much is paged, and turns are longer."""

HeaderName = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True, to_lower=True)]
"""Of HTTP, in any case; a server has them in lower case."""


class PagingMode(StrEnum):
    """What happens to the KV of a preempted request."""

    SWAP = "swap"
    """It is paged out when the request is preempted."""
    CHECKPOINT = "checkpoint"
    """Full blocks are paged out as they fill up; a preemption pages the last, partial one."""
    RECOMPUTE = "recompute"
    """It is dropped: no store is opened."""


class LoadMode(StrEnum):
    """How a resumed request gets its KV back."""

    SYNC = "sync"
    """Within the step that resumes it."""
    ASYNC = "async"
    """Beside the steps of others; it holds its blocks meanwhile."""


class LendingOptions(BaseModel):
    """Whether and how much an engine lends; immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: Size | None = Field(
        default=None,
        ge=1,
        le=MAX_BYTES,
        description="What each rank lends while the load is low; if unset, what the model's "
        "profile in the coordinator's books spares, or half of the KV cache where there is none.",
    )
    reserve_bytes: Size | None = Field(
        default=None,
        ge=0,
        le=MAX_BYTES,
        description="What stays free in the KV cache after an offer; when less than half of it is "
        "left, memory is taken back. A tenth of the KV cache if unset.",
    )
    calm_s: float = Field(
        default=5.0, ge=0, le=3600, description="How long the load must be low before an offer."
    )
    queue_margin: int | None = Field(
        default=None,
        ge=0,
        le=1 << 20,
        description="More requests than this left waiting by a step: all memory is taken back. If "
        "unset, as many as chance leaves at the profile's rate, or 0 without a profile.",
    )
    steady_requests_per_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Highest rate within the objective; if unset, that of the model's profile. "
        "When more requests arrive than chance explains, all memory is taken back.",
    )
    profile: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = Field(
        default=None,
        description="Name of the model's profile; if unset, the names that the model is served by, "
        "and its own.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PORT,
        description="Serve the lender's metrics here, by HTTP; data-parallel engines count up.",
    )

    def informed(
        self,
        measured: ModelProfile | None,
        *,
        cache_bytes: int,
        most_bytes: int,
        slab_bytes: int,
    ) -> Profile:
        """The profile that the informer goes by: what is set here, then what was measured.

        Args:
            measured: What the books have of the model, if anything. One that is no producer's lends
                only what is set here.
            cache_bytes: Size of the KV cache.
            most_bytes: What of it can be given up.
            slab_bytes: Unit of the offer.
        """
        reserve_bytes = self.reserve_of(cache_bytes)
        spare_bytes = int(SPARE_SHARE * cache_bytes) if self.bytes is None else self.bytes
        if measured is not None and self.bytes is None:
            spare_bytes = max(0, measured.signed_bytes)
        profile = Profile(
            slab_bytes,
            # The informer keeps the reserve out of what it offers.
            spare_bytes=min(spare_bytes, most_bytes) + reserve_bytes,
            steady_requests_per_s=self.steady_requests_per_s,
            queue_margin=self.queue_margin or 0,
            reserve_bytes=reserve_bytes,
            least_offer_bytes=slab_bytes,
            calm_s=self.calm_s,
        )
        if measured is None or measured.kind is ProfileKind.BATCH:
            return profile
        steady = profile.steady_as(measured)
        if self.queue_margin is not None:
            steady = replace(steady, steady_queue_length=0, queue_margin=self.queue_margin)
        if self.steady_requests_per_s is not None:
            steady = replace(steady, steady_requests_per_s=self.steady_requests_per_s)
        return steady

    def metrics_port_of(self, data_parallel_index: int) -> int | None:
        """The port of one of several data-parallel engines, which count up from the first's.

        Raises:
            ConfigError: There is no such port.
        """
        if self.metrics_port is None:
            return None
        port = self.metrics_port + data_parallel_index
        if port > MAX_PORT:
            raise ConfigError(
                f"lend.metrics_port {self.metrics_port} leaves no port for the data-parallel "
                f"engine {data_parallel_index}",
                remedy=f"Choose one of {MAX_PORT - data_parallel_index} at most.",
            )
        return port

    def reserve_of(self, cache_bytes: int) -> int:
        """Bytes that stay free in a cache of this size."""
        if self.reserve_bytes is None:
            return int(RESERVE_SHARE * cache_bytes)
        return self.reserve_bytes


class CoServingOptions(BaseModel):
    """Offline requests beside online ones, and what these are promised; immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: CoServingPolicyName = Field(
        default=CoServingPolicyName.GUARDED,
        description="`guarded`: online requests as if alone; `conserve`: steps are filled up to "
        "the objectives; `priority`: no limits.",
    )
    ttft_s: float = Field(gt=0.0, le=3600.0, description="Objective for the first token.")
    tpot_s: float = Field(gt=0.0, le=60.0, description="Objective between two tokens.")
    step_profile: Path | None = Field(
        default=None,
        description="A step-time profile, or a folder of them; ~/.cache/aqua/step-profiles if "
        "unset. Without one of this model, engine and GPU offline work keeps to a small fixed "
        "budget.",
    )
    starvation_s: float = Field(
        default=300.0,
        ge=0.0,
        le=1e9,
        description="Offline requests without a token for so long take some from online prompts.",
    )
    layer_aborts: bool | None = Field(
        default=None,
        description="Abort a step of offline work between layers when an online request arrives; "
        "if unset, where the engine can. True refuses the start of one that cannot.",
    )
    safepoint_layers: int | None = Field(
        default=None,
        ge=1,
        le=1 << 10,
        description="Layers from one safepoint to the next; if unset, as many as take 5 ms.",
    )


class AquaOptions(FairSettings):
    """The adapter's options; immutable. Read them with `read_options`."""

    @property
    def is_paging(self) -> bool:
        """Whether anything is paged at all."""
        return self.mode is not PagingMode.RECOMPUTE

    policy: PolicyName = Field(
        default=PolicyName.FIRST_TOKEN, description="Who computes when memory is short."
    )
    granularity_tokens: int = Field(
        default=GRANULARITY_TOKENS,
        ge=0,
        le=1 << 20,
        description="For cfs: a decode keeps its memory until it is so many tokens ahead of one "
        "that waits.",
    )
    mode: PagingMode = Field(
        default=PagingMode.SWAP, description="When KV of preempted requests is paged out."
    )
    load: LoadMode | None = Field(
        default=None,
        description="How it comes back; if unset, within the step where a load that fails is exact "
        "so, and beside the steps elsewhere.",
    )
    max_loading_blocks: int = Field(
        default=1024,
        ge=1,
        description="Blocks of the KV cache that asynchronous loads may hold at once.",
    )
    store_bytes: Size | None = Field(
        default=None,
        ge=1,
        le=MAX_BYTES,
        description="Room for paged blocks, per worker; as much as the KV cache itself if unset, "
        "but no more than the worker's part of a quarter of the host memory there is.",
    )
    prefix_tier: bool | None = Field(
        default=None,
        description="Keep blocks of finished requests for others with the same prefix; as "
        "enable_prefix_caching says if unset.",
    )
    pinned_share: float = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="Share of the prefix tier that pinned prefixes may take together.",
    )
    is_offline: bool = Field(
        default=False, description="Ask no coordinator: everything paged lives in host memory."
    )
    urgent: UrgentPriority = Field(
        default=UrgentPriority.LOWER,
        description="Which numbers of `priority` are urgent: lower, as vLLM has it, or higher, as "
        "llm-d has it.",
    )
    priority_unit: int = Field(
        default=1, ge=1, le=1 << 20, description="Difference in `priority` that doubles a share."
    )
    tenant_sources: tuple[TenantSource, ...] = Field(
        default=(TenantSource.HEADER, TenantSource.XARGS, TenantSource.LORA),
        description="Where a request says whose it is; the first that does counts.",
    )
    tenant_headers: tuple[HeaderName, ...] = Field(
        default=(
            "x-aqua-tenant",
            "x-llm-d-inference-fairness-id",
            "x-gateway-inference-fairness-id",
        ),
        description="Headers that name a tenant; the first that is there counts.",
    )
    require_coordinator: bool = Field(
        default=False, description="Refuse the start unless a coordinator is ready."
    )
    co_serving: CoServingOptions | None = Field(
        default=None, description="Serve offline requests beside online ones."
    )
    lend: LendingOptions | None = Field(
        default=None, description="Lend what the KV cache does not need; see `LendingOptions`."
    )


def options_of(vllm_config: Any) -> AquaOptions:
    """Our connector's options, or, without our connector, those of `--additional-config`.

    Raises:
        ConfigError: One is wrong, or they contradict each other.
    """
    transfer = vllm_config.kv_transfer_config
    ours = None if transfer is None else _options_of_connector(transfer)
    if ours is not None:
        options = read_options(ours)
        if options.lend is not None and transfer.kv_connector != CONNECTOR:
            raise _others_read(transfer.kv_connector)
        return options
    additional = vllm_config.additional_config
    given = additional.get(ADDITIONAL_CONFIG_KEY, {}) if isinstance(additional, dict) else {}
    options = read_options(given)
    if options.lend is not None and transfer is not None:
        raise _others_read(transfer.kv_connector)
    return options


def is_borrowing(vllm_config: Any) -> bool:
    """Whether what this engine's connector pages out may lie in memory of others.

    Raises:
        ConfigError: As `options_of`.
    """
    options = options_of(vllm_config)
    return vllm_config.kv_transfer_config is not None and (
        options.is_paging and not options.is_offline
    )


def _options_of_connector(transfer: Any) -> dict[str, Any] | None:
    """What `--kv-transfer-config` gives our connector, by itself or among several.

    Raises:
        ConfigError: It is there twice.
    """
    if transfer.kv_connector == CONNECTOR:
        return dict(transfer.kv_connector_extra_config)
    if transfer.kv_connector != SEVERAL:
        return None
    children = transfer.kv_connector_extra_config.get("connectors") or []
    ours = [child for child in children if child.get("kv_connector") == CONNECTOR]
    if len(ours) > 1:
        raise ConfigError(
            f"{SEVERAL} names {CONNECTOR} {len(ours)} times",
            remedy=f"Leave one {CONNECTOR} among its connectors.",
        )
    return dict(ours[0].get("kv_connector_extra_config") or {}) if ours else None


def _others_read(connector: str) -> ConfigError:
    return ConfigError(
        f"{connector} reads the KV cache whenever it likes, so none of it is lent",
        remedy=f'Use {CONNECTOR}, or no connector, or drop "lend".',
    )


def read_options(given: dict[str, Any]) -> AquaOptions:
    """Check the options of the engine's command line.

    Raises:
        ConfigError: Names every option that is wrong and what is wrong with it.
    """
    try:
        return AquaOptions.model_validate(given)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError(
            "; ".join(faults),
            remedy=f"kv_connector_extra_config takes: {', '.join(AquaOptions.model_fields)}.",
        ) from error


def profile_names(vllm_config: Any) -> list[str]:
    """Names that the model may have been profiled by: as it is served, as it is called, and short.

    A profiler asks for a model by the name that it is served by.
    """
    model = vllm_config.model_config
    served = model.served_model_name or []
    names = [served] if isinstance(served, str) else [*served]
    short = model_name(vllm_config)
    return [name for name in (*names, str(model.model), short) if name and len(name) <= MAX_NAME]


def model_name(vllm_config: Any) -> str | None:
    """The model's folder or id, as the books take names."""
    last = str(vllm_config.model_config.model).rstrip("/").rpartition("/")[2]
    letters = re.sub(r"[^A-Za-z0-9._:-]+", "-", last)
    return letters.strip("-._:") or None


def rank_member(parallel: Any, rank: int) -> str | None:
    """The name in the books of one rank, as plans name shards; None unless `AQUA_MEMBER` names it.

    Data-parallel engines after the first are `.dp1` and so on: the variable is the same for all.
    A pipeline's stages are `.stage0` and so on, unless each has the variable to itself.
    """
    member = load_settings().member
    if member is None:
        return None
    index = parallel.data_parallel_index
    engine = f"{member}.dp{index}" if index else member
    stage_count = parallel.pipeline_parallel_size
    shard_count = parallel.world_size // stage_count
    if stage_count > 1 and ".stage" not in member:
        engine += f".stage{rank // shard_count}"
    return f"{engine}.{rank % shard_count}" if shard_count > 1 else engine
