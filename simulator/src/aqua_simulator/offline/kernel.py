"""The offline engine's inner loop: continuous batching over paged, prefix-shared KV memory.

Everything is an index into flat arrays, so that a step costs what *changes* in it and not the
batch size: decoding requests sit in a ring of lists keyed by the step they will finish in, their
contexts are one running sum, and memory is counted, not placed.

What is modelled, step by step:

1. Decoding requests need one token of memory each. What is missing comes from cached prefixes that
   no request uses, oldest first; when these are gone, the latest admitted request is retracted: its
   memory is freed, its generated tokens will be computed again as prompt.
2. Decoding requests run; prefill fills the rest of the token budget, first admitted first, cut
   into chunks.
3. The clock moves by the cost formula. A request that got its last token ends; its prompt stays
   cached until memory is needed.

A prompt's nodes count as present from admission on, so that two requests of one batch compute a
shared prefix once (the paper's intra-batch sharing): prefill is first come first served, so the
request that computes it is never behind the one that reads it. A request decodes for as many steps
as it has output tokens, as in the paper's Mem(r); a real engine gets the first of them from
prefill.

Source: BlendServe section 4, "Runtime prefix tree" and "Batch scheduler"; retraction as in SGLang.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from aqua_schedulers.blendserve.prefix_cache import evict, evict_oldest, hold_path, release_path
from aqua_schedulers.compiled import compiled, compiled_part
from aqua_schedulers.linked_list import append, prepend, remove
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.state import DECODING, DONE, NO_NODE, POOLED, PREFILLING, EngineState


@compiled_part
def _make_room(state: EngineState, tokens: int) -> bool:
    """Evict cached prefixes until `tokens` more fit; False when even all of them do not do."""
    count, totals = state.counters[0], state.cache.totals[0]
    room = count.capacity_tokens - count.held_tokens - tokens
    if totals.used_tokens > room:
        return False
    while totals.present_tokens > room:
        evict_oldest(state.cache)
    return True


@compiled_part
def _missing_tokens(state: EngineState, request: int) -> tuple[int, int]:
    """Prompt tokens not in memory, and tokens of cached nodes that admission would pin."""
    cache = state.cache
    missing = 0
    pinned = 0
    node = state.leaf[request]
    while node != NO_NODE:
        if not cache.is_present[node]:
            missing += cache.tokens[node]
        elif cache.users[node] == 0:
            pinned += cache.tokens[node]
        node = cache.parent[node]
    return missing, pinned


@compiled_part
def _pin_cached(state: EngineState, request: int) -> None:
    """Move the prompt's cached nodes to the newest end, so that making room spares them."""
    cache = state.cache
    node = state.leaf[request]
    while node != NO_NODE:
        if cache.is_present[node] and cache.users[node] == 0:
            remove(cache.unused, node)
            append(cache.unused, len(cache.parent), node)
        node = cache.parent[node]


@compiled_part
def _admit(state: EngineState, request: int) -> bool:
    """Admit one request if its uncached prompt (and lost output) finds room."""
    count = state.counters[0]
    missing, pinned = _missing_tokens(state, request)
    need = missing + state.generated[request]
    in_use = state.cache.totals[0].used_tokens + count.held_tokens
    if in_use + pinned + need > count.capacity_tokens:
        return False
    if pinned > 0:
        _pin_cached(state, request)
    fits = _make_room(state, need)
    assert fits
    hold_path(state.cache, state.leaf[request])
    count.held_tokens += state.generated[request]
    if not state.was_retracted[request]:
        count.shared_tokens += state.prompt[request] - missing
    state.status[request] = PREFILLING
    state.left[request] = need
    state.position[request] = state.prompt[request] - missing
    count.prefilling_count += 1
    count.pending_prefill_tokens += need
    append(state.admitted, len(state.prompt), request)
    append(state.prefilling, len(state.prompt), request)
    return True


@compiled_part
def _leave_prefill(state: EngineState, request: int) -> None:
    remove(state.prefilling, request)
    state.counters[0].prefilling_count -= 1


@compiled_part
def _enter_decode(state: EngineState, request: int) -> None:
    _leave_prefill(state, request)
    count = state.counters[0]
    step = count.step
    state.status[request] = DECODING
    state.began[request] = step
    count.decoding_count += 1
    count.logical_kv_tokens += state.prompt[request] + state.generated[request]
    prepend(
        state.due,
        _due_list(state, step + state.output[request] - state.generated[request]),
        request,
    )


@compiled_part
def _due_list(state: EngineState, step: int) -> int:
    """The sentinel of the list of requests that finish in a step."""
    count = len(state.prompt)
    return count + step % (len(state.due) - count)


@compiled_part
def _retract_latest(state: EngineState) -> None:
    """Throw the latest admitted request out of memory."""
    count = state.counters[0]
    request = state.admitted[len(state.prompt)].before
    if state.status[request] == DECODING:
        remove(state.due, request)
        # Steps `began + 1 .. STEP - 1` gave it tokens; the present step has not.
        gained = count.step - 1 - state.began[request]
        held = state.generated[request] + gained
        state.generated[request] = held
        count.decoding_count -= 1
        count.logical_kv_tokens -= state.prompt[request] + held
        count.held_tokens -= held
    else:
        _leave_prefill(state, request)
        count.pending_prefill_tokens -= state.left[request]
        count.held_tokens -= state.generated[request]
    remove(state.admitted, request)
    release_path(state.cache, state.leaf[request])
    if state.left[request] > 0 and state.status[request] == PREFILLING:
        _drop_uncomputed(state, request)
    state.status[request] = POOLED
    state.was_retracted[request] = 1
    state.retracted[count.retracted_count] = request
    count.retracted_count += 1
    count.retraction_count += 1


