"""The scheduler's half of co-serving, without vLLM: its policy, and the tokens of each step.

`AquaScheduler` tells it what happens to offline requests, shows it the engine before a step, does
what the plan says, and asks at each request of vLLM's own loop how many tokens it may take
(`StepTokens`). That is how an offline request is *parked*: it stays in memory and takes none.

The classes do not mix. Online requests are admitted and preempted by the fair policy, for which the
blocks of offline ones are free. These wait in the co-serving policy's queue, and are preempted by
the plan, those with a checkpoint first. They stand behind all online ones in vLLM's own order, so
what vLLM preempts by itself is offline, too, while there is any.

Checkpoints are in the store's table; the policy's ledger is told of them as far as it decides by
them. A copy counts there once the table finds it, which is when all workers have acknowledged it.
Of a request that runs the ledger may claim what the store has given up since; what is said of one
that waits is what was found when it was preempted. If less comes back after all, the request
computes the rest.

A step without online requests may be aborted when one arrives (`step_aborts`). Where the engine
cannot do that, such a step is kept short (`ConserveSettings.unaborted_share`).

Source: ConServe sections 4.2, 4.4 and 4.5.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple, Protocol

from aqua_protocol import ConfigError
from aqua_schedulers.conserve import (
    ConserveSettings,
    CoServedRequest,
    CoServingPlan,
    CoServingView,
    MeasuredStep,
    Objectives,
    PredictionBasis,
    ServiceClass,
    StepLoad,
    StepTimeKey,
    StepTimeProfile,
    co_serving_policy,
    find_profile,
)
from aqualib.engines.vllm.co_serving.attainment import OnlineAttainment
from aqualib.engines.vllm.co_serving.figures import CoServingTotals
from aqualib.engines.vllm.co_serving.plan_cache import PlanCache
from aqualib.engines.vllm.co_serving.safepoints import SafepointOrder
from aqualib.engines.vllm.co_serving.step_aborts import StepAborts
from aqualib.engines.vllm.co_serving.step_tokens import StepTokens
from aqualib.engines.vllm.options import AquaOptions, CoServingOptions, PagingMode
from aqualib.engines.vllm.requests.deadline import finish_in_s_of
from aqualib.engines.vllm.requests.service_class import service_class_of

logger: Final = logging.getLogger("aqualib")


class SavedBlocks(Protocol):
    """What the store says of a request's blocks; `KvPagingScheduler` does."""

    def saved_tokens(self, request_id: str) -> int:
        """Tokens of a preempted request that a load would bring back."""
        ...

    def copied_blocks(self, request: Any, blocks: range) -> tuple[int, bool]:
        """How many of these are there, from the first; whether the rest is on its way."""
        ...


class _Step(NamedTuple):
    """A step that was scheduled and has not ended: vLLM's name for it, and what was planned."""

    output: Any
    plan: CoServingPlan


