"""The offline engine's inner loop: continuous batching over paged, prefix-shared KV memory.

Everything is an index into flat arrays, so that a step costs what *changes* in it and not the
batch size: decoding requests sit in a ring of lists keyed by the step they will finish in, their
contexts are one running sum, and memory is counted, not placed.

What is modelled, step by step:

1. Decoding requests need one token of memory each. What is missing comes from cached prefixes that
   nobody uses, oldest first; when these are gone, the latest admitted request is retracted: its
   memory is freed, its generated tokens will be computed again as prompt.
2. Decoding requests run; prefill fills the rest of the token budget, first admitted first, cut
   into chunks.
3. The clock moves by the cost formula. A request that got its last token ends; its prompt stays
   cached until memory is needed.

A prompt's nodes count as present from admission on, so that two requests of one batch compute a
shared prefix once (the paper's intra-batch sharing): prefill is first come first served, so the
one who computes it is never behind the one who reads it. A request decodes for as many steps as
it has output tokens, as in the paper's Mem(r); a real engine gets the first of them from prefill.

Source: BlendServe section 4, "Runtime prefix tree" and "Batch scheduler"; retraction as in SGLang.
"""

from __future__ import annotations

from aqua_schedulers.compiled import compiled
from aqua_simulator.offline.cost import CostVector
from aqua_simulator.offline.state import (
    ADMITTED_COUNT,
    CACHE_NEWEST,
    CACHE_OLDEST,
    CAPACITY,
    COMPUTE,
    COMPUTED,
    DECODING,
    DECODING_COUNT,
    DONE,
    DONE_COUNT,
    EVICTABLE,
    FINISHED_COUNT,
    LATEST,
    LOGICAL_KV,
    MEMORY,
    NONE,
    NOW,
    PEAK_RESIDENT,
    PENDING_PREFILL,
    POOLED,
    PREFILL_HEAD,
    PREFILL_TAIL,
    PREFILLING,
    PREFILLING_COUNT,
    RESIDENT,
    RETRACTED_COUNT,
    RETRACTIONS,
    SHARED,
    STEP,
    USAGE_COMPUTE,
    USAGE_MEMORY,
    USAGE_RESIDENT,
    USAGE_SECONDS,
    USAGE_STEPS,
    Counters,
    EngineState,
    Int32s,
    counters,
)


@compiled
def _cache_remove(state: EngineState, node: int) -> None:
    before, after = state.cache_prev[node], state.cache_next[node]
    if before == NONE:
        state.number[CACHE_OLDEST] = after
    else:
        state.cache_next[before] = after
    if after == NONE:
        state.number[CACHE_NEWEST] = before
    else:
        state.cache_prev[after] = before
    state.number[EVICTABLE] -= state.tokens[node]


@compiled
def _cache_append(state: EngineState, node: int) -> None:
    newest = state.number[CACHE_NEWEST]
    state.cache_prev[node] = newest
    state.cache_next[node] = NONE
    if newest == NONE:
        state.number[CACHE_OLDEST] = node
    else:
        state.cache_next[newest] = node
    state.number[CACHE_NEWEST] = node
    state.number[EVICTABLE] += state.tokens[node]


@compiled
def _make_room(state: EngineState, tokens: int) -> bool:
    """Evict cached prefixes until `tokens` more fit; False when even all of them do not do.

    A parent is never released before its child, so the oldest node has no present child.
    """
    count = state.number
    if count[RESIDENT] - count[EVICTABLE] + tokens > count[CAPACITY]:
        return False
    while count[RESIDENT] + tokens > count[CAPACITY]:
        node = count[CACHE_OLDEST]
        _cache_remove(state, node)
        state.present[node] = 0
        count[RESIDENT] -= state.tokens[node]
    return True


@compiled
def _hold_path(state: EngineState, request: int) -> int:
    """Take the prompt's nodes into use; returns the tokens that were not in memory.

    The caller has made room for them.
    """
    missing = 0
    node = state.leaf[request]
    while node != NONE:
        if state.present[node] == 0:
            state.present[node] = 1
            missing += state.tokens[node]
        elif state.users[node] == 0:
            _cache_remove(state, node)
        state.users[node] += 1
        node = state.parent[node]
    state.number[RESIDENT] += missing
    return missing


@compiled
def _release_path(state: EngineState, request: int) -> None:
    node = state.leaf[request]
    while node != NONE:
        state.users[node] -= 1
        if state.users[node] == 0:
            _cache_append(state, node)
        node = state.parent[node]


@compiled
def _missing_tokens(state: EngineState, request: int) -> tuple[int, int]:
    """Prompt tokens not in memory, and tokens of cached nodes that admission would pin."""
    missing = 0
    pinned = 0
    node = state.leaf[request]
    while node != NONE:
        if state.present[node] == 0:
            missing += state.tokens[node]
        elif state.users[node] == 0:
            pinned += state.tokens[node]
        node = state.parent[node]
    return missing, pinned