@compiled_part
def _drop_uncomputed(state: EngineState, request: int) -> None:
    """Forget the prompt nodes that a retracted request did not finish computing.

    The request was the latest admitted, so none behind it reads them; those that a request
    before it uses are that one's to compute.
    """
    cache = state.cache
    node = state.leaf[request]
    left = state.left[request] - state.generated[request]
    while node != NO_NODE and left > 0:
        if cache.users[node] > 0:
            break
        evict(cache, node)
        left -= cache.tokens[node]
        node = cache.parent[node]


@compiled_part
def _prefill(state: EngineState, budget: int) -> tuple[int, float]:
    """Compute prompt chunks up to `budget` tokens; returns tokens and sum of b^2 - a^2."""
    count = state.counters[0]
    sentinel = len(state.prompt)
    done = 0
    squares = 0.0
    while done < budget and state.prefilling[sentinel].after != sentinel:
        request = state.prefilling[sentinel].after
        chunk = min(state.left[request], budget - done)
        start = state.position[request]
        state.position[request] = start + chunk
        state.left[request] -= chunk
        done += chunk
        squares += (2.0 * start + chunk) * chunk
        if state.left[request] > 0:
            break
        _enter_decode(state, request)
    # Prompts that were cached whole have nothing to compute and start at once.
    request = state.prefilling[sentinel].after
    while request != sentinel and state.left[request] == 0:
        _enter_decode(state, request)
        request = state.prefilling[sentinel].after
    count.pending_prefill_tokens -= done
    count.computed_tokens += done
    return done, squares


@compiled_part
def _finish_due(state: EngineState) -> None:
    count = state.counters[0]
    sentinel = _due_list(state, count.step)
    request = state.due[sentinel].after
    while request != sentinel:
        after = state.due[request].after
        remove(state.due, request)
        state.status[request] = DONE
        state.finish_s[request] = count.now_s
        count.decoding_count -= 1
        count.logical_kv_tokens -= state.prompt[request] + state.output[request]
        count.held_tokens -= state.output[request]
        remove(state.admitted, request)
        release_path(state.cache, state.leaf[request])
        state.finished[count.finished_count] = request
        count.finished_count += 1
        count.done_count += 1
        request = after


@compiled_part
def _step(state: EngineState, budget: int, cost: StepCost, usage_stride: int) -> None:
    count = state.counters[0]
    count.step += 1
    while not _make_room(state, count.decoding_count):
        _retract_latest(state)
    decoding = count.decoding_count
    count.held_tokens += decoding
    count.logical_kv_tokens += decoding
    resident = state.cache.totals[0].present_tokens + count.held_tokens
    count.peak_resident_tokens = max(count.peak_resident_tokens, resident)
    read_tokens = count.logical_kv_tokens
    prefilled, squares = _prefill(state, max(0, budget - decoding))
    tokens = decoding + prefilled
    count.computed_tokens += decoding
    linear = cost.linear_s_per_token * tokens
    if cost.linear_floor_s > 0.0:
        power = cost.linear_exponent
        linear = (cost.linear_floor_s**power + linear**power) ** (1.0 / power)
    compute = linear + cost.prefill_s_per_square_token * squares
    memory = cost.decode_s_per_kv_token * read_tokens
    spent = max(compute, memory) + cost.interference * min(compute, memory) + cost.overhead_s
    count.now_s += spent
    count.compute_s += compute
    count.memory_s += memory
    row = state.usage[min((count.step - 1) // usage_stride, len(state.usage) - 1)]
    row.step_count += 1
    row.compute_s += compute
    row.memory_s += memory
    _finish_due(state)


@compiled_part
def _admit_in_turn(state: EngineState, admit: Int32[np.ndarray, " admit"]) -> bool:
    """Admit from the front until one is refused; False, and stuck, if then nothing runs."""
    count = state.counters[0]
    count.finished_count = 0
    count.retracted_count = 0
    count.admitted_count = 0
    for request in admit:
        assert state.status[request] == POOLED
        if not _admit(state, request):
            break
        count.admitted_count += 1
    if count.decoding_count + count.prefilling_count == 0:
        count.is_stuck = 1
        return False
    return True


@compiled_part
def take_step(
    state: EngineState,
    admit: Int32[np.ndarray, " admit"],
    budget: int,
    cost: StepCost,
    usage_stride: int,
) -> bool:
    """Admit from the front of `admit`, and take one step; whether a policy needs to hear of it.

    It need not where all of `admit` were admitted, none ended and none was thrown out.
    """
    if not _admit_in_turn(state, admit):
        return True
    count = state.counters[0]
    _step(state, budget, cost, usage_stride)
    count.used_tokens = count.held_tokens + state.cache.totals[0].used_tokens
    happened = count.finished_count + count.retracted_count > 0
    return bool(happened or count.admitted_count < len(admit))


@compiled
def advance(
    state: EngineState,
    admit: Int32[np.ndarray, " admit"],
    budget: int,
    until_event: bool,  # noqa: FBT001 - compiled code takes arguments by position
    cost: StepCost,
    usage_stride: int,
) -> None:
    """Admit from the front of `admit`, then take one step, or steps until something happens.

    The engine is stuck if nothing runs although the first of `admit` was refused or there was none:
    the policy waits for an event that cannot come.
    """
    if not _admit_in_turn(state, admit):
        return
    count = state.counters[0]
    had_prefill = count.prefilling_count > 0
    while True:
        _step(state, budget, cost, usage_stride)
        happened = count.finished_count + count.retracted_count > 0
        idle = count.decoding_count + count.prefilling_count == 0
        prefilled = had_prefill and count.prefilling_count == 0
        if not until_event or happened or idle or prefilled:
            count.used_tokens = count.held_tokens + state.cache.totals[0].used_tokens
            return
