"""The store: Aqua's books in Redis.

- `keys`, `scripts`: names, and the Lua files under `lua/`, one for each atomic step.
- `connection`, `pipeline`: how commands get to Redis.
- `ledger`, `lua_step`, `rows`: every step as a typed call.
- `history`: streams of the books that look back.
"""

from __future__ import annotations

from aqua_coordinator.store.connection import open_pool
from aqua_coordinator.store.ledger import Ledger
from aqua_coordinator.store.pipeline import Pipeline
from aqua_coordinator.store.rows import CurrentBooks

__all__ = ["CurrentBooks", "Ledger", "Pipeline", "open_pool"]
