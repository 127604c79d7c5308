"""The cluster of a question: which models run on which GPUs, what joins them, what a GPU costs.

Read from a deployment list (YAML or JSON), in which a *model* is some engines of one kind behind a
router, and a *lender* is a GPU of another engine (images, audio) with memory to spare. Or from a
plan of `aqua place`, whose groups are engines and whose matches are who lends to whom.

A model or GPU that the catalogue does not know is left out and named; the others go on. What is
not said is the data sheet's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aqua_cli import parse_document
from aqua_protocol.decoders import DecoderModel, decoder_named
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GpuModel, gpu_named
from aqua_protocol.plan import Plan
from aqua_protocol.wire import first_fault
from aqua_simulator.serving.recordings import catalogued, decoder_called
from aqua_simulator.serving.setup import BLOCK_TOKENS, check_width, kv_block_count
from aqua_simulator.timing.contention import FAIR_SHARE, Interference

Positive = Annotated[float, Field(gt=0.0, lt=1e12)]
Count = Annotated[int, Field(ge=1, le=4096)]
Tokens = Annotated[int, Field(ge=1, le=10**12)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class LatencyTarget(_Document):
    """What users were promised: 99 of 100 requests are within both."""

    ttft_s: Positive | None = Field(default=None, description="To the first token.")
    tpot_s: Positive | None = Field(default=None, description="Between two tokens, a mean.")


class DeployedModel(_Document):
    """Engines of one kind behind a router."""

    name: str = Field(min_length=1, description="As the traces and metrics name it.")
    model: str = Field(description="Name in the catalogue, or a Hugging Face config.json.")
    gpu: str = Field(description="GPU name in the catalogue.")
    replicas: Count = 1
    tp: Count = Field(default=1, description="Tensor-parallel GPUs of each engine.")
    server: str = Field(default="", description="Scale-up domain; engines of one reach each other.")
    memory_share: float = Field(default=0.9, gt=0.0, le=1.0, description="For weights and KV.")
    kv_tokens: Tokens | None = Field(default=None, description="KV cache of an engine, if known.")
    metrics_name: str | None = Field(
        default=None, description="Label model_name of its metrics; default: the name."
    )
    max_num_batched_tokens: Tokens = 2048
    max_num_seqs: Tokens = 256
    copy_weight: Positive = Field(
        default=1.0, description="Guarantees its share of a producer that several borrow from."
    )
    slo: LatencyTarget = Field(
        default_factory=LatencyTarget, description="Default: what users get without Aqua."
    )


class SpareGpu(_Document):
    """GPUs of engines that are no language models and leave memory unused at any load."""

    name: str = Field(min_length=1)
    gpu: str
    count: Count = 1
    spare_gb: Positive = Field(description="GB that each leaves unused.")
    server: str = ""


class OfflineWork(_Document):
    """The work without a deadline that waits: there is always more of it."""

    lengths: Path | None = Field(default=None, description="CSV: prompt_tokens,output_tokens.")
    source: str = Field(default="LongBench summaries", description="Or lengths by name.")


class LinkRates(_Document):
    """Rates of one GPU's links, GB/s in one direction; default: the data sheet's."""

    peer_gb_per_s: Positive | None = None
    host_gb_per_s: Positive | None = None


class DeploymentList(_Document):
    """The file."""

    version: Literal[1] = 1
    models: list[DeployedModel] = Field(min_length=1, max_length=1024)
    lenders: list[SpareGpu] = Field(default_factory=list, max_length=1024)
    consumers_per_producer: Count = Field(
        default=1, description="Of one lending GPU or engine, at most; each of its GPUs counts."
    )
    links: LinkRates = Field(default_factory=LinkRates)
    host_gb: float = Field(
        default=64.0, ge=0.0, lt=1e9, description="Host memory of an engine for KV."
    )
    offline: OfflineWork = Field(default_factory=OfflineWork)
    gpu_hour: dict[str, Annotated[float, Field(ge=0.0, lt=1e12)]] = Field(
        default_factory=dict, description="Price of a GPU hour, by GPU."
    )


@dataclass(frozen=True, slots=True)
class InputFinding:
    """Something in the input that is not as it should be, and what was done about it."""

    kind: str
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine of a deployed model, in numbers."""

    deployed: DeployedModel
    model: DecoderModel
    gpu: GpuModel
    block_count: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of its KV cache."""
        return self.block_count * BLOCK_TOKENS * self.model.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated.

    Attributes:
        engines: The shape of each model's engines, by the model's name.
        pairs: Matches of a plan, consumer and producer by name; None matches by server.
        interference: What copies cost kernels, where they share links and memory; None: they do
            not, each copy has its link and no kernel is slower.
    """

    listed: DeploymentList
    engines: dict[str, EngineShape]
    pairs: tuple[tuple[str, str], ...] | None = None
    interference: Interference | None = FAIR_SHARE

    def gpu_count(self, name: str) -> int:
        """GPUs of a model."""
        return self.engines[name].deployed.replicas * self.engines[name].deployed.tp

    def without(self, names: Collection[str]) -> Cluster:
        """The cluster without some of its models."""
        engines = {name: shape for name, shape in self.engines.items() if name not in names}
        return replace(self, engines=engines)

    def price(self, name: str) -> float:
        """What an hour of that model's kind of GPU costs; 0 where no price is given."""
        return self.listed.gpu_hour.get(self.engines[name].deployed.gpu, 0.0)

    def unpriced(self) -> list[str]:
        """Kinds of GPU whose hour has no price."""
        kinds = sorted({shape.deployed.gpu for shape in self.engines.values()})
        return [gpu for gpu in kinds if gpu not in self.listed.gpu_hour]

    def has_prices(self) -> bool:
        """Whether an hour of any model's GPUs has one."""
        return any(each.deployed.gpu in self.listed.gpu_hour for each in self.engines.values())

    def link_bytes_per_s(self, name: str, *, is_peer: bool) -> float:
        """Rate of one GPU's link to its peers or to the host."""
        return self.gpu_bytes_per_s(self.engines[name].gpu, is_peer=is_peer)

    def gpu_bytes_per_s(self, gpu: GpuModel, *, is_peer: bool) -> float:
        """The same of any GPU."""
        links = self.listed.links
        if is_peer:
            return links.peer_gb_per_s * 1e9 if links.peer_gb_per_s else gpu.nvlink_bytes_per_s
        return links.host_gb_per_s * 1e9 if links.host_gb_per_s else gpu.pcie_bytes_per_s


