"""Supported minor versions of vLLM, and where they differ for us.

vLLM calls its scheduler "not public". What we use of it is listed once (`surface`), and looked for
when an engine starts: a vLLM that renamed something is refused with its name, instead of failing
an hour later in the middle of a burst. A version that Aqua was never tried with is refused, too,
unless the operator has tried its sources (`contract`) and opted in.

Where versions differ, the attribute that is there decides, not the number of the version: in the
functions below, or where a single place has to know (`lending.block_limit`, `operations.metrics`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from aqua_protocol import ConfigError
from aqualib.engines.vllm.contract.surface import USED, USED_TO_LEND
from aqualib.settings import load_settings

logger: Final = logging.getLogger("aqualib")

MINORS: Final = ("0.28", "0.29", "0.30", "0.31", "0.32")
"""Minor versions on which at least the engine tests of schedulers, paging (with its prefix tier)
and lending pass: all engine tests run on the last of these before a change lands, and
`docs/measurements/vllm-runs.json` has the records of the others."""

WARNED_MINORS: Final = ("0.33",)
"""Minor versions that are taken with a warning: their sources hold the contract, and not all of
these tests are on record. 0.33 has no build for CPUs."""

OPT_IN: Final = "AQUA_VLLM_CONTRACT"
"""Names a file that `contract --accept` wrote: that version is taken."""

TRY_CONTRACT: Final = "python -m aqualib.engines.vllm.contract --accept vllm-contract.json"


def require_supported(version: str) -> None:
    """Check a version of vLLM, such as `0.32.0` or `0.32.0.dev1+cpu`.

    Raises:
        ConfigError: Aqua was never tried with this version, and its contract is not named.
    """
    found = re.match(r"(\d+\.\d+)(?:\.|$)", version)
    minor = None if found is None else found.group(1)
    if minor in MINORS:
        return
    if minor not in WARNED_MINORS and opted_in(version) is None:
        raise ConfigError(
            f"vLLM {version} is not supported",
            remedy=f"Install vLLM {', '.join(MINORS)} (or, with a warning, "
            f"{', '.join(WARNED_MINORS)}), or a newer aqualib. Or try this one: "
            f"`{TRY_CONTRACT}` says what of it has changed; then set {OPT_IN}=vllm-contract.json.",
        )
    _warn_of_missing_tests(version)


@cache
def _warn_of_missing_tests(version: str) -> None:
    """Say it once: a scheduler that lends is checked for that, and again for the rest."""
    logger.warning(
        "vLLM %s holds Aqua's import contract, and not all of Aqua's engine tests have run on it",
        version,
    )


def opted_in(version: str) -> Mapping[str, str] | None:
    """Fingerprints of this version as the operator has accepted them; None if it is not named.

    Raises:
        ConfigError: What is named is not a contract.
    """
    place = load_settings().vllm_contract
    if place is None:
        return None
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
        accepted, fingerprints = content["vllm"], content["fingerprints"]
        is_named: bool = accepted == version
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{OPT_IN}={place} is not a contract: {error}", remedy=f"Write one: `{TRY_CONTRACT}`."
        ) from error
    return dict(fingerprints) if is_named else None


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


# --- Where versions differ -------------------------------------------------------------------


def max_running(scheduler: Any) -> int:
    """Most requests that may run at once; since 0.31 runner slots are bounded apart from it."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def holding_queue(scheduler: Any) -> Any:
    """Waiting requests that may hold memory; until 0.30 vLLM has one queue for all it skips."""
    queue = getattr(scheduler, "kv_holding_waiting", None)
    return scheduler.skipped_waiting if queue is None else queue


def child_connectors(connector: Any) -> list[Any]:
    """Connectors of a `MultiConnector`; 0.28 has no public name for them."""
    return list(vars(connector)["_connectors"])


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
        f"{owner}.{names}"
        for owner, listed in used.items()
        for names in listed
        if not any(hasattr(found[owner], name) for name in names.split("|"))
    ]
    if missing:
        raise ConfigError(
            f"this build of vLLM has no {', '.join(missing)}",
            remedy=f"{alternative}, and report the exact version of vLLM.",
        )
