"""A time slice filled by the counters of tenants: whose request is the next one to hold memory.

Within a tenant the policy's ranking decides, with its phases: what is overdue, prompts until the
slice's share of them is full, decodes, further prompts. Between tenants the one with the smallest
counter goes first, and what it takes counts at once: with its next request it stands behind those
that it has overtaken. A running request counts as if its tenant had been served `lead_tokens`
less, so that it makes room for another tenant's only beyond that.

When a waiting request finds no memory, no other tenant's comes in: small requests would keep a
large one out for ever. With one tenant, this is what `TimeSlice.fill` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, merge
from typing import Final, NamedTuple

from aqua_schedulers.cfs.ranking import Ranking
from aqua_schedulers.cfs.tenants import TenantAccounts
from aqua_schedulers.cfs.time_slice import Candidates, TimeSlice
from aqua_schedulers.cfs.views import RequestView
from aqua_schedulers.cfs.waiting_queue import RankedRequest, WaitingQueue

Runners = tuple[list[RankedRequest], list[RankedRequest]]
"""A tenant's preemptible requests: prompts, decodes."""


class TenantQueue:
    """Waiting requests of each tenant, in the ranking's order."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._queues: dict[str, WaitingQueue] = {}

    def __getitem__(self, tenant: str) -> WaitingQueue:
        """A tenant's queue; an empty one for a tenant that waits for nothing."""
        return self._queues.get(tenant) or WaitingQueue(self._ranking)

    def __iter__(self) -> Iterator[str]:
        """Tenants that wait."""
        return iter(self._queues)

    def add(self, request: RequestView, number: int, slice_index: int) -> None:
        """A request waits from now on."""
        queue = self._queues.get(request.tenant)
        if queue is None:
            queue = self._queues[request.tenant] = WaitingQueue(self._ranking)
        queue.add(request, number, slice_index)

    def remove(self, request: RequestView) -> None:
        """A request waits no more."""
        queue = self._queues[request.tenant]
        queue.remove(request.request_id)
        if not len(queue):
            del self._queues[request.tenant]

    def rank_by(self, ranking: Ranking) -> None:
        """Order all of them anew."""
        self._ranking = ranking
        for queue in self._queues.values():
            queue.rank_by(ranking)

    def by_counter(self, accounts: TenantAccounts) -> Iterator[RequestView]:
        """All waiting requests: the least served tenant's earliest arrival, again and again."""
        arrivals = {
            tenant: merge(queue.prompts, queue.decodes) for tenant, queue in self._queues.items()
        }
        heads = [
            (accounts.counters[tenant], next(ranked), tenant) for tenant, ranked in arrivals.items()
        ]
        heapify(heads)
        while heads:
            tag, (*_, request), tenant = heappop(heads)
            yield request
            following = next(arrivals[tenant], None)
            if following is not None:
                tag += accounts.admission_cost(request, output_tokens=1)
                heappush(heads, (tag, following, tenant))


class _Head(NamedTuple):
    request: RequestView
    is_running: bool
    is_overdue: bool = False