@compiled
def _pin_cached(state: EngineState, request: int) -> None:
    """Move the prompt's cached nodes to the newest end, so that making room spares them."""
    node = state.leaf[request]
    while node != NONE:
        if state.present[node] == 1 and state.users[node] == 0:
            _cache_remove(state, node)
            _cache_append(state, node)
        node = state.parent[node]


@compiled
def _admit(state: EngineState, request: int) -> bool:
    """Admit one request if its uncached prompt (and lost output) finds room."""
    count = state.number
    missing, pinned = _missing_tokens(state, request)
    need = missing + state.generated[request]
    if count[RESIDENT] - count[EVICTABLE] + pinned + need > count[CAPACITY]:
        return False
    if pinned > 0:
        _pin_cached(state, request)
    fits = _make_room(state, need)
    assert fits
    _hold_path(state, request)
    count[RESIDENT] += state.generated[request]
    if not state.was_retracted[request]:
        count[SHARED] += state.prompt[request] - missing
    state.status[request] = PREFILLING
    state.left[request] = need
    state.position[request] = state.prompt[request] - missing
    count[PREFILLING_COUNT] += 1
    count[PENDING_PREFILL] += need
    latest = count[LATEST]
    state.admitted_prev[request] = latest
    state.admitted_next[request] = NONE
    if latest != NONE:
        state.admitted_next[latest] = request
    count[LATEST] = request
    tail = count[PREFILL_TAIL]
    state.prefill_prev[request] = tail
    state.prefill_next[request] = NONE
    if tail == NONE:
        count[PREFILL_HEAD] = request
    else:
        state.prefill_next[tail] = request
    count[PREFILL_TAIL] = request
    return True


@compiled
def _leave_prefill(state: EngineState, request: int) -> None:
    before, after = state.prefill_prev[request], state.prefill_next[request]
    if before == NONE:
        state.number[PREFILL_HEAD] = after
    else:
        state.prefill_next[before] = after
    if after == NONE:
        state.number[PREFILL_TAIL] = before
    else:
        state.prefill_prev[after] = before
    state.number[PREFILLING_COUNT] -= 1


@compiled
def _leave_batch(state: EngineState, request: int) -> None:
    before, after = state.admitted_prev[request], state.admitted_next[request]
    if before != NONE:
        state.admitted_next[before] = after
    if after == NONE:
        state.number[LATEST] = before
    else:
        state.admitted_prev[after] = before


@compiled
def _enter_decode(state: EngineState, request: int) -> None:
    count = state.number
    step = count[STEP]
    state.status[request] = DECODING
    state.began[request] = step
    count[DECODING_COUNT] += 1
    count[LOGICAL_KV] += state.prompt[request] + state.generated[request]
    slot = (step + state.output[request] - state.generated[request]) % len(state.ring_head)
    first = state.ring_head[slot]
    state.ring_prev[request] = NONE
    state.ring_next[request] = first
    if first != NONE:
        state.ring_prev[first] = request
    state.ring_head[slot] = request


@compiled
def _leave_ring(state: EngineState, request: int) -> None:
    before, after = state.ring_prev[request], state.ring_next[request]
    if before == NONE:
        due = state.began[request] + state.output[request] - state.generated[request]
        state.ring_head[due % len(state.ring_head)] = after
    else:
        state.ring_next[before] = after
    if after != NONE:
        state.ring_prev[after] = before


@compiled
def _retract_latest(state: EngineState) -> None:
    """Throw the latest admitted request out of memory."""
    count = state.number
    request = count[LATEST]
    if state.status[request] == DECODING:
        _leave_ring(state, request)
        # Steps `began + 1 .. STEP - 1` gave it tokens; the present step has not.
        gained = count[STEP] - 1 - state.began[request]
        held = state.generated[request] + gained
        state.generated[request] = held
        count[DECODING_COUNT] -= 1
        count[LOGICAL_KV] -= state.prompt[request] + held
        count[RESIDENT] -= held
    else:
        _leave_prefill(state, request)
        count[PENDING_PREFILL] -= state.left[request]
        count[RESIDENT] -= state.generated[request]
    _leave_batch(state, request)
    _release_path(state, request)
    if state.left[request] > 0 and state.status[request] == PREFILLING:
        _drop_uncomputed(state, request)
    state.status[request] = POOLED
    state.was_retracted[request] = 1
    state.retracted[count[RETRACTED_COUNT]] = request
    count[RETRACTED_COUNT] += 1
    count[RETRACTIONS] += 1


@compiled
def _drop_uncomputed(state: EngineState, request: int) -> None:
    """Forget the prompt nodes that a retracted request did not finish computing.

    The request was the latest admitted, so nobody behind it reads them; those that somebody
    before it uses are that one's to compute.
    """
    node = state.leaf[request]
    left = state.left[request] - state.generated[request]
    while node != NONE and left > 0:
        if state.users[node] > 0:
            break
        _cache_remove(state, node)
        state.present[node] = 0
        state.number[RESIDENT] -= state.tokens[node]
        left -= state.tokens[node]
        node = state.parent[node]


