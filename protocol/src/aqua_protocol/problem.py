"""The placement problem as files and requests say it: servers by class, and models.

Two forms, both versioned. The *model* form names things the way operators do (replicas, pipeline
stages, pins, profiles); the *column* form lists the groups of a large cluster as columns. In both,
a server is one scale-up domain: the GPUs that reach each other over NVLink. A rack of 72 joined
GPUs is one server of 72. Sizes are GB (10^9 bytes) per shard, as data sheets and the paper give
them.

Checked here: types, bounds and what can be seen in one object. What takes the whole problem
(duplicate names, groups larger than any server, more shards than GPUs) is checked by the placer,
which can name the remedy.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aqua_protocol.profile import ModelProfile
from aqua_protocol.wire import Wire

# Fixed: the form of the file; it grows when a reader of the old form would misread a new one.
PROBLEM_VERSION: Final = 1
# Bounds of a problem file, far above any cluster, so that a slip of the pen is refused by name
# instead of filling memory. Doubled, they refuse fewer slips.
MAX_SERVERS: Final = 1_000_000
MAX_GPUS_PER_SERVER: Final = 1_024
MAX_SHARDS: Final = 1_024
MAX_REPLICAS: Final = 100_000
MAX_SIZE_GB: Final = 1_000_000.0
# GB of a card: a megabyte. What is less is a slip of the unit, also when doubled.
MIN_HBM_GB: Final = 1e-3

Label = Annotated[str, Field(min_length=1, max_length=256)]
SizeGb = Annotated[float, Field(ge=-MAX_SIZE_GB, le=MAX_SIZE_GB)]
Weight = Annotated[float, Field(gt=0, le=1e6)]


class ServerClass(Wire):
    """Servers that are alike; each is one scale-up domain."""

    name: Label | None = Field(default=None, description="Default: `server`, then `server-2` ...")
    count: Annotated[int, Field(ge=1, le=MAX_SERVERS)]
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_SERVER)]
    hbm_gb: Annotated[float, Field(ge=MIN_HBM_GB, le=MAX_SIZE_GB)]
    domain: Annotated[str, Field(max_length=64)] = Field(
        default="nvlink", description="What joins the GPUs; for people."
    )
    links: list[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]] | None = Field(
        default=None, description="GB/s between GPU i and j; absent where all are equal."
    )

    @model_validator(mode="after")
    def _links_are_square(self) -> Self:
        if self.links is not None and (
            len(self.links) != self.gpus or any(len(row) != self.gpus for row in self.links)
        ):
            raise ValueError(f"links must be a {self.gpus} x {self.gpus} matrix, one row per GPU")
        return self


class Model(Wire):
    """A deployment: replicas of stages of shards.

    Every stage of every replica is a *group* of `tp` shards that share a server. Memory per shard
    is given by one of `memory_gb`, `spare_gb`, `need_gb` or `profile`.
    """

    name: Label
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    tp: Annotated[int, Field(ge=1, le=MAX_SHARDS)] | None = Field(
        default=None, description="Tensor-parallel shards; default: the profile's, or 1."
    )
    stages: Annotated[int, Field(ge=1, le=1024)] = Field(default=1, description="Pipeline stages.")
    stages_apart: bool = Field(default=False, description="No two stages on one server.")
    memory_gb: SizeGb | None = Field(default=None, description="Signed: spare > 0, need < 0.")
    spare_gb: Annotated[float, Field(ge=0, le=MAX_SIZE_GB)] | None = None
    need_gb: Annotated[float, Field(ge=0, le=MAX_SIZE_GB)] | None = None
    profile: ModelProfile | None = None
    profiled_hbm_gb: Annotated[float, Field(gt=0, le=MAX_SIZE_GB)] | None = Field(
        default=None,
        description="HBM it was measured on; on other cards the size shifts by the difference.",
    )
    weight: Weight = 1.0
    pin: list[Label] = Field(default_factory=list, description="Server or class names allowed.")
    anti_affinity: Label | None = Field(
        default=None, description="Groups that share it keep apart."
    )
    current: list[Label | None] | None = Field(
        default=None, description="Server of each group today, replica by replica, stage by stage."
    )

    @model_validator(mode="after")
    def _memory_is_given_once(self) -> Self:
        given = [self.memory_gb, self.spare_gb, self.need_gb, self.profile]
        if sum(value is not None for value in given) != 1:
            raise ValueError("give exactly one of memory_gb, spare_gb, need_gb and profile")
        if self.current is not None and len(self.current) != self.replicas * self.stages:
            raise ValueError(f"current must name {self.replicas * self.stages} servers (or null)")
        return self

    @property
    def shards(self) -> int:
        """Tensor-parallel shards of a group."""
        if self.tp is not None:
            return self.tp
        return 1 if self.profile is None else self.profile.tensor_parallel

    @property
    def signed_gb(self) -> float:
        """Spare (> 0) or need (< 0) per shard, in GB."""
        if self.memory_gb is not None:
            return self.memory_gb
        if self.spare_gb is not None:
            return self.spare_gb
        if self.need_gb is not None:
            return -self.need_gb
        assert self.profile is not None, "validated: one of the four is given"
        return self.profile.signed_bytes / 1e9

    @property
    def measured_hbm_gb(self) -> float | None:
        """HBM that the size refers to, if it shifts with the card."""
        if self.profiled_hbm_gb is not None or self.profile is None:
            return self.profiled_hbm_gb
        return None if self.profile.hbm_bytes is None else self.profile.hbm_bytes / 1e9


class PlacementProblem(Wire):
    """The model form."""

    version: Literal[1] = PROBLEM_VERSION
    name: Annotated[str, Field(max_length=256)] = ""
    servers: list[ServerClass] = Field(min_length=1, max_length=4096)
    models: list[Model] = Field(max_length=MAX_SERVERS)


class GroupColumns(BaseModel):
    """Groups as columns of equal length. NaN is let through here, to be refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: list[Any]
    tp: list[int]
    r_gb: list[float] = Field(description="Per shard, positive for spare.")
    weight: list[float] | None = None
    current: list[int | str | None] | None = Field(
        default=None, description="Server today, by number or name; null for none."
    )


class ColumnProblem(BaseModel):
    """The column form."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = PROBLEM_VERSION
    name: str = ""
    servers: list[ServerClass] = Field(min_length=1, max_length=4096)
    groups: GroupColumns
