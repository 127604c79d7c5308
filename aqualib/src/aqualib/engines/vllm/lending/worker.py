"""LendingWorker: a worker whose KV cache lies in memory that can leave and come back.

vLLM makes its KV cache with one call of `torch.zeros` for each tensor, in the midst of much else,
and offers no hook there that all supported versions have. A torch function mode, which is active
only while the cache is made, answers just these calls: by size and type, as the cache's own
configuration lists them. Whatever else torch does meanwhile goes its way.

What comes out is looked at, not believed: a cache that lies anywhere else refuses the start.

Without `"lend"` among the options it is `AquaWorker`. The scheduler of the same process finds the
memory by the engine's name, in `LENDABLE`; that of another process tells the rank's service what to
do (`rank_service`), which goes by the steps that are counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from aqua_protocol import ConfigError
from aqualib.connection import default
from aqualib.engines.vllm.lending.engine_ranks import rank_endpoint
from aqualib.engines.vllm.lending.memory import HostKvMemory, LendableCache, lendable_cache
from aqualib.engines.vllm.lending.rank_messages import PACE
from aqualib.engines.vllm.lending.rank_service import RankService
from aqualib.engines.vllm.lending.step_count import StepCount
from aqualib.engines.vllm.options import is_borrowing, options_of
from aqualib.engines.vllm.worker import AquaWorker
from aqualib.settings import load_settings
from aqualib.transports.host_pages import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aqualib.engines.vllm.lending.memory import KvMemory
    from aqualib.producer.lender import Borrower
    from aqualib.settings import Settings

MAX_HOST_GRANULES: Final = 1 << 18
"""Granules of a CPU's KV cache at most: a shrink looks at each of them, in milliseconds. Doubled,
large caches are given up in finer pieces and each shrink takes twice as long."""


@dataclass(frozen=True, slots=True)
class LendableWorker:
    """A worker's KV cache, what serves it to a scheduler elsewhere, and what borrows, if any."""

    cache: LendableCache
    service: RankService
    borrower: Borrower | None = None


LENDABLE: Final[dict[str, LendableWorker]] = {}
"""Workers of this process by the engine's instance id, until its scheduler has come for them."""


class LendingWorker(AquaWorker):
    """`AquaWorker`, lending; vLLM makes it from `--worker-cls`."""

    _steps: StepCount | None = None
    _service: RankService | None = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the KV cache, in memory of ours if this engine lends.

        Raises:
            ConfigError: The cache cannot be lent from.
        """
        if options_of(self.vllm_config).lend is None:
            super().initialize_from_config(kv_cache_config)
            return
        if self.vllm_config.model_config.enable_sleep_mode:
            raise ConfigError(
                "sleep mode frees a KV cache that it made itself, which leaves none to lend",
                remedy='Run without --enable-sleep-mode, or drop "lend".',
            )
        sizes = {int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors}
        memory = _memory_for(self.device, kv_cache_config, load_settings())
        with KvCacheAllocation(memory, sizes):
            super().initialize_from_config(kv_cache_config)
        cache = lendable_cache(memory, self.model_runner.kv_caches, kv_cache_config.num_blocks)
        self._steps = StepCount()
        endpoint = rank_endpoint(self.vllm_config, self.rank)
        # The connector has been given the cache by now, and has opened its store.
        borrower = default() if is_borrowing(self.vllm_config) else None
        self._service = RankService(cache, self.rank, endpoint, self._steps, borrower)
        if self.vllm_config.parallel_config.world_size == 1:
            lendable = LendableWorker(cache, self._service, borrower)
            LENDABLE[self.vllm_config.instance_id] = lendable

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step as vLLM does, count it, and tell consumers what it says of their copies."""
        if self._steps is None or self._service is None:
            return super().execute_model(scheduler_output)
        self._steps.begun(scheduler_output)
        if (pace := getattr(scheduler_output, PACE, None)) is not None:
            self._service.tell_pace(pace)
        output = super().execute_model(scheduler_output)
        is_sampled = self.model_config.runner_type != "pooling"
        # Without an output the step goes on when its tokens are sampled.
        if output is not None or not is_sampled or not scheduler_output.total_num_scheduled_tokens:
            self._steps.ended()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step as vLLM does, and count it."""
        output = super().sample_tokens(grammar_output)
        if self._steps is not None:
            self._steps.ended()
        return output

    def shutdown(self) -> None:
        """End the loans of this rank, and the worker."""
        if self._service is not None:
            self._service.close()
        super().shutdown()


class KvCacheAllocation(TorchFunctionMode):
    """While active, makes tensors of one of `sizes` bytes, which are KV caches, out of `memory`."""

    def __init__(self, memory: KvMemory, sizes: set[int]) -> None:
        super().__init__()
        self._memory = memory
        self._sizes = sizes

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer the allocation of a cache; pass everything else on."""
        del types
        named = dict(kwargs or {})
        if func is torch.zeros and named.get("dtype") is torch.int8 and len(args) == 1:
            size = args[0]
            nbytes = size if isinstance(size, int) else None
            if nbytes in self._sizes:
                return self._memory.allocate(nbytes)
        return func(*args, **named)


def _memory_for(device: torch.device, kv_cache_config: Any, settings: Settings) -> KvMemory:
    """Memory of the kind that this device has."""
    if device.type == "cuda":
        from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory

        return CudaKvMemory(device)
    nbytes = sum(int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors)
    granule_bytes = PAGE_BYTES
    while nbytes > MAX_HOST_GRANULES * granule_bytes and granule_bytes < settings.slab_bytes:
        granule_bytes *= 2
    return HostKvMemory(granule_bytes, settings.emulated_hbm_bytes)
