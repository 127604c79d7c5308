"""Supported minor versions of vLLM, and what we rely on in all of them.

vLLM calls its scheduler "not public". The private surface used here is listed once, and looked for
when an engine starts: a vLLM that renamed something is refused with its name, instead of failing
an hour later in the middle of a burst. A version that Aqua was never tried with is refused, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from aqua_protocol import ConfigError

MINORS: Final = ("0.28", "0.30", "0.31", "0.32")
"""Minor versions that run; 0.29 and what is newer were never tried."""

USED: Final = {
    "Scheduler": (
        *("cache_config", "connector", "kv_cache_config", "kv_cache_manager"),
        *("max_num_running_reqs", "max_num_scheduled_tokens", "requests", "running"),
        *("pause_state", "_pause_state", "recompute_kv_load_failures", "requires_kv_delivery"),
        *("failed_recving_kv_req_ids", "finished_recving_kv_req_ids"),
        *("scheduler_config", "vllm_config", "waiting"),
        *("_free_request", "_preempt_request", "add_request", "reset_prefix_cache", "schedule"),
        "update_from_output",
    ),
    "KVCacheManager": ("block_pool", "coordinator", "free", "get_block_ids", "get_blocks"),
    "BlockPool": ("blocks", "free_blocks", "get_num_free_blocks", "touch"),
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


def require_supported(version: str) -> None:
    """Check a version of vLLM, such as `0.32.0` or `0.32.0.dev1+cpu`.

    Raises:
        ConfigError: Aqua was never tried with this version.
    """
    found = re.match(r"(\d+\.\d+)(?:\.|$)", version)
    if found is None or found.group(1) not in MINORS:
        raise ConfigError(
            f"vLLM {version} is not supported",
            remedy=f"Install vLLM {', '.join(MINORS)}, or a newer aqualib.",
        )


def require_schedulable(scheduler: Any) -> None:
    """Check a scheduler for everything that fair scheduling and paging use of it.

    Raises:
        ConfigError: Names what is missing.
    """
    _require(scheduler, USED, "Run without --scheduler-cls")


def require_lendable(scheduler: Any) -> None:
    """Check a scheduler for everything that lending uses of it.

    Raises:
        ConfigError: Names what is missing.
    """
    _require(scheduler, USED_TO_LEND, 'Run without "lend"')


def max_running(scheduler: Any) -> int:
    """Most requests that may run at once; since 0.31 runner slots are bounded apart from it."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def _require(scheduler: Any, used: Mapping[str, Iterable[str]], alternative: str) -> None:
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
            f"this build of vLLM has no {', '.join(missing)}",
            remedy=f"{alternative}, and report the exact version of vLLM.",
        )
