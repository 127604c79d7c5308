"""One engine of a fleet: plans steps as `serving.engine` does, and decodes between events at once.

The rules are those of `serving.engine.Engine`, step for step: the token budget, running requests
first, admission while a whole prompt fits, preemption of the latest, steps planned one ahead. What
is different is that nothing is done while nothing happens. Where a batch only decodes and no
request waits that could come in, the next steps differ by their contexts alone, which grow by one
token for each request. Step times are straight lines in contexts, so how long j such steps take is
a parabola in j, and how many of them were planned before a moment is its root.

A run of such steps ends with the first request's last token, the first block that memory does not
have, or the time slice of the fair policy. An arrival or a loan cuts it short: what was planned
before that moment stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

import numpy as np
from jaxtyping import Int32

from aqua_schedulers.compiled import compiled_part
from aqua_simulator.fleet.fair import begin_step, decide, note_admission, preempt, slice_steps
from aqua_simulator.fleet.state import (
    NONE,
    RUNNING,
    VACANT,
    WAITING,
    ClockRecord,
    EngineRecord,
    FleetState,
    SlotRecord,
)
from aqua_simulator.fleet.waiting_list import blocks_for, dequeue
from aqua_simulator.serving.setup import BLOCK_TOKENS

Slots = Sequence[SlotRecord]
Places = Int32[np.ndarray, " places"]


@compiled_part
def linear_s(engine: EngineRecord, tokens: int) -> float:
    """Seconds of a step of so many tokens, without attention and head, beside no copies."""
    if engine.power == 1.0:
        return float(engine.floor_s + engine.token_s * tokens)
    power = engine.power
    return float((engine.floor_s**power + (engine.token_s * tokens) ** power) ** (1.0 / power))


@compiled_part
def slowed_s(engine: EngineRecord, spent_s: float, tokens: int) -> float:
    """Seconds of a step that takes so many beside no copies, beside those of the moment."""
    return float(spent_s * engine.slowdown + engine.shared_token_s * tokens)


@compiled_part
def extra_s(engine: EngineRecord, steps: int) -> float:
    """Seconds of the first so many steps of a run."""
    pairs = steps * engine.extra_context_tokens + engine.extra_count * (steps * (steps - 1) // 2)
    return float(steps * engine.extra_base_s + engine.context_s * engine.slowdown * pairs)


@compiled_part
def extra_planned(engine: EngineRecord, now_s: float) -> int:
    """Steps of the run that were planned before that moment: each one step ahead."""
    if engine.extra_steps == 0 or engine.extra_plan_s >= now_s:
        return 0
    passed_s = now_s - engine.extra_start_s
    if passed_s <= 0.0:
        return 1
    # Of a s + b s^2 = passed, the root.
    context_s = engine.context_s * engine.slowdown
    curve = 0.5 * context_s * engine.extra_count
    slope = engine.extra_base_s + context_s * engine.extra_context_tokens - curve
    if curve * passed_s > 1e-12 * slope * slope:
        steps = int((sqrt(slope * slope + 4.0 * curve * passed_s) - slope) / (2.0 * curve))
    else:
        steps = int(passed_s / slope)
    steps = max(0, steps)
    while steps > 0 and extra_s(engine, steps) >= passed_s:
        steps -= 1
    while steps + 2 < engine.extra_steps and extra_s(engine, steps + 1) < passed_s:
        steps += 1
    return min(steps + 2, engine.extra_steps)


@compiled_part
def settle(engine: EngineRecord, running: Places, slots: Slots, now_s: float) -> None:
    """Let the requests of a run have what was planned of it before that moment, and end it."""
    if engine.extra_steps == 0:
        return
    whole = engine.extra_steps
    steps = whole if engine.previous_end_s <= now_s else extra_planned(engine, now_s)
    if steps < whole:
        engine.end_s = engine.extra_start_s + extra_s(engine, steps)
        engine.previous_end_s = engine.extra_plan_s
        if steps > 0:
            engine.previous_end_s = engine.extra_start_s + extra_s(engine, steps - 1)
    engine.extra_steps = 0
    if steps == 0:
        return
    engine.busy_s += extra_s(engine, steps)
    engine.step_count += steps
    engine.token_count += steps * engine.extra_count
    engine.elapsed_steps += steps
    engine.backlog_tokens = max(0, engine.backlog_tokens - steps * engine.token_budget)
    for place in range(engine.running_count):
        slot = slots[running[place]]
        slot.computed_tokens += steps
        slot.emitted_tokens += steps
        need = blocks_for(slot.computed_tokens) - slot.block_count
        if need > 0:
            engine.taken_blocks += need
            slot.block_count += need
        if slot.emitted_tokens == slot.output_tokens:
            slot.last_s = engine.end_s
            engine.finishing_count += 1


@compiled_part
def free_blocks(engine: EngineRecord, now_s: float) -> int:
    """Free blocks at that moment; those of a run that goes on to about a block for each request."""
    free = engine.given_blocks - engine.taken_blocks
    if engine.extra_steps:
        free -= engine.extra_count * extra_planned(engine, now_s) // BLOCK_TOKENS
    return max(0, free)


@compiled_part
def _finish(fleet: FleetState, number: int, index: int) -> None:
    """A request has its last token: what its user saw is written down."""
    slot = fleet.slots[index]
    request = slot.request
    fleet.ttft_s[request] = slot.first_s - slot.arrival_s
    if slot.output_tokens > 1:
        fleet.tpot_s[request] = (slot.last_s - slot.first_s) / (slot.output_tokens - 1)
    fleet.is_served[request] = True
    fleet.request_count[number] -= 1
    fleet.engines[number].has_changed = 1
    slot.phase = VACANT
    slot.after = fleet.clock[0].first_vacant
    fleet.clock[0].first_vacant = index


@compiled_part
def deliver(fleet: FleetState, number: int, now_s: float) -> None:
    """End the requests whose last token has come."""
    engine, slots = fleet.engines[number], fleet.slots
    if engine.finishing_count:
        running = fleet.running[number]
        kept = 0
        for place in range(engine.running_count):
            index = running[place]
            slot = slots[index]
            if slot.emitted_tokens >= slot.output_tokens and slot.last_s <= now_s:
                engine.given_blocks += slot.block_count
                engine.finishing_count -= 1
                _finish(fleet, number, index)
            else:
                running[kept] = index
                kept += 1
        engine.running_count = kept
    if engine.left_count:
        # Preempted after its last token was planned: nothing is left to compute.
        index = engine.first_left
        while index != NONE:
            after = slots[index].left_after
            slot = slots[index]
            if slot.emitted_tokens >= slot.output_tokens and slot.last_s <= now_s:
                dequeue(engine, slots, index)
                engine.store_used_tokens -= slot.paged_tokens
                engine.left_count -= 1
                _finish(fleet, number, index)
            index = after


@compiled_part
def _grow(engine: EngineRecord, slot: SlotRecord, tokens: int) -> bool:
    """Make the request hold blocks for `tokens` in all; False, and no change, if it cannot."""
    need = blocks_for(tokens) - slot.block_count
    if need <= 0:
        return True
    if need > engine.given_blocks - engine.taken_blocks:
        return False
    engine.taken_blocks += need
    slot.block_count += need
    return True


@compiled_part
def _come_in(engine: EngineRecord, slot: SlotRecord) -> bool:
    """Give a waiting request its memory, with what is left or stored of its context."""
    known = slot.prompt_tokens + slot.emitted_tokens
    if slot.paged_tokens:
        if not _grow(engine, slot, slot.paged_tokens):
            return False
        engine.store_used_tokens -= slot.paged_tokens
        engine.copy_tokens += slot.paged_tokens
        return True
    if blocks_for(known) > engine.given_blocks - engine.taken_blocks:
        return False
    if slot.run_blocks:
        left = min(slot.run_blocks, max(0, slot.run_end - engine.taken_blocks))
        slot.run_blocks = 0
        engine.taken_blocks += left
        slot.block_count = min(left, (known - 1) // BLOCK_TOKENS)
        engine.given_blocks += left - slot.block_count
    return True


@compiled_part
def _admit(
    engine: EngineRecord,
    running: Places,
    listed: Places,
    slots: Slots,
    budget: int,
    tokens_of: Places,
) -> int:
    """Let in who may come and fits; returns the rest of the budget. Notes tokens by place."""
    place = 0
    index = engine.first_prompt
    while True:
        if engine.is_fair:
            if place >= engine.listed_count:
                break
            index = listed[place]
            place += 1
            if slots[index].phase != WAITING:
                continue
        elif index == NONE:
            break
        if budget == 0 or engine.running_count >= engine.max_running:
            break
        slot = slots[index]
        after = slot.after
        if not _come_in(engine, slot):
            break
        dequeue(engine, slots, index)
        note_admission(engine, slot)
        slot.computed_tokens = slot.block_count * BLOCK_TOKENS
        if slot.paged_tokens:
            slot.computed_tokens = slot.paged_tokens
            slot.paged_tokens = 0
        known = slot.prompt_tokens + slot.emitted_tokens
        tokens = min(known - slot.computed_tokens, budget)
        if not _grow(engine, slot, slot.computed_tokens + tokens):
            # Paged in, but no room for one more token: it runs as soon as there is.
            tokens = 0
        slot.phase = RUNNING
        tokens_of[engine.running_count] = tokens
        running[engine.running_count] = index
        engine.running_count += 1
        budget -= tokens
        index = after
    return budget


@compiled_part
def _launch(  # noqa: C901 - one walk over the batch
    engine: EngineRecord, running: Places, slots: Slots, now_s: float, tokens_of: Places
) -> bool:
    """Reckon the step's time and give out its tokens; whether it was decodes alone."""
    tokens = context = sampled = reads = decoding = 0
    pairs = 0.0
    for place in range(engine.running_count):
        given = tokens_of[place]
        if given == 0:
            continue
        slot = slots[running[place]]
        tokens += given
        if given == 1 and slot.emitted_tokens > 0:
            decoding += 1
            context += slot.computed_tokens + 1
        else:
            reads += slot.computed_tokens
            pairs += given * (slot.computed_tokens + given / 2)
        slot.computed_tokens += given
        if slot.computed_tokens == slot.prompt_tokens + slot.emitted_tokens:
            sampled += 1
    spent_s = linear_s(engine, tokens) + engine.context_s * context
    spent_s += engine.chunk_context_s * reads + engine.pair_s * pairs
    if sampled:
        spent_s += engine.head_s
    spent_s = slowed_s(engine, spent_s, tokens)
    had_copies = engine.copy_tokens > 0
    if had_copies and engine.has_store:
        copied = engine.copy_tokens * engine.kv_bytes
        spent_s += copied * engine.store_lost_s
        spent_s = max(spent_s, copied / engine.store_bytes_per_s)
        engine.copied_tokens += engine.copy_tokens
        engine.copy_tokens = 0
    engine.token_count += tokens
    start_s = max(now_s, engine.end_s)
    engine.previous_end_s = start_s
    engine.end_s = start_s + spent_s
    engine.busy_s += spent_s
    engine.step_count += 1
    for place in range(engine.running_count):
        slot = slots[running[place]]
        if tokens_of[place] == 0:
            continue
        if slot.computed_tokens == slot.prompt_tokens + slot.emitted_tokens:
            slot.emitted_tokens += 1
            if slot.emitted_tokens == 1:
                slot.first_s = engine.end_s
            if slot.emitted_tokens == slot.output_tokens:
                slot.last_s = engine.end_s
                engine.finishing_count += 1
    return decoding == tokens and not had_copies


