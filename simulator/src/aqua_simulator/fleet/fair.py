"""The fair policy `first-token`, compiled: which requests hold memory for the next time slice.

The decisions of `aqua_schedulers.cfs` under `FirstTokenFirst` with its default settings and without
tenants or weights, read there for the reasons; a test holds both to the same answers, on histories
drawn at random. It is compiled because a fleet decides millions of times a day.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

import numpy as np
from jaxtyping import Int32, Int64

from aqua_schedulers.compiled import compiled_part
from aqua_simulator.fleet.state import (
    NONE,
    RUNNING,
    WAITING,
    ClockRecord,
    EngineRecord,
    SlotRecord,
)
from aqua_simulator.fleet.waiting_list import STINT_TOKENS, blocks_for, enqueue, goes_before
from aqua_simulator.serving.setup import BLOCK_TOKENS

# Fixed by the defaults of `aqua_schedulers.cfs.registry.FairSettings`.
SLICE_STEPS: Final = 5
PATIENCE_SLICES: Final = 1000

LONG_SLICE_STEPS: Final = 8 * SLICE_STEPS
"""While no prompt waits: fixed by `aqua_schedulers.cfs.ranking.LONG_SLICE_FACTOR`."""

_LATER: Final = 1 << 40
"""Fixed: above every index of a request, so that first stints sort before it."""

Slots = Sequence[SlotRecord]


@compiled_part
def slice_steps(engine: EngineRecord) -> int:
    """Steps until running requests give way again."""
    return SLICE_STEPS if engine.first_prompt != NONE else LONG_SLICE_STEPS


@compiled_part
def begin_step(engine: EngineRecord) -> bool:
    """Called once per step; False: the last decision stands."""
    engine.elapsed_steps += 1
    engine.backlog_tokens = max(0, engine.backlog_tokens - engine.token_budget)
    if engine.waiting_count == 0:
        return False
    return engine.has_changed == 1 or engine.elapsed_steps >= slice_steps(engine)


@compiled_part
def note_admission(engine: EngineRecord, slot: SlotRecord) -> None:
    """A waiting request holds blocks now; called while it still is as it waited."""
    known = slot.prompt_tokens + slot.emitted_tokens
    engine.backlog_tokens += max(1, known - slot.paged_tokens)
    if slot.emitted_tokens == 0:
        grant = float(slot.prompt_tokens)
        most = max(grant, float(engine.token_budget))
        engine.recompute_tokens = min(engine.recompute_tokens + grant, most)


@compiled_part
def preempt(
    engine: EngineRecord,
    running: Int32[np.ndarray, " places"],
    slots: Slots,
    place: int,
    swaps: bool,  # noqa: FBT001 - compiled functions take no keywords
    is_decided: bool,  # noqa: FBT001
) -> None:
    """Take a running request out of memory; its context is stored if there is a store with room."""
    index = running[place]
    for later in range(place, engine.running_count - 1):
        running[later] = running[later + 1]
    engine.running_count -= 1
    engine.preemption_count += 1
    slot = slots[index]
    tokens = slot.computed_tokens
    paged = (
        swaps
        and engine.has_store == 1
        and tokens > 0
        and engine.store_used_tokens + tokens <= engine.store_tokens
    )
    if is_decided:
        slot.floor_output, slot.floor_computed = slot.emitted_tokens, tokens
    engine.given_blocks += slot.block_count
    slot.run_blocks = 0
    if paged:
        engine.store_used_tokens += tokens
        slot.paged_tokens = tokens
        engine.copy_tokens += tokens
    else:
        slot.paged_tokens = 0
        # Whole blocks of its context, the last that it gives back.
        slot.run_blocks = min(tokens // BLOCK_TOKENS, slot.block_count)
        slot.run_end = engine.given_blocks
    slot.block_count = slot.computed_tokens = 0
    if slot.emitted_tokens > slot.floor_output or slot.paged_tokens > slot.floor_computed:
        slot.floor_output = max(slot.floor_output, slot.emitted_tokens)
        slot.floor_computed = max(slot.floor_computed, slot.paged_tokens)
    if slot.emitted_tokens >= slot.output_tokens:
        engine.finishing_count -= 1
        engine.left_count += 1
    enqueue(engine, slots, index)
    if not is_decided:
        engine.has_changed = 1


@compiled_part
def _swaps(engine: EngineRecord, slot: SlotRecord, room: int, has_rates: bool) -> bool:  # noqa: FBT001
    """Whether a victim's context is stored, which with measured rates has to be the cheaper way."""
    if slot.block_count > room:
        return False
    if not has_rates:
        return True
    block_bytes = engine.kv_bytes * BLOCK_TOKENS
    swap_s = 2 * slot.block_count * block_bytes / engine.store_bytes_per_s
    return bool(swap_s <= slot.computed_tokens / engine.prefill_tokens_per_s)