class CoServing:
    """Online and offline requests of one engine; owned by its scheduler's thread.

    Args:
        options: The adapter's, with `co_serving`.
        key: What a step-time profile of the engine is found by.
        block_tokens: Of the engine's one group of KV blocks.
        is_load_async: Whether KV comes back beside the steps.
        abortable_layers: Of the model on each rank, if its steps can be aborted; else None.
        overlaps_steps: Whether a step is scheduled while another runs, if neither may be aborted.

    Attributes:
        tokens: Of the step that is being scheduled; None while nothing is planned, as in a pause.
        aborts: None where steps run to their end.
    """

    def __init__(
        self,
        options: AquaOptions,
        key: StepTimeKey,
        *,
        block_tokens: int,
        is_load_async: bool,
        abortable_layers: int | None = None,
        overlaps_steps: bool = False,
    ) -> None:
        given = options.co_serving
        assert given is not None
        self.tokens: StepTokens | None = None
        self.block_tokens: Final = block_tokens
        objectives = Objectives(given.ttft_s, given.tpot_s)
        self.policy: Final = co_serving_policy(
            given.policy,
            objectives,
            _profile_of(given, key),
            ConserveSettings(
                aborts=abortable_layers is not None,
                safepoints=max(1, (abortable_layers or 1) // (given.safepoint_layers or 1)),
                checkpoints=options.mode is PagingMode.CHECKPOINT,
                swaps=options.is_paging,
                loads_in_background=is_load_async,
                starvation_s=given.starvation_s,
            ),
            block_tokens=block_tokens,
        )
        self._settled: Final = PlanCache(self.policy.paced, block_tokens=block_tokens)
        self._urgent = options.urgent
        self._offline: dict[str, float] = {}  # With the deadline of each.
        self._arrivals_s: dict[str, float] = {}
        self._copying: set[str] = set()
        self._steps: deque[_Step] = deque()
        self._stalled_steps = 0
        self.overlaps_steps: Final = overlaps_steps
        self._plan: CoServingPlan | None = None
        self._order: SafepointOrder | None = None
        self._is_withheld = False
        self.aborts: StepAborts | None = None
        if abortable_layers is not None:
            self.aborts = StepAborts(
                self.policy.on_arrival,
                layer_count=abortable_layers,
                every_layers=given.safepoint_layers,
            )
        self.attainment: Final = OnlineAttainment(objectives)
        self.figures: Final = CoServingTotals(
            self.policy,
            self.attainment,
            self.aborts,
            offline=self._offline,
            block_tokens=block_tokens,
            is_in_turn=overlaps_steps and self.aborts is not None,
        )
        if self.policy.times.basis is PredictionBasis.FIXED:
            logger.warning(
                "co-serving without a step-time profile: offline work keeps to a fixed budget, at "
                "first %d tokens of a step; under `guarded` it has none beside answers",
                self.policy.times.fixed_tokens,
            )

    # --- Requests ----------------------------------------------------------------------------

    def is_offline(self, request_id: str) -> bool:
        """Whether the engine knows it as an offline request."""
        return request_id in self._offline

    def arrived(self, request: Any, now_s: float, *, waited_s: float = 0.0) -> bool:
        """A request of vLLM's arrived.

        Args:
            request: vLLM's.
            now_s: When the scheduler got it.
            waited_s: Since it came to the front end, by the clock that both share.

        Returns:
            Whether it is offline.
        """
        name = request.request_id
        self._arrivals_s[name] = now_s
        if self.aborts is not None:
            self.aborts.arrived(name)
        if service_class_of(request, self._urgent) is ServiceClass.ONLINE:
            if request.sampling_params is not None:  # Embeddings have no first token.
                self.attainment.arrived(name, now_s - waited_s)
            self._online_changed(now_s)
            return False
        self._settled.drop()
        self._offline[name] = now_s + finish_in_s_of(request)
        self.policy.added(self.view(request), now_s)
        return True

    def heard(self, request: Any, now_s: float) -> None:
        """A request has come in that the scheduler does not have yet; on any thread."""
        if self.aborts is None or service_class_of(request, self._urgent) is ServiceClass.OFFLINE:
            return
        # One that brings embeddings instead of tokens is taken for a short one.
        tokens = len(request.prompt_token_ids or ()) or 1
        arrival = CoServedRequest(request.request_id, ServiceClass.ONLINE, now_s, tokens)
        self.aborts.heard(arrival, now_s)

    def admitted(self, request_id: str) -> None:
        """An offline request holds blocks now."""
        self._settled.drop()
        if self.policy.waiting.get(request_id) is not None:
            self.policy.waiting.take(request_id)

    def preempted(self, request: Any, saved: SavedBlocks | None, now_s: float) -> None:
        """An offline request gave up its blocks; what the store has of them is booked."""
        name = request.request_id
        self._settled.drop()
        self.figures.counts.offline_preemptions += 1
        self._end_copies(name)
        blocks = 0 if saved is None else saved.saved_tokens(name) // self.block_tokens
        ledger = self.policy.checkpoints
        if blocks < ledger.of(name).saved:
            ledger.lose(name)
        if (count := blocks - ledger.of(name).saved) > 0:
            ledger.copy(name, count)
            ledger.acknowledge(name, count)
        self.policy.preempted(self.view(request), now_s)

    def online_preempted(self, running: Iterable[Any]) -> None:
        """An online request gave up its blocks; no offline one should run then."""
        self._settled.drop()
        is_first = any(request.request_id in self._offline for request in running)
        self.figures.counts.online_preempted_first += is_first

    def removed(self, request_id: str, now_s: float) -> None:
        """A request ended."""
        self._arrivals_s.pop(request_id, None)
        if self.aborts is not None:
            self.aborts.got_somewhere([request_id])
        if request_id not in self._offline:
            self._online_changed(now_s)
            return
        self._settled.drop()
        self.figures.counts.offline_ended += 1
        del self._offline[request_id]
        self._end_copies(request_id)
        self.policy.removed(request_id)

    def _online_changed(self, now_s: float) -> None:
        self.figures.is_told = False
        self._settled.online_changed(now_s)

    def view(
        self, request: Any, *, computed_tokens: int = 0, held_blocks: int = 0
    ) -> CoServedRequest:
        """A request of vLLM's as the policy sees it.

        Of a step under way the tokens that it will bring count as known: vLLM schedules the next.
        """
        ahead = request.num_output_placeholders
        name = request.request_id
        is_offline = name in self._offline
        output_tokens = request.num_output_tokens + ahead
        return CoServedRequest(
            name,
            ServiceClass.OFFLINE if is_offline else ServiceClass.ONLINE,
            self._arrivals_s.get(name, request.arrival_time),
            request.num_tokens + ahead,
            computed_tokens,
            output_tokens,
            held_blocks,
            max(0, request.max_tokens - output_tokens),
            self._offline.get(name, inf),
        )

    # --- Steps -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins; nothing of it is planned yet."""
        self.tokens = self._plan = self._order = None
        self._is_withheld = False

    def paused(self) -> None:
        """The step that begins is not planned, as the engine pauses."""
        self._settled.paused()

    def plan(self, view: CoServingView) -> CoServingPlan:
        """What the next step does; its tokens are handed out from now on.

        If nothing computes, vLLM decides by itself. Requests that were loaded may need the memory
        of one that is parked for want of a block: neither is in the other's view.

        vLLM may refuse what was planned for. It keeps blocks for prompts that are half computed,
        and loads nothing into them: an online request whose load waits for such an offline one, and
        that one parked for it, would wait for each other. So a step is planned without those that
        arrive after one that came to nothing, and after two such steps vLLM decides.

        While an online request is on its way to the scheduler, no step begins without one.
        """
        if not self._settled.stands:
            self.figures.is_told = False
        self._settled.end_run(view.now_s)
        self.figures.running = view.running
        if self._stalled_steps:
            view = view._replace(arriving=[])
        runs_through = self.aborts is not None and self.aborts.runs_through
        plan = self.policy.plan(view._replace(runs_through=runs_through))
        if plan.is_preemptible and self.aborts is not None and self.aborts.is_expecting(view.now_s):
            self._is_withheld = True
            self._settled.drop()
            self.tokens = StepTokens({}, view.max_tokens)
            return plan._replace(
                offline_tokens={}, admit=[], copy_in={}, load=StepLoad(), is_preemptible=False
            )
        if self._stalled_steps > 1 or not (plan.online_tokens or plan.offline_tokens):
            self._settled.drop()
            return plan
        online_tokens = view.max_tokens - sum(plan.offline_tokens.values())
        if self.policy.bounds_online:
            online_tokens = plan.online_tokens
        self.tokens = StepTokens(plan.offline_tokens, online_tokens)
        self._plan = plan
        self._settled.planned(plan, online_tokens, view, is_stalled=self._stalled_steps > 0)
        return plan

    def goes_on(self) -> bool:
        """Whether the step that begins is granted the last plan: it needs no look and no tokens."""
        return self._settled.goes_on()

    def grant(self, free_blocks: int) -> None:
        """Let further steps begin so (`PlanCache.grant`)."""
        self._settled.grant(free_blocks)

    @property
    def wants_online(self) -> bool:
        """Whether the last plan is to be told of the online requests that there are."""
        return self._settled.wants_online

    def regroup(self, online: Sequence[CoServedRequest], running_count: int) -> None:
        """Have the last plan go on for all online requests in memory (`PlanCache.regroup`)."""
        bounds = self.policy.bounds_online
        self._settled.regroup(online, running_count, bounds_online=bounds)

    def settled_plan(
        self, free_blocks: int, running_count: int, now_s: float
    ) -> CoServingPlan | None:
        """The last plan, if it serves this step as well; its tokens are handed out again.

        Nothing is being copied then. Arguments as for `PlanCache.next`.
        """
        if self._copying:
            return None
        settled = self._settled.next(free_blocks, running_count, now_s)
        if settled is None:
            return None
        self._plan, online_tokens = settled
        self.tokens = StepTokens({}, online_tokens)
        return self._plan

    def safepoints_of(self, scheduled: Mapping[str, int]) -> SafepointOrder | None:
        """What workers are told of the step that vLLM has just scheduled, if there is anything.

        Args:
            scheduled: The tokens of each of its requests.
        """
        plan, aborts = self._plan, self.aborts
        if aborts is None or not scheduled:
            return None
        if aborts.has_page is None:
            return aborts.first_order
        if plan is not None and plan.is_preemptible and scheduled.keys() <= self._offline.keys():
            self._order = aborts.order(scheduled, plan)
        return self._order

    def begun(
        self,
        output: Any,
        plan: CoServingPlan,
        *,
        is_memory_coming: bool = False,
        written_blocks: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        """A step was scheduled.

        Args:
            output: The scheduler's, by which the step's end is known.
            plan: As it was planned; what offline requests really got replaces its tokens.
            is_memory_coming: Whether blocks are still read that the plan counted as free: then a
                step that computes nothing is what it takes.
            written_blocks: Gives the blocks that it writes to; asked if it may be aborted.
        """
        self.figures.plan = plan
        taken = output.num_scheduled_tokens
        is_refused = self.tokens is not None and not taken and not self._is_withheld
        is_stalled = is_refused and not is_memory_coming
        self._stalled_steps = self._stalled_steps + 1 if is_stalled else 0
        if is_refused:
            self._settled.drop()
        offline = {name: tokens for name, tokens in taken.items() if name in self._offline}
        plan = plan._replace(offline_tokens=offline)
        self._steps.append(_Step(output, plan))
        if self.aborts is not None and self._order is not None:
            self.aborts.begun(self._order, taken, written_blocks(), plan)

    def ended(self, output: Any, measured: MeasuredStep, now_s: float) -> None:
        """A step's output is there; steps end in the order in which they were scheduled."""
        if all(step.output is not output for step in self._steps):
            return  # Scheduled without a plan, as in a pause.
        while (step := self._steps.popleft()).output is not output:
            pass
        tokens = sum(step.plan.offline_tokens.values())
        self.figures.counts.offline_tokens += tokens
        if self.aborts is not None:
            self.aborts.got_somewhere(step.plan.offline_tokens)
        self.figures.counts.overruns += tokens > 0 and measured.seconds > step.plan.limit_s
        basis = self.policy.times.basis
        self.policy.stepped(step.plan, *measured, now_s)
        if self.policy.times.basis is not basis:
            logger.warning(
                "co-serving goes by %s now: steps %s the step-time profile",
                "its profile" if basis is PredictionBasis.FIXED else "a small fixed budget",
                "agree with" if basis is PredictionBasis.FIXED else "contradict",
            )

    def got_tokens(self, output: Any, requests: Mapping[str, Any], now_s: float) -> None:
        """Requests have the tokens of a step whose output is there; those that ended are gone."""
        for name in self.attainment.awaited(output.num_scheduled_tokens):
            if requests[name].num_output_tokens:
                self.attainment.first_token(name, now_s)
                self.figures.is_told = False

    def aborted(self, output: Any) -> None:
        """A step was aborted, and is forgotten."""
        self._steps = deque(step for step in self._steps if step.output is not output)
        self.policy.aborted()

    # --- Checkpoints -------------------------------------------------------------------------

    def copy_begun(self, request_id: str, count: int) -> None:
        """So many more blocks of a running request are in the store or on their way."""
        if count > 0:
            self.policy.checkpoints.copy(request_id, count)
            self._copying.add(request_id)

    def settle_copies(self, saved: SavedBlocks, requests: Mapping[str, Any]) -> None:
        """Book the copies that have ended since the last call, well or not."""
        ledger = self.policy.checkpoints
        for name in list(self._copying):
            self.figures.is_told = False
            one = ledger.of(name)
            first = one.saved
            count, is_coming = saved.copied_blocks(
                requests[name], range(first, first + one.copying)
            )
            if count:
                ledger.acknowledge(name, count)
            if not one.copying:
                self._copying.discard(name)
            elif not is_coming:
                self._end_copies(name)
                ledger.lose(name)

    def forget_saved(self) -> None:
        """Nothing that is in the store is of use any more."""
        self._settled.drop()
        for name in self._offline:
            self._end_copies(name)
            self.policy.checkpoints.lose(name)

    def _end_copies(self, request_id: str) -> None:
        """Stop waiting for copies: vLLM's pool keeps their blocks, not the ledger."""
        self._copying.discard(request_id)
        under_way = self.policy.checkpoints.of(request_id).copying
        if under_way:
            self.policy.checkpoints.acknowledge(request_id, under_way)

    # --- Figures -----------------------------------------------------------------------------

    @property
    def is_told(self) -> bool:
        """Whether nothing has happened since figures were read: a settled plan serves on."""
        return self._settled.stands and self.figures.is_told

    def totals(self) -> dict[str, float]:
        """What is counted here, and levels, by the names of `operations.metrics`."""
        return self.figures.totals(is_last=self._settled.stands)


def _profile_of(given: CoServingOptions, key: StepTimeKey) -> StepTimeProfile | None:
    """The engine's own profile; one that is missing, or of another engine, is said and left."""
    try:
        return find_profile(given.step_profile, key)
    except ConfigError as error:
        logger.warning("co-serving: %s. %s", error.message, error.remedy)
        return None