def read_cluster(path: Path) -> tuple[Cluster, list[InputFinding]]:
    """A deployment list.

    Raises:
        ConfigError: No such file, not in its form, or none of its models is known.
    """
    try:
        text = path.read_text()
        content = parse_document(text, is_json=path.suffix == ".json")
        listed = DeploymentList.model_validate(content)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy=_FORM) from error
    except ValidationError as error:
        fault = first_fault(error, "the document")
        raise ConfigError(f"{path}: {fault}", remedy=_FORM) from error
    except ValueError as error:
        raise ConfigError(f"{path} is neither YAML nor JSON: {error}", remedy=_FORM) from error
    return cluster_of(listed, str(path))


_PLAN: Final = "Make one with `aqua place solve FILE --output PLAN`."
_FORM: Final = "docs/whatif.md has the form of a deployment list, and an example."


def cluster_of(
    listed: DeploymentList, where: str, pairs: tuple[tuple[str, str], ...] | None = None
) -> tuple[Cluster, list[InputFinding]]:
    """The cluster of a list, without what the catalogue does not know.

    Raises:
        ConfigError: Two of one name, no model is known, or a GPU leaves more unused than it has.
    """
    names = Counter([one.name for one in listed.models] + [one.name for one in listed.lenders])
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"{where}: {', '.join(twice)} is there twice", remedy="Name each once.")
    engines, findings = {}, []
    for deployed in listed.models:
        try:
            engines[deployed.name] = _shape(deployed)
        except ConfigError as error:
            message = f"left out: {error.message}. {error.remedy or ''}".strip()
            findings.append(InputFinding("unknown model", f"{where}: {deployed.name}", message))
    if not engines:
        raise ConfigError(f"{where}: {findings[0].message}", remedy=_FORM)
    lenders = []
    for lender in listed.lenders:
        try:
            gpu = gpu_called(lender.gpu)
        except ConfigError as error:
            message = f"left out: {error.message}. {error.remedy or ''}".strip()
            findings.append(InputFinding("unknown GPU", f"{where}: {lender.name}", message))
            continue
        if lender.spare_gb * 1e9 > gpu.hbm_bytes:
            raise ConfigError(
                f"{where}: {lender.name} has spare_gb {lender.spare_gb:g}, a {gpu.name} has "
                f"{gpu.hbm_bytes / 1e9:g} in all",
                remedy="Give what each GPU leaves unused.",
            )
        lenders.append(lender)
    listed = listed.model_copy(update={"lenders": lenders})
    return Cluster(listed, engines, pairs), findings


