"""The store: Aqua's books in Redis.

- `keys`, `scripts`: names, and the Lua files under `lua/`, one for each atomic step.
- `connection`, `pipeline`: how commands get to Redis.
- `books`, `rows`: every step as a typed call.
"""

from __future__ import annotations

from aqua_coordinator.store.books import Books, Opened
from aqua_coordinator.store.connection import open_pool
from aqua_coordinator.store.pipeline import Pipeline

__all__ = ["Books", "Opened", "Pipeline", "open_pool"]
