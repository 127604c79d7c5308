"""A co-serving engine in numbers: memory, link, safepoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoServingEngineSpec:
    """An engine in numbers.

    Attributes:
        max_tokens: Token budget of a step.
        store_blocks: Size of the checkpoint store.
        link_bytes_per_s: Background copies, each way.
        swap_bytes_per_s: Copies that all wait for.
        hbm_bytes_per_s: Memory bandwidth of the GPU.
        safepoint_layers: Layers between two safepoints.
        safepoint_s: What each costs.
        safepoint_lag: Safepoints that pass until an abort takes effect, beside the next one.
    """

    block_count: int
    kv_bytes_per_token: int
    layer_count: int
    link_bytes_per_s: float
    swap_bytes_per_s: float
    hbm_bytes_per_s: float
    store_blocks: int
    block_tokens: int = 16
    max_tokens: int = 2048
    max_running: int = 256
    safepoint_layers: int = 8
    safepoint_s: float = 0.0
    safepoint_lag: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.kv_bytes_per_token * self.block_tokens