def gpu_called(name: str) -> GpuModel:
    """A GPU by a name of the catalogue, or one like it.

    Raises:
        ConfigError: No such GPU.
    """
    return catalogued(name) or gpu_named(name)


def _shape(deployed: DeployedModel) -> EngineShape:
    model = decoder_called(deployed.model) or decoder_named(deployed.model)
    gpu = gpu_called(deployed.gpu)
    check_width(model, deployed.tp)
    if deployed.kv_tokens is not None:
        blocks = deployed.kv_tokens // BLOCK_TOKENS
    else:
        blocks = kv_block_count(model, gpu.hbm_bytes, deployed.memory_share, width=deployed.tp)
    if blocks < 1:
        raise ConfigError(
            f"{model.name} leaves no room for a KV cache on {deployed.tp} x {gpu.name}",
            remedy="Check tp, gpu and kv_tokens.",
        )
    return EngineShape(deployed, model, gpu, blocks)


def read_plan(
    path: Path, *, gpu: str | None, cluster: Cluster | None = None
) -> tuple[Cluster, list[InputFinding]]:
    """A plan of `aqua place`: who lends to whom, and without a cluster also what runs where.

    Args:
        gpu: What the plan's GPUs are; needed without a cluster, since a plan does not say.
        cluster: What runs, from a deployment list.

    Returns:
        The cluster that follows the plan, and what the plan has wrong.

    Raises:
        ConfigError: Not such a plan, or there is neither a cluster nor a GPU.
    """
    try:
        plan = Plan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy=_PLAN) from error
    except ValidationError as error:
        fault = first_fault(error, "the document")
        raise ConfigError(f"{path} is no plan: {fault}", remedy=_PLAN) from error
    pairs = tuple((_stem(match.consumer), _stem(match.producer)) for match in plan.matches)
    if cluster is not None:
        names = {*cluster.engines, *(each.name for each in cluster.listed.lenders)}
        unknown = sorted({name for pair in pairs for name in pair} - names)
        message = "nothing of that name is in the cluster: its matches are left out"
        findings = [InputFinding("unknown name", f"{path}: {name}", message) for name in unknown]
        return replace(cluster, pairs=pairs), findings
    if gpu is None:
        raise ConfigError(f"{path} does not say which GPUs it is for", remedy="Give --gpu.")
    groups: dict[tuple[str, str], list[int]] = {}
    for each in plan.assignments:
        groups.setdefault((_stem(each.group), each.server), []).append(len(each.gpus))
    by_name: dict[str, list[DeployedModel]] = {}
    for (name, server), widths in groups.items():
        by_name.setdefault(name, []).append(
            DeployedModel(
                name=name, model=name, gpu=gpu, replicas=len(widths), tp=widths[0], server=server
            )
        )
    models = [
        each[0].model_copy(update={"replicas": sum(one.replicas for one in each)})
        for each in by_name.values()
    ]
    if not models:
        raise ConfigError(f"{path} places nothing", remedy="Give a plan with assignments.")
    return cluster_of(DeploymentList(models=models), str(path), pairs)


def _stem(group: str) -> str:
    """The model's name in a group's: replicas are numbered behind a slash, a dash or a dot."""
    return re.sub(r"[/#.](\d+)$", "", group)
