"""Supported minor versions of vLLM: what differs between them, and what we rely on in all of them.

vLLM calls its scheduler "not public". The private surface used here is listed once, and looked for
when an engine starts: a vLLM that renamed something is refused with its name, instead of failing
an hour later in the middle of a burst. A version that is not in the table is refused, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aqua_protocol import ConfigError

USED: Final = {
    "Scheduler": (
        *("cache_config", "connector", "kv_cache_config", "kv_cache_manager"),
        *("max_num_scheduled_tokens", "requests", "running", "scheduler_config"),
        *("vllm_config", "waiting"),
        *("_free_request", "_preempt_request", "add_request", "reset_prefix_cache", "schedule"),
        "update_from_output",
    ),
    "KVCacheManager": ("block_pool", "get_block_ids", "get_blocks"),
    "BlockPool": ("free_block_queue", "get_num_free_blocks"),
}
"""Attributes of vLLM's classes that fair scheduling and paging use."""

USED_TO_LEND: Final = {
    "Scheduler": (
        *("finish_requests", "get_request_counts", "kv_cache_config", "num_lookahead_tokens"),
        "shutdown",
    ),
    "BlockPool": (
        *("blocks", "evict_blocks", "free_blocks", "get_num_free_blocks", "num_gpu_blocks"),
        "touch",
    ),
    "KVCacheBlock": ("block_id", "is_null", "ref_cnt"),
}
"""Attributes that lending uses."""


@dataclass(frozen=True, slots=True)
class VllmVersion:
    """One minor version of vLLM.

    Attributes:
        minor: As in `0.32`.
        run_limit: The scheduler's attribute that bounds running requests.
        side_queue: Its second queue, of requests that wait for something else than admission.
    """

    minor: str
    run_limit: str
    side_queue: str

    def require(self, scheduler: Any) -> None:
        """Check a scheduler for everything that is used of it.

        Raises:
            ConfigError: Names what is missing.
        """
        own = (*USED["Scheduler"], self.run_limit, self.side_queue)
        self._require(scheduler, {**USED, "Scheduler": own}, "Run without --scheduler-cls")

    def require_lendable(self, scheduler: Any) -> None:
        """Check a scheduler for everything that lending uses of it.

        Raises:
            ConfigError: Names what is missing.
        """
        self._require(scheduler, USED_TO_LEND, 'Run without "lend"')

    def require_pageable(self, scheduler: Any) -> None:
        """Check that blocks keep their bytes until they can be paged out.

        The second model runner zeroes new blocks, where a model needs that, before it asks a
        connector to save what was in them.

        Raises:
            ConfigError: They would be zeroed first.
        """
        is_early = getattr(scheduler, "use_v2_model_runner", False)
        if is_early and getattr(scheduler, "needs_kv_cache_zeroing", False):
            raise ConfigError(
                "this model's blocks are zeroed before they could be paged out",
                remedy='Set "mode": "recompute", or VLLM_USE_V2_MODEL_RUNNER=0.',
            )

    def max_running(self, scheduler: Any) -> int:
        """Most requests that may run at once."""
        return int(getattr(scheduler, self.run_limit))

    def _require(self, scheduler: Any, used: Mapping[str, Iterable[str]], alternative: str) -> None:
        manager = getattr(scheduler, "kv_cache_manager", None)
        pool = getattr(manager, "block_pool", None)
        (block, *_) = getattr(pool, "blocks", None) or [None]
        found = {
            "Scheduler": scheduler,
            "KVCacheManager": manager,
            "BlockPool": pool,
            "KVCacheBlock": block,
        }
        missing = [
            f"{owner}.{name}"
            for owner, names in used.items()
            for name in names
            if not hasattr(found[owner], name)
        ]
        if missing:
            raise ConfigError(
                f"this build of vLLM {self.minor} has no {', '.join(missing)}",
                remedy=f"{alternative}, and report the exact version of vLLM.",
            )


VERSIONS: Final = {
    version.minor: version
    for version in (
        # Whatever a scheduling pass skips waits apart.
        VllmVersion("0.28", "max_num_running_reqs", "skipped_waiting"),
        # As 0.28; a connector is given the whole cache manager.
        VllmVersion("0.30", "max_num_running_reqs", "skipped_waiting"),
        # Running requests and runner slots are bounded apart; only block holders wait apart.
        VllmVersion("0.31", "max_num_active_reqs", "kv_holding_waiting"),
        # As 0.31; preemption also ends auxiliary outputs.
        VllmVersion("0.32", "max_num_active_reqs", "kv_holding_waiting"),
    )
}


def supported_version(version: str) -> VllmVersion:
    """The table's row for a version of vLLM, such as `0.32.0` or `0.32.0.dev1+cpu`.

    Raises:
        ConfigError: Aqua was never tried with this version.
    """
    found = re.match(r"(\d+\.\d+)(?:\.|$)", version)
    minor = found.group(1) if found else version
    if minor not in VERSIONS:
        raise ConfigError(
            f"vLLM {version} is not supported",
            remedy=f"Install vLLM {', '.join(VERSIONS)}, or a newer aqualib.",
        )
    return VERSIONS[minor]
