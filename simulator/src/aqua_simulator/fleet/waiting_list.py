"""Waiting requests of an engine: two lists by the policy's order, and one by when they left memory.

Under first come, first served all are in the list of prompts, by arrival; requests that were
preempted come back to where their arrival puts them. The fair policy parts prompts from decodes,
and has decodes in their first stint before the others (`aqua_schedulers.cfs.ranking`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aqua_schedulers.compiled import compiled_part
from aqua_simulator.fleet.state import NONE, WAITING, EngineRecord, SlotRecord
from aqua_simulator.serving.setup import BLOCK_TOKENS

STINT_TOKENS: Final = 4
"""Output of each request that goes before all further output: fixed by the default of
`aqua_schedulers.cfs.registry.FairSettings`."""


@compiled_part
def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


@compiled_part
def _is_decode(engine: EngineRecord, slot: SlotRecord) -> bool:
    return engine.is_fair == 1 and slot.emitted_tokens > 0


@compiled_part
def goes_before(slot: SlotRecord, other: SlotRecord) -> bool:
    """Whether a request comes before another in a list of one phase: first stints, then arrival."""
    own = 0 < slot.emitted_tokens < STINT_TOKENS
    others = 0 < other.emitted_tokens < STINT_TOKENS
    if own != others:
        return own
    return slot.request < other.request


@compiled_part
def enqueue(  # noqa: PLR0912 - a list has two ends, and there are three
    engine: EngineRecord, slots: Sequence[SlotRecord], index: int
) -> None:
    """A request waits from now on."""
    slot = slots[index]
    slot.phase = WAITING
    engine.waiting_count += 1
    decodes = _is_decode(engine, slot)
    at = engine.last_decode if decodes else engine.last_prompt
    if engine.is_fair == 1:
        while at != NONE and goes_before(slot, slots[at]):
            at = slots[at].before
    else:
        while at != NONE and slot.request < slots[at].request:
            at = slots[at].before
    if at == NONE:
        after = engine.first_decode if decodes else engine.first_prompt
        if decodes:
            engine.first_decode = index
        else:
            engine.first_prompt = index
    else:
        after = slots[at].after
        slots[at].after = index
    slot.before, slot.after = at, after
    if after != NONE:
        slots[after].before = index
    elif decodes:
        engine.last_decode = index
    else:
        engine.last_prompt = index
    slot.left_slice = engine.slice_index
    slot.left_before, slot.left_after = engine.last_left, NONE
    if engine.last_left != NONE:
        slots[engine.last_left].left_after = index
    else:
        engine.first_left = index
    engine.last_left = index


@compiled_part
def dequeue(engine: EngineRecord, slots: Sequence[SlotRecord], index: int) -> None:
    """A request no longer waits."""
    slot = slots[index]
    engine.waiting_count -= 1
    decodes = _is_decode(engine, slot)
    before, after = slot.before, slot.after
    if before != NONE:
        slots[before].after = after
    elif decodes:
        engine.first_decode = after
    else:
        engine.first_prompt = after
    if after != NONE:
        slots[after].before = before
    elif decodes:
        engine.last_decode = before
    else:
        engine.last_prompt = before
    before, after = slot.left_before, slot.left_after
    if before != NONE:
        slots[before].left_after = after
    else:
        engine.first_left = after
    if after != NONE:
        slots[after].left_before = before
    else:
        engine.last_left = before