@compiled_part
def _growth(slot: SlotRecord) -> int:
    """Blocks that a request takes beside those held or missing until the slice's end."""
    known = slot.prompt_tokens + slot.emitted_tokens
    has = known if slot.phase == WAITING else slot.computed_tokens
    return max(0, blocks_for(known + SLICE_STEPS) - blocks_for(has))


@compiled_part
def _by_rank(slots: Slots, chosen: Int64[np.ndarray, " slots"]) -> Int64[np.ndarray, " slots"]:
    """Running requests of a phase, first stints first, then by arrival."""
    keys = np.empty(len(chosen), np.int64)
    for place in range(len(chosen)):
        slot = slots[chosen[place]]
        is_first = 0 < slot.emitted_tokens < STINT_TOKENS
        keys[place] = slot.request + (0 if is_first else _LATER)
    return chosen[np.argsort(keys)]


@compiled_part
def _choose(  # noqa: C901, PLR0912, PLR0915 - one walk over lists; its state is its variables
    clock: ClockRecord,
    engine: EngineRecord,
    slots: Slots,
    preemptible: Int64[np.ndarray, " slots"],
    free: int,
    places: int,
    held: int,
    backlog_tokens: int,
) -> Int64[np.ndarray, " admitted"]:
    """Give out a slice's memory; returns who is admitted, in order. Who stays is marked.

    Args:
        free, places: Blocks and running places to give out.
        held: Requests that stay whatever is decided.
    """
    clock.mark += 1
    mark = clock.mark
    admitted = np.empty(engine.max_running + 1, np.int64)
    count = 0
    is_empty = held == 0
    is_closed = False
    index = engine.first_left
    since = engine.slice_index - PATIENCE_SLICES
    while index != NONE and slots[index].left_slice <= since and not is_closed:
        need = blocks_for(slots[index].prompt_tokens + slots[index].emitted_tokens)
        growth = _growth(slots[index])
        if is_empty:
            growth = max(0, min(growth, free - need))
        if need + growth > free or places < 1:
            is_closed = True
            break
        free -= need + growth
        places -= 1
        is_empty = False
        slots[index].mark = mark
        admitted[count] = index
        count += 1
        index = slots[index].left_after
    is_decode = np.empty(len(preemptible), np.bool_)
    for place in range(len(preemptible)):
        is_decode[place] = slots[preemptible[place]].emitted_tokens > 0
    ranked_prompts = _by_rank(slots, preemptible[~is_decode])
    ranked_decodes = _by_rank(slots, preemptible[is_decode])
    share = max(1, engine.token_budget - engine.running_count)
    prompt_tokens = float(share * SLICE_STEPS - backlog_tokens)
    next_prompt, next_decode = engine.first_prompt, engine.first_decode
    place_prompt = place_decode = 0
    admits_prompts = admits_decodes = True
    for turn in range(3):
        with_decodes = turn == 1
        left_tokens = prompt_tokens if turn == 0 else inf
        if left_tokens <= 0.0:
            continue
        ranked = ranked_decodes if with_decodes else ranked_prompts
        place = place_decode if with_decodes else place_prompt
        outer = next_decode if with_decodes else next_prompt
        admits = admits_decodes if with_decodes else admits_prompts
        while place < len(ranked) or (outer != NONE and admits):
            from_running = place < len(ranked) and (
                outer == NONE or not admits or goes_before(slots[ranked[place]], slots[outer])
            )
            if from_running:
                index = ranked[place]
                place += 1
                slot = slots[index]
                fits = False
                if slot.block_count <= free:
                    need = slot.block_count + _growth(slot)
                    fits = need <= free and places >= 1
                    if fits:
                        free -= need
                        places -= 1
                        is_empty = False
                        slot.mark = mark
            else:
                index = outer
                slot = slots[index]
                outer = slot.after
                if slot.mark == mark:
                    continue
                need = blocks_for(slot.prompt_tokens + slot.emitted_tokens)
                growth = _growth(slot)
                if is_empty:
                    growth = max(0, min(growth, free - need))
                fits = not is_closed and need + growth <= free and places >= 1
                if fits:
                    free -= need + growth
                    places -= 1
                    is_empty = False
                    slot.mark = mark
                    admitted[count] = index
                    count += 1
                admits = fits
            if fits:
                computed = slot.computed_tokens if slot.phase == RUNNING else slot.paged_tokens
                left_tokens -= max(1, slot.prompt_tokens - computed)
                if left_tokens <= 0.0:
                    break
        if with_decodes:
            place_decode, next_decode, admits_decodes = place, outer, admits
        else:
            place_prompt, next_prompt, admits_prompts = place, outer, admits
    return admitted[:count]


