"""Aqua's books: who offers memory, who holds a lease on it, and who is asked to give it back.

From the outside in:

- `cli`, `settings`, `server`: how a coordinator is started, and when it refuses to be.
- `request_limits`, `hot_routes`, `app`, `routes`: HTTP, a short way for what members do often, and
  the sweep, by which the books' clock goes on.
- `auth`, `tokens`: who may call. `services`: what operations work with.
- `store`: the books, in Redis, one Lua script for each transition.
- `embedded`: the Valkey that keeps them when no Redis is given.
"""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("aqua-coordinator")
