"""The link to the checkpoint store: copies in order, each direction on its own.

A copy begins when the one before it in its direction has ended, and moves at the link's rate. The
engine takes ended copies out at its step boundaries and acknowledges them. Copying takes no time of
a step; the engine accounts for the memory bandwidth that it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from aqua_simulator.co_serving.job import CoServedJob


@dataclass(slots=True)
class LinkCopy:
    """Blocks of a request on their way over the link."""

    end_s: float
    job: CoServedJob
    blocks: int


@dataclass(slots=True)
class LinkDirection:
    """One direction of the link.

    Attributes:
        block_s: Seconds that a block takes.
    """

    block_s: float
    _under_way: deque[LinkCopy] = field(default_factory=deque, repr=False)

    @property
    def next_end_s(self) -> float:
        """When the next copy ends; infinity without one."""
        return self._under_way[0].end_s if self._under_way else inf

    def send(self, job: CoServedJob, blocks: int, now_s: float) -> None:
        """Put a copy behind the others."""
        begin_s = max(now_s, self._under_way[-1].end_s) if self._under_way else now_s
        self._under_way.append(LinkCopy(begin_s + blocks * self.block_s, job, blocks))

    def ended(self, now_s: float) -> Iterator[LinkCopy]:
        """Take out the copies that have ended, in order."""
        while self.next_end_s <= now_s:
            yield self._under_way.popleft()

    def withdraw(self, job: CoServedJob) -> None:
        """Forget what is under way for a request that left; the others keep their times."""
        self._under_way = deque(copy for copy in self._under_way if copy.job is not job)
