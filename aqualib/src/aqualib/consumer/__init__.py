"""The consumer's side: a store whose bytes live on peers while they lend, in host memory otherwise.

Modules, from the ground up:

- `residency`: where a frame may be and how it moves, as a table.
- `extents`, `frame`, `books`, `itinerary`: pure state and choices.
- `store`, `mover`, `carrier`: the same for many threads, and the threads that carry moves out.
- `lane`, `pager`, `arena`: copies of engine threads, and room for tensors.
- `handshake`, `attachment`, `events`: lease channels to producers, and the thread that listens.
- `demand`, `leasing`: when to ask the coordinator for memory, and the thread that does.
- `aqua`: all of it as one object.
"""

from __future__ import annotations

from aqualib.consumer.aqua import Aqua, Happenings

__all__ = ["Aqua", "Happenings"]