@compiled
def _prefill(state: EngineState, budget: int) -> tuple[int, float]:
    """Compute prompt chunks up to `budget` tokens; returns tokens and sum of b^2 - a^2."""
    count = state.number
    done = 0
    squares = 0.0
    while done < budget and count[PREFILL_HEAD] != NONE:
        request = count[PREFILL_HEAD]
        chunk = min(state.left[request], budget - done)
        start = state.position[request]
        state.position[request] = start + chunk
        state.left[request] -= chunk
        done += chunk
        squares += (2.0 * start + chunk) * chunk
        if state.left[request] > 0:
            break
        _leave_prefill(state, request)
        _enter_decode(state, request)
    # Prompts that were cached whole have nothing to compute and start at once.
    while count[PREFILL_HEAD] != NONE and state.left[count[PREFILL_HEAD]] == 0:
        request = count[PREFILL_HEAD]
        _leave_prefill(state, request)
        _enter_decode(state, request)
    count[PENDING_PREFILL] -= done
    count[COMPUTED] += done
    return done, squares


@compiled
def _finish_due(state: EngineState) -> None:
    count = state.number
    slot = count[STEP] % len(state.ring_head)
    request = state.ring_head[slot]
    state.ring_head[slot] = NONE
    while request != NONE:
        after = state.ring_next[request]
        state.status[request] = DONE
        state.finish_s[request] = state.time[NOW]
        count[DECODING_COUNT] -= 1
        count[LOGICAL_KV] -= state.prompt[request] + state.output[request]
        count[RESIDENT] -= state.output[request]
        _leave_batch(state, request)
        _release_path(state, request)
        state.finished[count[FINISHED_COUNT]] = request
        count[FINISHED_COUNT] += 1
        count[DONE_COUNT] += 1
        request = after


@compiled
def _step(state: EngineState, budget: int, cost: CostVector, usage_stride: int) -> None:
    count = state.number
    count[STEP] += 1
    while not _make_room(state, count[DECODING_COUNT]):
        _retract_latest(state)
    decoding = count[DECODING_COUNT]
    count[RESIDENT] += decoding
    count[LOGICAL_KV] += decoding
    count[PEAK_RESIDENT] = max(count[PEAK_RESIDENT], count[RESIDENT])
    read_tokens = count[LOGICAL_KV]
    prefilled, squares = _prefill(state, max(0, budget - decoding))
    tokens = decoding + prefilled
    count[COMPUTED] += decoding
    linear = cost.linear_s_per_token * tokens
    if cost.linear_floor_s > 0.0:
        power = cost.linear_exponent
        linear = (cost.linear_floor_s**power + linear**power) ** (1.0 / power)
    compute = linear + cost.prefill_s_per_square_token * squares
    memory = cost.decode_s_per_kv_token * read_tokens + cost.decode_s_per_sequence * decoding
    spent = max(compute, memory) + cost.interference * min(compute, memory) + cost.overhead_s
    state.time[NOW] += spent
    state.time[COMPUTE] += compute
    state.time[MEMORY] += memory
    row = state.usage[min((count[STEP] - 1) // usage_stride, len(state.usage) - 1)]
    row[USAGE_STEPS] += 1
    row[USAGE_COMPUTE] += compute
    row[USAGE_MEMORY] += memory
    row[USAGE_SECONDS] += spent
    row[USAGE_RESIDENT] += count[RESIDENT]
    _finish_due(state)


@compiled
def advance(
    state: EngineState,
    admit: Int32s,
    budget: int,
    until_event: bool,  # noqa: FBT001 - compiled code takes arguments by position
    cost: CostVector,
    usage_stride: int,
) -> Counters:
    """Admit from the front of `admit`, then take one step, or steps until something happens.

    Stuck is who has nothing running although the first of `admit` was refused or there was none:
    the policy waits for an event that cannot come.
    """
    count = state.number
    count[FINISHED_COUNT] = 0
    count[RETRACTED_COUNT] = 0
    count[ADMITTED_COUNT] = 0
    for request in admit:
        assert state.status[request] == POOLED
        if not _admit(state, request):
            break
        count[ADMITTED_COUNT] += 1
    if count[DECODING_COUNT] + count[PREFILLING_COUNT] == 0:
        return counters(state, True)  # noqa: FBT003 - as above
    had_prefill = count[PREFILLING_COUNT] > 0
    while True:
        _step(state, budget, cost, usage_stride)
        happened = count[FINISHED_COUNT] + count[RETRACTED_COUNT] > 0
        idle = count[DECODING_COUNT] + count[PREFILLING_COUNT] == 0
        prefilled = had_prefill and count[PREFILLING_COUNT] == 0
        if not until_event or happened or idle or prefilled:
            return counters(state, False)  # noqa: FBT003 - as above