@compiled_part
def _run_on(engine: EngineRecord, running: Places, slots: Slots, now_s: float) -> None:
    """Plan the further steps of a batch that decodes, as many as differ by their contexts alone."""
    steps = 1 << 40
    if engine.is_fair and engine.waiting_count:
        steps = slice_steps(engine) - 1 - engine.elapsed_steps
    context = 0
    for place in range(engine.running_count):
        slot = slots[running[place]]
        steps = min(steps, slot.output_tokens - slot.emitted_tokens)
        context += slot.computed_tokens + 1
    free = engine.given_blocks - engine.taken_blocks
    low = 0
    while low < steps:
        middle = steps if low == 0 else (low + steps + 1) // 2
        need = 0
        for place in range(engine.running_count):
            slot = slots[running[place]]
            need += blocks_for(slot.computed_tokens + middle) - slot.block_count
        if need <= free:
            low = middle
        else:
            steps = middle - 1
    if low < 1:
        return
    engine.extra_steps = low
    engine.extra_count = engine.running_count
    engine.extra_context_tokens = context
    base_s = linear_s(engine, engine.running_count) + engine.head_s
    engine.extra_base_s = slowed_s(engine, base_s, engine.running_count)
    engine.extra_plan_s = max(now_s, engine.previous_end_s)
    engine.extra_start_s = engine.end_s
    engine.previous_end_s = engine.extra_start_s + extra_s(engine, low - 1)
    engine.end_s = engine.extra_start_s + extra_s(engine, low)


