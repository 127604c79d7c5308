"""EvictionScheduler: requests in flight that give their memory up when told to, and go on later.

A gateway that has urgent work for a full engine can abort requests there, and lose what they have
computed. Here it *evicts* them instead: their KV is paged out as at the end of a slice, they stay
out until they are resumed or their hold ends, and then go on from the token at which they stopped.
Their clients wait; nothing is computed twice.

An evicted request waits in vLLM's queue like any that was preempted, and the policy that decides
about the others does not know of it before its hold has ended: else it would make room for it. A
pause that lets begun requests end resumes them all.

Promises: a request is evicted only if the store takes all that it has computed, so that none of it
is computed again; of several that are named, all are evicted or none. Not promised: that it comes
back at once when its hold ends. It waits for memory as others do.

Offline requests beside online ones are not evicted so: they give way by themselves.

Source: `PartialEvictionPolicy` of kubernetes-sigs/gateway-api-inference-extension#2632, which has a
gateway retry what was evicted; here the engine keeps the request.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aqua_protocol import CapacityError, ConfigError
from aqua_protocol.errors import InvalidTransitionError, UnknownResourceError
from aqua_schedulers.cfs import Preemption, PreemptionMode
from aqualib.engines.vllm.operations.evictions import EvictionRequest, ids_of
from aqualib.engines.vllm.operations.switches import Feature
from aqualib.engines.vllm.options import AquaOptions
from aqualib.engines.vllm.requests.priority import UrgentPriority
from aqualib.engines.vllm.scheduling.aborting_scheduler import AbortingScheduler


@dataclass(slots=True)
class _Eviction:
    ends_s: float
    kept_tokens: int = 0
    # Steps under way may still compute for it, so it is out for one step at least.
    is_fresh: bool = True


class EvictionScheduler(AbortingScheduler):
    """Evicts and resumes; `AquaScheduler` says when a step begins."""

    _options: AquaOptions

    def _open_evictions(self) -> None:
        self._evicted: dict[str, _Eviction] = {}

    # --- Commands, between two steps ---------------------------------------------------------

    def evict(self, wanted: EvictionRequest) -> list[dict[str, Any]]:
        """Have requests give up their memory; those that did.

        Raises:
            ConfigError: The engine does not page now.
            UnknownResourceError: None of those named is in flight.
            InvalidTransitionError: None of those named runs, or keeps KV that can be paged.
            CapacityError: The store has no room for them; none was evicted.
        """
        with self._block_lock:
            victims = self._named(wanted.request_ids) if wanted.request_ids else self._chosen()
            victims = self._fitting(victims, wanted.count)
            ends_s = time.monotonic() + wanted.hold_s
            self._evicted.update({each.request_id: _Eviction(ends_s) for each in victims})
            self._preempt([Preemption(r.request_id, PreemptionMode.SWAP) for r in victims])
        return [self._eviction(each.request_id) for each in victims]

    def resume_evicted(self, name: str) -> None:
        """End the hold of a request with the next step.

        Raises:
            UnknownResourceError: It is not evicted.
        """
        found = ids_of(name, self._evicted)
        if not found:
            raise UnknownResourceError(
                f"no request {name} is evicted", remedy="GET /aqua/evictions lists those that are."
            )
        for each in found:
            self._evicted[each].ends_s = 0.0

    def evictions(self) -> list[dict[str, Any]]:
        """Requests that are evicted now."""
        return [self._eviction(name) for name in self._evicted]

    # --- A step ------------------------------------------------------------------------------

    def _end_evictions(self, *, ends_all: bool) -> None:
        """Let requests wait for memory again whose hold is over, or all of them."""
        now_s = time.monotonic()
        for name, eviction in list(self._evicted.items()):
            if not eviction.is_fresh and (ends_all or eviction.ends_s <= now_s):
                del self._evicted[name]
                saved_tokens = 0 if self.paging is None else self.paging.saved_tokens(name)
                self._note_preemption(self.requests[name], saved_tokens)
            eviction.is_fresh = False

    def _hold_out(self, request: Any, saved_tokens: int) -> bool:
        """A request was preempted; whether it is to stay out."""
        eviction = self._evicted.get(request.request_id)
        if eviction is None:
            return False
        eviction.kept_tokens = saved_tokens
        # The fair policy, which does not know of it, may not decide again before the next step.
        self._listed = [name for name in self._listed if name != request.request_id]
        if self.paging is not None:
            self.paging.counts.evicted_requests += 1
            self.paging.counts.evicted_tokens += saved_tokens
        return True

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._evicted.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    # --- Inside ------------------------------------------------------------------------------

    def _evictable(self) -> list[Any]:
        """Running requests that have computed something which can be paged out."""
        return [
            each
            for each in self.running
            if each.num_computed_tokens
            and not each.skip_reading_prefix_cache
            and not (self.co_serving is not None and self.co_serving.is_offline(each.request_id))
        ]

    def _named(self, names: Sequence[str]) -> list[Any]:
        known = {found for name in names for found in ids_of(name, self.requests)}
        if not known:
            raise UnknownResourceError(
                f"no request in flight is called {', '.join(names[:3])}",
                remedy="Name it as its client does (X-Request-Id), or by the id of its answer.",
            )
        named = [each for each in self._evictable() if each.request_id in known]
        if not named:
            raise InvalidTransitionError(
                f"{', '.join(sorted(known)[:3])}: waiting, loading, evicted or offline already",
                remedy="Only online requests that run hold memory that they can give up.",
            )
        return named

    def _chosen(self) -> list[Any]:
        """All that could be evicted, in the order in which they should be."""
        sign = -1 if self._options.urgent is UrgentPriority.LOWER else 1
        return sorted(
            self._evictable(), key=lambda each: (sign * each.priority, -each.arrival_time)
        )

    def _fitting(self, victims: Sequence[Any], count: int | None) -> list[Any]:
        """The first `count` of them, as many as the store takes; or all of them."""
        paging = self.paging
        if paging is None or not self.switches.is_on(Feature.PAGING) or not paging.is_paging:
            raise ConfigError(
                "this engine does not page now, so what it evicts would be computed again",
                remedy="Start it with AquaConnector, or turn its switch `paging` on.",
            )
        room, taken, fitting = paging.table.room, 0, []
        for request in victims[:count]:
            tables = self.kv_cache_manager.get_block_ids(request.request_id)
            taken += sum(map(len, paging.groups.wanted(tables, request.num_computed_tokens)))
            if taken <= room:
                fitting.append(request)
        if victims and (not fitting or (count is None and taken > room)):
            raise CapacityError(
                f"the store has room for {room} more blocks, and these requests hold {taken}",
                remedy='Evict fewer, unpin prefixes, or start with more "store_bytes".',
                room_blocks=room,
                wanted_blocks=taken,
            )
        return fitting

    def _eviction(self, name: str) -> dict[str, Any]:
        eviction = self._evicted[name]
        return {
            "request_id": name,
            "kept_tokens": eviction.kept_tokens,
            "hold_s": round(max(0.0, eviction.ends_s - time.monotonic()), 3),
        }

    # --- Of AquaScheduler --------------------------------------------------------------------

    @abstractmethod
    def _note_preemption(self, request: Any, saved_tokens: int = 0) -> None: ...
