"""Priorities alone: what a stock engine with two classes does, the baseline of co-serving.

Online requests go first wherever the engine has a choice. It has none about what is running: every
request inside computes in every step while the step has tokens, in order of admission, a waiting
request comes in only when memory is free, and only a running request that finds no block puts
others out, the last offline one first. There is no limit on the step's time and no abort.

Source: vLLM++ of ConServe, sections 3 ("Naive colocation") and 6.1: priorities, chunked prefill;
offline requests "cannot be preempted selectively", it "packs enough offline requests to make full
use of GPU memory". vLLM 0.4.2 with chunked prefill plans decodes, then prompts that have begun,
then new ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from aqua_schedulers.conserve.policy import ConservePolicy
from aqua_schedulers.conserve.views import (
    CoServedRequest,
    CoServingPlan,
    CoServingView,
    ServiceClass,
    StepUnderWay,
)


class PriorityPolicy(ConservePolicy):
    """Priorities without limits; keeps the queue and checkpoints of `ConservePolicy`."""

    def on_arrival(
        self, step: StepUnderWay, waiting: Sequence[CoServedRequest], now_s: float
    ) -> bool:
        """Nothing that runs is aborted."""
        del step, waiting, now_s
        return False

    def plan(self, view: CoServingView) -> CoServingPlan:
        """The next step, by order of admission inside and by priority at the entrance."""
        free_blocks, room = view.free_blocks, view.max_tokens
        victims = [each for each in view.running if each.service_class is ServiceClass.OFFLINE]
        preempt: list[str] = []
        offline_tokens: dict[str, int] = {}
        online_tokens = 0
        # Stable: decodes, then prompts, each by admission.
        for request in sorted(view.running, key=lambda each: not each.is_decode):
            if request.request_id in preempt or room <= 0:
                continue
            tokens = min(request.pending_tokens, room)
            need = self._need(request, tokens)
            while need > free_blocks and victims:
                victim = victims.pop()
                preempt.append(victim.request_id)
                free_blocks += victim.held_blocks
                room += offline_tokens.pop(victim.request_id, 0)
            if request.request_id in preempt:
                continue
            free_blocks -= need
            room -= tokens
            if request.service_class is ServiceClass.ONLINE:
                online_tokens += tokens
            else:
                offline_tokens[request.request_id] = tokens
        admit: list[str] = []
        slots = view.max_running - len(view.running)
        spare = int(self._settings.spare_share * view.block_count)
        waiting = () if preempt else (*view.arriving, *self.waiting)
        for request in waiting:
            need = -(-request.known_tokens // self._block_tokens)
            is_online = request.service_class is ServiceClass.ONLINE
            is_first = not view.running and not admit and not online_tokens
            left = free_blocks if is_online or is_first else free_blocks - spare
            if need > left or room <= 0 or slots < 1:
                break
            tokens = min(request.pending_tokens, room)
            if is_online:
                online_tokens += tokens
            else:
                admit.append(request.request_id)
                offline_tokens[request.request_id] = tokens
            free_blocks -= need
            room -= tokens
            slots -= 1
        return CoServingPlan(
            preempt=self._preemptions(preempt),
            online_tokens=online_tokens,
            offline_tokens=offline_tokens,
            admit=admit,
        )
