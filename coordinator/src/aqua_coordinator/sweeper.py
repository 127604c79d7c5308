"""The sweep: what happens in the books because time passes.

Every coordinator sweeps, and any number may at once: each step is one script that looks at the
books as they are. A sweep is also what makes the books' clock go on (`lua/lib/books.lua`), so
while no coordinator or no Redis is there, no lease or membership gets older.
"""

from __future__ import annotations

import asyncio

import structlog

from aqua_coordinator.auth import Authenticator
from aqua_coordinator.metrics import Metrics
from aqua_coordinator.store import Ledger
from aqua_coordinator.store.scripts import SWEEP_PERIOD_S
from aqua_protocol import UnavailableError

log = structlog.get_logger(__name__)


async def sweep_forever(
    ledger: Ledger, authenticator: Authenticator, metrics: Metrics, *, silent_s: float
) -> None:
    """Sweep every `SWEEP_PERIOD_S`; an absent Redis is waited for. Runs until cancelled."""
    absent = False
    while True:
        authenticator.refresh()
        try:
            metrics.endings.inc(await ledger.sweep(silent_s=silent_s))
        except UnavailableError as error:
            if not absent:
                log.warning("store absent, nothing expires meanwhile", error=str(error))
            absent = True
        else:
            if absent:
                log.info("store is back")
            absent = False
        await asyncio.sleep(SWEEP_PERIOD_S)
