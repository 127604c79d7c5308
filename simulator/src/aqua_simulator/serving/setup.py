"""Makes an engine from names (model, GPU, width): iteration time, memory and page store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from aqua_protocol.decoders import DecoderModel, decoder_named
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GpuModel, gpu_named
from aqua_schedulers.cfs import FairSettings, PagingTier, PolicyName, policy_named
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.timing.evaluation import PROFILED_MODELS
from aqua_simulator.timing.fit import Fit
from aqua_simulator.timing.iteration import (
    IterationTime,
    from_data_sheet,
    from_kernels,
    from_operators,
    from_shapes,
)

PROFILED_GPUS: Final = {
    "A100-40GB": "a100",
    "A100-80GB": "a100",
    "H100-80GB": "h100",
    "H200": "h200",
    "RTX4090": "RTX4090",
}
"""Names in profile files."""

WORKSPACE_BYTES: Final = 2 * 10**9
"""Bytes of activations and CUDA graphs beside weights and KV cache, per GPU; vLLM reports 1 to 3
GB. Doubled, the cache is 2 GB smaller on each GPU."""

BLOCK_TOKENS: Final = 16
"""Tokens of a KV block, vLLM's default. Doubled, memory is reckoned in coarser pieces."""


def iteration_time(fit: Fit, model: DecoderModel, gpu: GpuModel, width: int) -> IterationTime:
    """The best iteration time that the fit can give: own kernels, own operators, or shapes.

    Raises:
        ConfigError: The fit knows nothing of the GPU.
    """
    device = PROFILED_GPUS.get(gpu.name)
    if device is None:
        raise ConfigError(
            f"no profiles of {gpu.name}", remedy=f"Known: {', '.join(PROFILED_GPUS)}."
        )
    for key, known in PROFILED_MODELS.items():
        # The same shape under another name has the same kernels: Llama 3 and 3.1.
        if replace(known, name=model.name) != model:
            continue
        if f"{device}/{key}/tp1/mixed_attention" in fit and width == 1:
            return from_kernels(fit, device, key, model)
        if f"{device}/{key}/tp{width}/mlp_up_proj" in fit:
            return from_operators(fit, device, key, model, width=width)
    return from_shapes(fit, device, model, width=width)


def check_width(model: DecoderModel, width: int) -> None:
    """Refuse a width by which an engine could not share the heads of a model out.

    Raises:
        ConfigError: The heads do not divide by it.
    """
    if model.head_count % width:
        raise ConfigError(
            f"the {model.head_count} heads of {model.name} do not divide by tp {width}",
            remedy="Choose a tp that divides them.",
        )


def kv_block_count(
    model: DecoderModel,
    hbm_bytes: float,
    memory_share: float,
    *,
    width: int = 1,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """KV blocks in what weights and workspace leave of some GPUs; not positive where none fit.

    Args:
        hbm_bytes: Memory of each GPU.
        memory_share: Of it, what the engine may use.
        width: GPUs of the engine.
    """
    room = width * (hbm_bytes * memory_share - WORKSPACE_BYTES) - model.weight_bytes
    return int(room // (block_tokens * model.kv_bytes_per_token))


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine by names.

    Attributes:
        memory_share: Share of HBM that the engine may use, as vLLM's `gpu_memory_utilization`.
        page_to: `none`, `dram` or `peer`: where preempted contexts go, at the GPU's link rate.
        page_bytes: Size of that store.
        copies_overlap: Copies hide behind computation; False puts them on top.
    """

    model: str
    gpu: str
    width: int = 1
    memory_share: float = 0.9
    overhead_s: float = 0.0
    page_to: str = "none"
    page_bytes: int = 0
    copies_overlap: bool = True
    policy: PolicyName = PolicyName.FCFS
    fair: FairSettings = field(default_factory=FairSettings)
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256

    def engine(self, fit: Fit | None, *, name: str) -> Engine:
        """Build it; without a fit its times are those of the data sheet.

        Raises:
            ConfigError: Unknown names, a width that does not divide the model's heads, or weights
                that leave no room for a KV cache.
        """
        model, gpu = decoder_named(self.model), gpu_named(self.gpu)
        check_width(model, self.width)
        settings = EngineSettings(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            kv_bytes_per_token=model.kv_bytes_per_token,
        )
        blocks = kv_block_count(model, gpu.hbm_bytes, self.memory_share, width=self.width)
        if blocks < 1:
            raise ConfigError(
                f"{model.name} leaves no room for a KV cache on {self.width} x {gpu.name}",
                remedy="Use more GPUs (--tp), larger ones, or a smaller model.",
            )
        rates = {"none": 0.0, "dram": gpu.pcie_bytes_per_s, "peer": gpu.nvlink_bytes_per_s}
        if self.page_to not in rates:
            raise ConfigError(f"cannot page to {self.page_to!r}", remedy="none, dram or peer.")
        store = None
        if self.page_to != "none":
            store = PageStore(
                self.page_to,
                self.page_bytes // model.kv_bytes_per_token,
                rates[self.page_to] * self.width,
                is_overlapped=self.copies_overlap,
                location=PagingTier.HOST if self.page_to == "dram" else PagingTier.PEER,
            )
        if fit is None:
            time_of = from_data_sheet(gpu, model, width=self.width)
        else:
            time_of = iteration_time(fit, model, gpu, self.width)
        return Engine(
            name,
            settings,
            replace(time_of, overhead_s=self.overhead_s),
            PagedMemory(blocks),
            store,
            policy_named(self.policy, self.fair),
        )
