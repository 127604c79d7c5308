"""The GPU models that planners and simulators know by name, each number with its source.

A GPU model is its data sheet: peak dense FP16/BF16 rate, HBM size and bandwidth, link rates. What
a kernel reaches of them is the business of a fit, not of this table. The GPUs that a machine really
has are another matter: `aqualib.topology` discovers those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from aqua_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A kind of GPU, or a tensor-parallel group of that kind seen as one.

    Attributes:
        flops_per_s: Dense FP16/BF16 tensor-core peak.
        hbm_bytes: Memory size, decimal as on the data sheet.
        hbm_bytes_per_s: Memory bandwidth.
        nvlink_bytes_per_s: To all peers together, one direction.
        pcie_bytes_per_s: To the host, one direction.
    """

    name: str
    flops_per_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float

    def group(self, count: int) -> GpuModel:
        """`count` of these GPUs that share every layer, seen as one."""
        return replace(
            self,
            name=f"{count}x{self.name}",
            flops_per_s=self.flops_per_s * count,
            hbm_bytes=self.hbm_bytes * count,
            hbm_bytes_per_s=self.hbm_bytes_per_s * count,
        )


GPUS: Final[dict[str, GpuModel]] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA's data sheets of the A100 SXM4, H100 SXM5 and H200 SXM, and its Ada whitepaper.
        GpuModel("A100-40GB", 312e12, 40 * 10**9, 1.555e12, 300e9, 32e9),
        # BlendServe's Figure 5 (densities 3.73 and 0.094) comes out with 2.0 TB/s, not 2.039.
        GpuModel("A100-80GB", 312e12, 80 * 10**9, 2.0e12, 300e9, 32e9),
        GpuModel("H100-80GB", 989e12, 80 * 10**9, 3.35e12, 450e9, 64e9),
        GpuModel("H200", 989e12, 141 * 10**9, 4.8e12, 450e9, 64e9),
        GpuModel("RTX4090", 165e12, 24 * 10**9, 1.008e12, 0.0, 32e9),
        # A server core or two, by order of magnitude: for trying things out.
        GpuModel("CPU", 5e10, 4 * 10**9, 1e10, 0.0, 1e10),
    )
}


def gpu_named(name: str) -> GpuModel:
    """The GPU model of that name.

    Raises:
        ConfigError: The catalogue has no such name.
    """
    if name not in GPUS:
        raise ConfigError(f"no GPU named {name!r}", remedy=f"Known: {', '.join(GPUS)}.")
    return GPUS[name]