@compiled_part
def _list(
    engine: EngineRecord,
    listed: Int32[np.ndarray, " places"],
    slots: Slots,
    admitted: Int64[np.ndarray, " admitted"],
) -> None:
    """The decision's admissions as the engine takes them: decodes before prompts."""
    count = 0
    for wants_decodes in (True, False):
        for index in admitted:
            if (slots[index].emitted_tokens > 0) == wants_decodes:
                listed[count] = index
                count += 1
    engine.listed_count = count


@compiled_part
def decide(  # noqa: C901, PLR0912, PLR0915 - the policy's method, with what it calls inlined
    clock: ClockRecord,
    engine: EngineRecord,
    running: Int32[np.ndarray, " places"],
    listed: Int32[np.ndarray, " places"],
    slots: Slots,
) -> None:
    """Choose whom to preempt and to admit, and preempt; called when `begin_step` said True."""
    engine.has_changed = 0
    engine.token_budget = engine.max_tokens
    free = engine.given_blocks - engine.taken_blocks
    places = engine.max_running - engine.running_count
    none = np.empty(0, np.int64)
    admitted = none
    room = free
    if engine.running_count:
        room -= blocks_for(engine.backlog_tokens + engine.running_count * SLICE_STEPS)
    if engine.running_count == 0 or (room >= 0 and places >= 1):
        count, tokens = engine.running_count, engine.backlog_tokens
        admitted = _choose(clock, engine, slots, none, room, places, count, tokens)
    is_over = engine.elapsed_steps >= slice_steps(engine)
    if len(admitted) == engine.waiting_count or not is_over:
        _list(engine, listed, slots, admitted)
        return
    engine.slice_index += 1
    engine.elapsed_steps = 0
    chosen = np.empty(engine.running_count, np.int64)
    is_chosen = np.zeros(engine.running_count, np.bool_)
    has_rates = engine.has_store == 1 and engine.recompute_tokens > 0.0
    store_room = 0
    if engine.has_store == 1:
        store_room = (engine.store_tokens - engine.store_used_tokens) // BLOCK_TOKENS
    count = 0
    keys = np.empty(engine.running_count, np.int64)
    for place in range(engine.running_count):
        slot = slots[running[place]]
        got_further = slot.emitted_tokens > slot.floor_output or (
            slot.emitted_tokens == slot.floor_output and slot.computed_tokens > slot.floor_computed
        )
        if slot.emitted_tokens < slot.output_tokens and got_further:
            chosen[count] = place
            keys[count] = -slot.computed_tokens
            count += 1
    # The store's room goes to the longest contexts.
    longest = chosen[:count][np.argsort(keys[:count], kind="mergesort")]
    if engine.recompute_tokens <= 0.0:
        # Only what the store takes may leave.
        left = store_room
        kept = 0
        for place in longest:
            slot = slots[running[place]]
            if _swaps(engine, slot, left, False):  # noqa: FBT003 - compiled
                left -= slot.block_count
                longest[kept] = place
                kept += 1
        longest = longest[:kept]
    freed = 0
    preemptible = np.empty(len(longest), np.int64)
    for number in range(len(longest)):
        place = longest[number]
        is_chosen[place] = True
        preemptible[number] = running[place]
        freed += slots[running[place]].block_count
    staying = engine.running_count - len(preemptible)
    room = free + freed
    backlog_tokens = 0
    if staying:
        for place in range(engine.running_count):
            if not is_chosen[place]:
                slot = slots[running[place]]
                room -= _growth(slot)
                known = slot.prompt_tokens + slot.emitted_tokens
                backlog_tokens += max(1, known - slot.computed_tokens)
    admitted = _choose(
        clock,
        engine,
        slots,
        preemptible,
        room,
        places + len(preemptible),
        staying,
        backlog_tokens,
    )
    if len(admitted) == 0:
        engine.listed_count = 0
        return
    mark, left = clock.mark, store_room
    for number in range(len(preemptible)):
        index = int(preemptible[number])
        slot = slots[index]
        if slot.mark == mark:
            continue
        swaps = _swaps(engine, slot, left, has_rates)
        if swaps:
            left -= slot.block_count
        else:
            engine.recompute_tokens -= slot.computed_tokens
        place = 0
        while running[place] != index:
            place += 1
        preempt(engine, running, slots, place, swaps, True)  # noqa: FBT003 - compiled
    _list(engine, listed, slots, admitted)
    # A prompt admitted earlier must not take the token of a decode resumed later.
    ordered = np.empty(engine.running_count, np.int32)
    count = 0
    for wants_decodes in (True, False):
        for place in range(engine.running_count):
            if (slots[running[place]].emitted_tokens > 0) == wants_decodes:
                ordered[count] = running[place]
                count += 1
    for place in range(engine.running_count):
        running[place] = ordered[place]