class TenantTurn:
    """One tenant's candidates for a slice, one after the other.

    Attributes:
        tag: Its counter, with what it has been given in this slice.
        head: Its next candidate; None when there is no further one.
    """

    def __init__(
        self,
        accounts: TenantAccounts,
        tenant: str,
        queue: WaitingQueue,
        running: Runners,
        since_slice: int,
    ) -> None:
        self.tag = accounts.counters[tenant]
        self._lead = accounts.lead(tenant)
        self._overdue = queue.overdue(since_slice)
        self.prompts: Final = Candidates(running[0], queue.prompts)
        self.decodes: Final = Candidates(running[1], queue.decodes)
        self.head: _Head | None = None
        # Looked at and not taken: the prompts' share may end before their turn.
        self._prompt: _Head | None = None

    @property
    def key(self) -> tuple[float, bool, float]:
        """Its place among the tenants, by the head."""
        head = self.head
        assert head is not None
        tag = self.tag - self._lead if head.is_running else self.tag
        return tag, head.request.output_tokens > 0, head.request.arrival_s

    def find_head(self, *, takes_prompts: bool, takes_decodes: bool) -> bool:
        """Find the next candidate of these phases; False if there is none."""
        self.head = None
        if takes_decodes:
            overdue = next(self._overdue, None)
            if overdue is not None:
                self.head = _Head(overdue, is_running=False, is_overdue=True)
                return True
        if takes_prompts:
            self._prompt = self._prompt or _next(self.prompts)
            self.head = self._prompt
        if takes_decodes and self.head is None:
            self.head = _next(self.decodes)
        return self.head is not None

    @property
    def is_at_prompts(self) -> bool:
        """Whether the next candidate is one of the prompts, and is not overdue."""
        return self.head is not None and self.head is self._prompt

    def take_head(self) -> _Head:
        """Take the next candidate."""
        head = self.head
        assert head is not None
        if head is self._prompt:
            self._prompt = None
        return head

    def end_overdue(self) -> None:
        """None of the overdue requests comes in any more."""
        self._overdue = iter(())


def _next(candidates: Candidates) -> _Head | None:
    found = candidates.take()
    return None if found is None else _Head(*found)


class TenantSlice:
    """A slice in the making, for several tenants; `fill` it once.

    Args:
        chosen: Gives out the memory; requests that stay anyway are held in it.
        accounts: What tenants have been served.
        turns: The tenants' candidates, by name.
        prompt_tokens: The prompts' share of the slice.
        slice_steps: Tokens that each request is expected to generate in it.
    """

    def __init__(
        self,
        chosen: TimeSlice,
        accounts: TenantAccounts,
        turns: Mapping[str, TenantTurn],
        *,
        prompt_tokens: int,
        slice_steps: int,
    ) -> None:
        self._chosen = chosen
        self._accounts = accounts
        self._turns = turns
        self._prompt_tokens = prompt_tokens
        self._slice_steps = slice_steps
        self._closed_by: str | None = None

    def fill(self) -> None:
        """Give out the memory: prompts up to their share and decodes, then further prompts."""
        for takes_decodes in (True, False):
            order: list[tuple[tuple[float, bool, float], str]] = []
            waiting = list(self._turns)
            while True:
                for tenant in waiting:
                    turn = self._turns[tenant]
                    takes_prompts = self._prompt_tokens > 0 or not takes_decodes
                    if turn.find_head(takes_prompts=takes_prompts, takes_decodes=takes_decodes):
                        heappush(order, (turn.key, tenant))
                if not order:
                    break
                tenant = heappop(order)[1]
                waiting = [tenant]
                turn = self._turns[tenant]
                if turn.is_at_prompts and takes_decodes and self._prompt_tokens <= 0:
                    continue  # Its share has been filled since it was queued up.
                self._give(tenant, turn)

    def _give(self, tenant: str, turn: TenantTurn) -> None:
        """Let a tenant's next candidate have memory, if there is any for it."""
        is_prompt = turn.is_at_prompts
        head = turn.take_head()
        request = head.request
        if head.is_overdue:
            self._chosen.admit_overdue((request,))
            fits = request.request_id in self._chosen.admitted
            if not fits:
                turn.end_overdue()
        elif head.is_running:
            self._chosen.keep((request,))
            fits = request.request_id in self._chosen.kept
        elif request.request_id in self._chosen.admitted:
            return
        else:
            fits = self._closed_by in {None, tenant} and self._chosen.admit(request)
            if not fits:
                (turn.prompts if is_prompt else turn.decodes).admits = False
                self._closed_by = self._closed_by or tenant
        if fits:
            cost = self._accounts.admission_cost(request, output_tokens=self._slice_steps)
            turn.tag += cost
            if is_prompt:
                self._prompt_tokens -= max(1, request.prompt_tokens - request.computed_tokens)
