"""The unified scheduler: what online and offline requests compute in the next step.

Algorithm 1 as it runs here, once per step:

1. Online requests take their tokens as they would alone: decodes one each, prompts what is left of
   the step (under the paper's reading, what its limit leaves).
2. Blocks and slots that they lack are taken from offline requests, cheapest victim first. No online
   request leaves memory while an offline one holds blocks.
3. Offline requests fill the step up to the reading's limit: those due or starved, then by deadline,
   then those admitted first, so that memory comes free. One that finds no room in the step is
   *parked*: it keeps its blocks and computes nothing.
4. Waiting offline requests come in while the step and memory have room. Those with a checkpoint are
   loaded in the background, and new prompts are computed meanwhile.
5. A step without an online request may be aborted (`on_arrival`, Algorithm 2). An abort halves the
   next such step, one that ends doubles it: what is thrown away adapts to the gaps between
   arrivals, and some step always ends. Beyond `starved_tokens` it has no more than lets it stop
   soon for an arrival: at its end, or under `guarded`, if its time can be predicted, at its second
   safepoint.
6. Full blocks of offline requests are copied out, next victims first.

Promises, as long as predicted times are right: a step with online requests exceeds its limit only
if they do so alone; memory is never taken twice; the starved offline request computes
`starved_tokens` in every step that has online prompts and memory for it, out of their share, and
under `guarded` what its stretch allows beside online decodes, which is nothing without a profile.
It promises offline work nothing when online requests fill the memory: none of them leaves it for an
offline one, however long that waits.

Costs: O(n) in the requests that hold blocks, O(v log v) when victims are sought, O(k) in those
admitted.

Source: ConServe Algorithm 1, with these decisions. `tau - R` in line 41 should add: a preempted
request gives its tokens back. tau_off is counted from the batch in each step, so that nothing need
be given back; finished requests leave the batch, `has_new_online` is not needed. Budgets for memory
and for the number of requests, which section 4.2 mentions and the algorithm lacks, are steps 2 and
4. A request over the token budget loses its turn but not its blocks (section 4.4 keeps them "until
incoming online requests are scheduled"). The order of victims is open in the algorithm; section 4.4
prefers requests with a checkpoint: ours is the least to compute again for each block gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf

from aqua_schedulers.cfs.views import Preemption, PreemptionMode
from aqua_schedulers.conserve.checkpoints import CheckpointLedger, CheckpointRamp, CopyBudget
from aqua_schedulers.conserve.offline_queue import OfflineQueue, is_due
from aqua_schedulers.conserve.profile import StepLoad
from aqua_schedulers.conserve.readings import Objectives, Reading
from aqua_schedulers.conserve.settings import ConserveSettings
from aqua_schedulers.conserve.step_budget import StepBudget
from aqua_schedulers.conserve.step_time import PredictionBasis, StepTimes
from aqua_schedulers.conserve.views import (
    NO_LIMIT,
    CoServedRequest,
    CoServingPlan,
    CoServingView,
    ServiceClass,
    StepUnderWay,
)


class ConservePolicy:
    """Decides each step of a co-serving engine; made by `co_serving_policy`.

    Attributes:
        times: Predicted step times; told each step's duration by `stepped`.
        waiting: Offline requests without blocks.
        checkpoints: Copies of offline requests; the engine books acknowledgements here.
    """

    def __init__(
        self,
        reading: Reading,
        objectives: Objectives,
        times: StepTimes,
        settings: ConserveSettings,
        *,
        block_tokens: int,
    ) -> None:
        self.times = times
        self.waiting = OfflineQueue(settings.starvation_s)
        self.checkpoints = CheckpointLedger()
        self._reading = reading
        self._objectives = objectives
        self._settings = settings
        self._block_tokens = block_tokens
        self._ramp = CheckpointRamp(settings.checkpoint_start, settings.checkpoint_full)
        self._copy_out = CopyBudget()
        self._copy_in = CopyBudget()
        self._offline_step_tokens = settings.offline_step_tokens

    # --- Events ------------------------------------------------------------------------------

    def added(self, request: CoServedRequest, now_s: float) -> None:
        """An offline request arrived."""
        self.waiting.add(request, now_s)

    def preempted(self, request: CoServedRequest, now_s: float) -> int:
        """An offline request left memory; returns its blocks that stay pinned by a copy."""
        self.waiting.add(request, now_s)
        return self.checkpoints.leave(request.request_id)

    def removed(self, request_id: str) -> int:
        """An offline request ended; returns its blocks that stay pinned by a copy."""
        self.waiting.remove(request_id)
        return self.checkpoints.finish(request_id)

    def stepped(self, plan: CoServingPlan, load: StepLoad, seconds: float, now_s: float) -> None:
        """A step ran to its end; `load` is what it really computed."""
        for name in plan.offline_tokens:
            self.waiting.served(name, now_s)
        self.times.measured(
            load,
            seconds,
            limit_s=plan.limit_s,
            offline_tokens=sum(plan.offline_tokens.values()),
        )
        if plan.is_preemptible:
            most = self._settings.offline_step_tokens
            self._offline_step_tokens = min(most, 2 * self._offline_step_tokens)

    def paced(self, plan: CoServingPlan, seconds: float, steps: int = 1) -> None:
        """Steps like the planned one followed each other so many seconds apart.

        Only those say something of which all online requests are decodes: one with a prompt is by
        itself.
        """
        alone = plan.online_load
        if alone.new_tokens and not alone.pair_tokens:
            self.times.paced(alone, plan.load, seconds, steps=steps)

    def aborted(self) -> None:
        """A preemptible step was aborted."""
        least = self._settings.least_step_tokens
        self._offline_step_tokens = max(least, self._offline_step_tokens // 2)

    def on_arrival(
        self, step: StepUnderWay, waiting: Sequence[CoServedRequest], now_s: float
    ) -> bool:
        """Whether the arrival of the last of `waiting` online requests aborts the step under way.

        Each arrival aborts at most one step: the next one holds it, and is not preemptible.

        Source: ConServe Algorithm 2; its `break` in line 15 stands for a return. Its single victims
        never come about: they would leave a batch with online requests, whose safepoints are off
        (section 5), and of a pure offline batch a safepoint aborts all (4.3). Offline requests
        beside online ones are held to the step's limit in `plan` instead.
        """
        if not step.is_preemptible or step.is_aborting:
            return False
        remaining_s = step.start_s + step.expected_s - now_s
        load = StepLoad()
        for request in waiting:
            load = load.and_chunk(request.pending_tokens, request.computed_tokens)
        own_s = self.times.seconds(load)
        return self._reading.aborts(remaining_s, own_s, self._settings.safepoint_s)

    # --- The step ----------------------------------------------------------------------------

    def plan(self, view: CoServingView) -> CoServingPlan:
        """Decide the next step; an empty plan when nothing can run."""
        online = [each for each in view.running if each.service_class is ServiceClass.ONLINE]
        offline = [each for each in view.running if each.service_class is ServiceClass.OFFLINE]
        starved = self.waiting.starved(view.now_s)
        dated = (each for each in offline if each.finish_by_s < inf)
        due = {each.request_id for each in dated if self._is_due(each, view.now_s)}
        urgent = due if starved is None else due | {starved}
        step, online_tokens = self._online(view, online, offline, keeps_back=starved is not None)
        if step.free_blocks < 0 or step.slots < 0:
            self._take_from(step, offline, urgent)
            offline = [each for each in offline if each.request_id not in step.preempt]
        # Stable: by urgency and deadline, then by admission.
        offline.sort(key=lambda each: (each.request_id not in urgent, each.finish_by_s))
        overdue = None if starved is None else self.waiting.get(starved)
        if overdue is not None:
            need = -(-overdue.known_tokens // self._block_tokens)
            while offline and (need > step.free_blocks or step.slots < 1):
                self._preempt(step, offline.pop())
        is_preemptible, online_load = not online_tokens, step.load
        self._fill(step, offline, due, starved)
        loading = [
            each for each in offline if each.is_loading and each.request_id not in step.preempt
        ]
        admit, start_loading = self._admit(step, view, due, overdue)
        expected_s = self.times.seconds(step.load)
        # An idle engine's link has as much to do as one in a step.
        paced_s = expected_s if 0.0 < expected_s < inf else self._objectives.tpot_s
        return CoServingPlan(
            preempt=self._preemptions(step.preempt),
            online_tokens=online_tokens,
            offline_tokens=step.offline_tokens,
            admit=admit,
            is_preemptible=is_preemptible and bool(step.offline_tokens) and self._settings.aborts,
            copy_out=self._checkpointed(view, offline, step, paced_s),
            copy_in=self._loaded(view, loading, start_loading, paced_s),
            load=step.load,
            online_load=online_load,
            expected_s=expected_s,
            limit_s=step.kept_s,
        )

    @property
    def bounds_online(self) -> bool:
        """Whether `CoServingPlan.online_tokens` also holds online requests back."""
        return self._reading.bounds_online

    def _calm_limit_s(self, *, runs_through: bool) -> float:
        """Longest step without online requests, by what an arrival waits for it to stop.

        Where nothing predicts a step, nothing says what an abort of it takes: it is kept as short
        as one that runs to its end, which bounds both.
        """
        settings, ttft_s = self._settings, self._objectives.ttft_s
        is_predicted = self.times.basis is PredictionBasis.PROFILE
        if runs_through or not settings.aborts or not is_predicted:
            return settings.unaborted_share * ttft_s
        return self._reading.abortable_limit_s(settings.abort_share * ttft_s, settings.safepoints)

    def _is_due(self, request: CoServedRequest, now_s: float) -> bool:
        token_s = self._objectives.tpot_s / max(1, self._settings.least_step_tokens)
        return is_due(request, now_s, token_s, self._objectives.tpot_s)

    def _online(
        self,
        view: CoServingView,
        online: Sequence[CoServedRequest],
        offline: Sequence[CoServedRequest],
        *,
        keeps_back: bool,
    ) -> tuple[StepBudget, int]:
        """Step 1: the tokens and blocks of online requests, and the limits that follow."""
        size = self._block_tokens
        free_blocks = view.free_blocks
        decodes = [each for each in online if each.is_decode]
        prompts = [each for each in online if not each.is_decode]
        contexts = 0
        for each in decodes:
            contexts += each.known_tokens
            free_blocks -= max(0, -(-each.known_tokens // size) - each.held_blocks)
        count = len(decodes)
        load = StepLoad(count, contexts, 0.0, count)
        alone_s = self.times.seconds(load)
        prompts += view.arriving
        reading = self._reading
        if decodes:
            limit_s, hard_s = reading.limit_s(alone_s), reading.hard_limit_s()
            starved_s = reading.starved_limit_s(alone_s)
        elif prompts:
            limit_s = hard_s = starved_s = reading.prompt_limit_s(prompts, view.now_s)
        else:
            limit_s = self._calm_limit_s(runs_through=view.runs_through)
            hard_s = starved_s = limit_s
        reclaimable = sum(map(self._freed_by, offline)) if prompts else 0
        kept_back = self._settings.starved_tokens if keeps_back and prompts else 0
        room = view.max_tokens - count - kept_back
        prompt_tokens = arriving_count = 0
        for each in prompts:
            tokens = self._prompt_tokens(load, each, room, limit_s, is_first=not prompt_tokens)
            # An arriving prompt needs room for all of it, as engines admit it only then.
            end = each.computed_tokens + tokens if each.held_blocks else each.known_tokens
            need = max(0, -(-end // size) - each.held_blocks)
            if tokens <= 0 or need > free_blocks + reclaimable:
                break
            load = load.and_chunk(tokens, each.computed_tokens)
            free_blocks -= need
            room -= tokens
            prompt_tokens += tokens
            arriving_count += not each.held_blocks
            if tokens < each.pending_tokens:
                # The engine hands tokens out in order: none behind a prompt that wants more.
                break
        room += kept_back
        if prompts and decodes and not reading.joins_prompts:
            limit_s = starved_s = 0.0
        slots = view.max_running - len(view.running) - arriving_count
        is_calm = not prompts and not decodes
        if is_calm:
            room = min(view.max_tokens, self._offline_step_tokens)
        limits = limit_s, hard_s, starved_s, limit_s, reading.own_s(alone_s)
        step = StepBudget(load, *limits, room, free_blocks, slots, bool(prompts), is_calm)
        return step, count + prompt_tokens

    def _prompt_tokens(
        self, load: StepLoad, prompt: CoServedRequest, room: int, limit_s: float, *, is_first: bool
    ) -> int:
        """Tokens of an online prompt; under a limit that bounds them the first has a block's."""
        tokens = min(prompt.pending_tokens, room)
        is_bounded = self._reading.bounds_online and self.times.basis is PredictionBasis.PROFILE
        if tokens <= 0 or not is_bounded:
            return tokens
        least = min(tokens, self._block_tokens) if is_first else 0
        fits = self.times.chunk_within(load, limit_s, 0, tokens, prompt.computed_tokens)
        return max(least, fits)

    def _take_from(
        self, step: StepBudget, offline: Sequence[CoServedRequest], urgent: set[str]
    ) -> None:
        """Step 2: victims until online requests have their blocks and slots."""
        for victim in sorted(offline, key=lambda each: self._loss(each, urgent)):
            if step.free_blocks >= 0 and step.slots >= 0:
                return
            self._preempt(step, victim)

    def _preempt(self, step: StepBudget, victim: CoServedRequest) -> None:
        """Take a request out."""
        step.preempt.append(victim.request_id)
        step.free_blocks += self._freed_by(victim)
        step.slots += 1

    def _freed_by(self, victim: CoServedRequest) -> int:
        """Blocks that come free at once with a request; those that a copy reads do later."""
        return victim.held_blocks - self.checkpoints.of(victim.request_id).copying

    def _preemptions(self, names: Sequence[str]) -> list[Preemption]:
        mode = PreemptionMode.SWAP if self._settings.swaps else PreemptionMode.RECOMPUTE
        return [Preemption(name, mode) for name in names]

    def _loss(self, request: CoServedRequest, urgent: set[str]) -> tuple[bool, float, float, float]:
        """What is lost with a victim, to be sorted by: least work for each block first."""
        saved_tokens = self.checkpoints.of(request.request_id).saved * self._block_tokens
        unsaved_tokens = max(0, request.computed_tokens - saved_tokens)
        return (
            request.request_id in urgent,
            unsaved_tokens / max(1, request.held_blocks),
            -request.finish_by_s,
            -request.arrival_s,
        )

    def _fill(
        self,
        step: StepBudget,
        offline: Sequence[CoServedRequest],
        due: set[str],
        starved: str | None,
    ) -> None:
        """Step 3: tokens for offline requests in memory; the last ones give way to the first."""
        end = len(offline)
        # Decodes of so long a context, and of any longer one, do not fit into the step.
        refused = inf
        for index, request in enumerate(offline):
            if index >= end or step.token_room <= 0:
                return
            name = request.request_id
            is_ordinary = name not in due and name != starved
            is_refused = is_ordinary and request.is_decode and request.known_tokens >= refused
            if request.is_loading or is_refused:
                continue
            tokens = self._tokens_for(step, request, due, starved)
            if not tokens and is_ordinary:
                if step.is_full(self.times):
                    return
                if request.is_decode:
                    refused = request.known_tokens
            need = self._need(request, tokens)
            while tokens and need > step.free_blocks and end - 1 > index:
                end -= 1
                self._preempt(step, offline[end])
            if need > step.free_blocks:
                has_blocks = request.held_blocks + max(0, step.free_blocks)
                tokens = has_blocks * self._block_tokens - request.computed_tokens
                need = self._need(request, tokens)
            if tokens > 0:
                step.give(request, tokens, need)

    def _need(self, request: CoServedRequest, tokens: int) -> int:
        """Blocks that a request in memory lacks for so many more tokens."""
        blocks = -(-(request.computed_tokens + tokens) // self._block_tokens)
        return max(0, blocks - request.held_blocks)

    def _tokens_for(
        self, step: StepBudget, request: CoServedRequest, due: set[str], starved: str | None
    ) -> int:
        """The most tokens that an offline request may compute in the step."""
        wanted = min(request.pending_tokens, step.token_room)
        name = request.request_id
        limit_s = step.starved_limit_s if name == starved else step.limit_s
        if name in due:
            limit_s = max(limit_s, step.hard_limit_s)
        if limit_s == NO_LIMIT or wanted <= 0:
            return max(0, wanted)
        if request.is_decode:
            load = step.load.and_decode(request.known_tokens)
            tokens = int(self.times.allows(load, limit_s, step.offline_sum + 1, step.own_s))
        else:
            context, own_s = request.computed_tokens, step.own_s
            tokens = self.times.chunk_within(
                step.load, limit_s, step.offline_sum, wanted, context, own_s
            )
        if tokens:
            step.kept_s = max(step.kept_s, limit_s)
        if name == starved and step.has_prompts:
            # Out of the prompts' share: it was kept back from them.
            tokens = max(tokens, min(wanted, self._settings.starved_tokens))
        elif step.is_calm:
            # However short the limit: an arrival waits for a step of one token nearly as long.
            tokens = max(tokens, min(wanted, self._settings.starved_tokens - step.offline_sum))
        return tokens

    def _admit(
        self,
        step: StepBudget,
        view: CoServingView,
        due: set[str],
        overdue: CoServedRequest | None,
    ) -> tuple[list[str], list[CoServedRequest]]:
        """Step 4: waiting requests that come in, and those whose checkpoints begin to load.

        The first that finds no room ends it: small requests would keep a large one out for ever.
        In a step that preempted only a starved request, for which it may have done so, comes in.
        """
        admit: list[str] = []
        loading: list[CoServedRequest] = []
        starved = None if overdue is None else overdue.request_id
        first = () if overdue is None else (overdue,)
        rest = () if step.preempt else (each for each in self.waiting if each is not overdue)
        spare = int(self._settings.spare_share * view.block_count)
        for request in chain(first, rest):
            need = -(-request.known_tokens // self._block_tokens)
            is_first = not view.running and not admit and not loading
            if (
                step.slots < 1
                or need + (0 if is_first or request is overdue else spare) > step.free_blocks
            ):
                break
            checkpoint = self.checkpoints.of(request.request_id)
            if checkpoint.copying:
                continue
            saved_tokens = checkpoint.saved * self._block_tokens
            request = request._replace(computed_tokens=saved_tokens)  # noqa: PLW2901 - as it is now
            if checkpoint.saved and self._settings.loads_in_background:
                loading.append(request)
                step.free_blocks -= need
            else:
                tokens = self._tokens_for(step, request, due, starved)
                if not tokens:
                    break
                admit.append(request.request_id)
                step.give(request, tokens, need)
            step.slots -= 1
        return admit, loading

    def _checkpointed(
        self,
        view: CoServingView,
        offline: Sequence[CoServedRequest],
        step: StepBudget,
        step_s: float,
    ) -> dict[str, int]:
        """Step 6: blocks to copy out, of the next victims first."""
        if not self._settings.checkpoints:
            return {}
        usage = 1.0 - view.free_blocks / view.block_count
        left = self._copy_out.refill(step_s, self._link_blocks_per_s(view))
        left = min(left, view.store_room_blocks)
        found: dict[str, int] = {}
        for request in offline[: -1 - self._ramp.request_count(usage, len(offline)) : -1]:
            if request.is_loading or request.request_id in step.preempt:
                continue
            one = self.checkpoints.of(request.request_id)
            full = request.computed_tokens // self._block_tokens - one.saved - one.copying
            count = min(left, full)
            if count > 0:
                found[request.request_id] = count
                left -= count
                self._copy_out.spend(count)
        return found

    def _loaded(
        self,
        view: CoServingView,
        loading: Sequence[CoServedRequest],
        beginning: Sequence[CoServedRequest],
        step_s: float,
    ) -> dict[str, int]:
        """Blocks to load in the step, for those that began first; 0 for one that only begins."""
        left = self._copy_in.refill(step_s, self._link_blocks_per_s(view))
        found: dict[str, int] = {}
        for request in (*loading, *beginning):
            saved = self.checkpoints.of(request.request_id).saved
            loaded = request.computed_tokens // self._block_tokens if request.is_loading else 0
            count = found[request.request_id] = min(left, saved - loaded)
            left -= count
            self._copy_in.spend(count)
        return found

    def _link_blocks_per_s(self, view: CoServingView) -> float:
        return self._settings.link_share * view.link_bytes_per_s / view.block_bytes