@compiled_part
def _plan(
    clock: ClockRecord,
    engine: EngineRecord,
    running: Places,
    listed: Places,
    slots: Slots,
    now_s: float,
    tokens_of: Places,
) -> bool:
    """Plan the next step, and those after it that differ by contexts alone; False for none."""
    if engine.is_fair and begin_step(engine):
        decide(clock, engine, running, listed, slots)
    budget = engine.max_tokens
    has_preempted = False
    has_chosen = False
    is_even = True
    place = 0
    while place < engine.running_count:
        tokens_of[place] = 0
        slot = slots[running[place]]
        pending = slot.prompt_tokens + slot.emitted_tokens - slot.computed_tokens
        if slot.emitted_tokens >= slot.output_tokens or budget == 0:
            is_even = False
            place += 1
            continue
        tokens = min(pending, budget)
        while not _grow(engine, slot, slot.computed_tokens + tokens):
            has_preempted = True
            last = engine.running_count - 1
            preempt(engine, running, slots, last, True, False)  # noqa: FBT003 - compiled
            if last == place:
                break
        else:
            tokens_of[place] = tokens
            budget -= tokens
            has_chosen = True
        place += 1
    if not has_preempted and engine.waiting_count:
        before = engine.running_count
        _admit(engine, running, listed, slots, budget, tokens_of)
        for place in range(before, engine.running_count):
            has_chosen = has_chosen or tokens_of[place] > 0
            is_even = False
    if not has_chosen:
        return False
    is_even = _launch(engine, running, slots, now_s, tokens_of) and is_even
    if is_even and not has_preempted and engine.finishing_count + engine.left_count == 0:
        _run_on(engine, running, slots, now_s)
    return True


@compiled_part
def plan_ahead(fleet: FleetState, number: int, now_s: float, tokens_of: Places) -> float:
    """Plan until two steps are in flight; returns when the engine's next event is."""
    engine, running, listed = fleet.engines[number], fleet.running[number], fleet.listed[number]
    clock = fleet.clock[0]
    while engine.previous_end_s <= now_s:
        if not _plan(clock, engine, running, listed, fleet.slots, now_s, tokens_of):
            break
    if engine.previous_end_s > now_s:
        return float(engine.previous_end_s)
    return float(engine.end_s) if engine.end_s > now_s else inf
