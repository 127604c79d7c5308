"""The clock of a fleet: arrivals, the router, the engines' events, and looks at loans.

Engines meet at arrivals, which go to the engine with the fewest requests, and at loans. So each
keeps its own next event in a heap, and loans are looked at once a second, by the rules and with the
constants of `whatif.online`. The kernel returns now and then: for a progress bar, for more slots.
"""

from __future__ import annotations

from math import inf
from typing import Final

from aqua_schedulers.compiled import compiled, compiled_part
from aqua_simulator.fleet.links import LoanRecord, contend
from aqua_simulator.fleet.state import NONE, EngineRecord, FleetState
from aqua_simulator.fleet.steps import deliver, extra_planned, free_blocks, plan_ahead, settle
from aqua_simulator.fleet.waiting_list import blocks_for, enqueue
from aqua_simulator.serving.setup import BLOCK_TOKENS
from aqua_simulator.whatif.online import (
    CALM_S,
    LOOK_S,
    RECLAIM_LOOKS,
    SLAB_BYTES,
    WAITING_MARGIN,
)

# Fixed: why the kernel returned.
DONE: Final = 0
PAUSED: Final = 1
NO_SLOTS: Final = 2


# --- The heap of engines by their next event ------------------------------------------------


@compiled_part
def _swap(fleet: FleetState, one: int, other: int) -> None:
    heap, place = fleet.heap, fleet.place
    heap[one], heap[other] = heap[other], heap[one]
    place[heap[one]], place[heap[other]] = one, other


@compiled_part
def _is_earlier(fleet: FleetState, one: int, other: int) -> bool:
    """Whether the engine at a place is due before another; equal times go by number."""
    first, second = fleet.heap[one], fleet.heap[other]
    if fleet.event_s[first] != fleet.event_s[second]:
        return bool(fleet.event_s[first] < fleet.event_s[second])
    return bool(first < second)


@compiled_part
def reschedule(fleet: FleetState, number: int, event_s: float) -> None:
    """The engine's next event is at that time, infinity for none."""
    fleet.event_s[number] = event_s
    place = fleet.place[number]
    while place > 0 and _is_earlier(fleet, place, (place - 1) // 2):
        _swap(fleet, place, (place - 1) // 2)
        place = (place - 1) // 2
    count = len(fleet.heap)
    while True:
        least = place
        for child in (2 * place + 1, 2 * place + 2):
            if child < count and _is_earlier(fleet, child, least):
                least = child
        if least == place:
            return
        _swap(fleet, place, least)
        place = least


@compiled_part
def _advance(fleet: FleetState, number: int, now_s: float) -> None:
    """Everything of an engine that is due, and its plans from then on."""
    engine = fleet.engines[number]
    settle(engine, fleet.running[number], fleet.slots, now_s)
    deliver(fleet, number, now_s)
    reschedule(fleet, number, plan_ahead(fleet, number, now_s, fleet.tokens_of))


# --- Loans ----------------------------------------------------------------------------------


@compiled_part
def _block_bytes(engine: EngineRecord) -> int:
    return int(engine.kv_bytes * BLOCK_TOKENS)


@compiled_part
def _lent_bytes(fleet: FleetState, loan: LoanRecord) -> float:
    """What a producer's engine lends to one consumer now."""
    producer = fleet.engines[loan.producer]
    return float(producer.lent_blocks * _block_bytes(producer) * loan.share)


@compiled_part
def _peer_bytes(fleet: FleetState, number: int) -> float:
    """What a consumer may have of its producers now."""
    found = fleet.engines[number].static_bytes
    index = fleet.ports[number].first_borrowed
    while index != NONE:
        loan = fleet.loans[index]
        if loan.producer < len(fleet.engines):
            found += _lent_bytes(fleet, loan)
        index = loan.next_borrowed
    return float(found)


@compiled_part
def _held_bytes(fleet: FleetState, number: int) -> float:
    consumer = fleet.engines[number]
    used = float(consumer.store_used_tokens * consumer.kv_bytes)
    return min(used, _peer_bytes(fleet, number))


@compiled_part
def follow_producers(fleet: FleetState, number: int) -> None:
    """Give a consumer's store the size and the rate of the moment."""
    engine = fleet.engines[number]
    if not engine.has_store:
        return
    peer = int(_peer_bytes(fleet, number) // engine.kv_bytes)
    used = engine.store_used_tokens
    engine.store_tokens = max(used, peer + engine.host_tokens)
    share = 1.0 if peer > 0 else 0.0
    if used:
        share = min(used, peer) / used
    engine.peer_share = share
    engine.store_bytes_per_s = 1.0 / (share / engine.rate_peer + (1.0 - share) / engine.rate_host)
    engine.store_lost_s = share * engine.lost_peer_s + (1.0 - share) * engine.lost_host_s


@compiled_part
def reclaim(fleet: FleetState, number: int, blocks: int, now_s: float) -> None:
    """Take memory back, after the consumers have moved to the host what they hold in it."""
    if blocks == 0:
        return
    each, clock = fleet.engines[number], fleet.clock[0]
    share = blocks / each.lent_blocks
    moving, host_rate = 0.0, inf
    index = fleet.ports[number].first_lent
    while index != NONE:
        loan = fleet.loans[index]
        held = _held_bytes(fleet, loan.consumer) * share * _lent_bytes(fleet, loan)
        moving += held / max(1.0, _peer_bytes(fleet, loan.consumer))
        host_rate = min(host_rate, fleet.engines[loan.consumer].rate_host)
        index = loan.next_lent
    fleet.ports[number].pending_bytes += moving
    away_s = LOOK_S * RECLAIM_LOOKS + moving / host_rate
    each.lent_blocks -= blocks
    each.calm_since_s = now_s
    last = min(each.returning_count, fleet.returning_s.shape[1] - 1)
    if last == each.returning_count:
        fleet.returning_blocks[number, last] = 0
        each.returning_count += 1
    fleet.returning_s[number, last] = now_s + away_s
    fleet.returning_blocks[number, last] += blocks
    clock.reclaim_count += 1
    clock.reclaim_s += away_s


@compiled_part
def _take_back(fleet: FleetState, number: int, until_s: float) -> bool:
    """Have the reclaimed memory that is back by then; whether there was some."""
    engine = fleet.engines[number]
    kept = 0
    for place in range(engine.returning_count):
        blocks = fleet.returning_blocks[number, place]
        if fleet.returning_s[number, place] <= until_s:
            engine.block_count += blocks
            engine.given_blocks += blocks
        else:
            fleet.returning_s[number, kept] = fleet.returning_s[number, place]
            fleet.returning_blocks[number, kept] = blocks
            kept += 1
    is_changed = kept < engine.returning_count
    engine.returning_count = kept
    return bool(is_changed)


@compiled_part
def _look_at(fleet: FleetState, number: int, now_s: float) -> bool:
    """Lend what is free once it has been calm, take back what is missing; whether plans change."""
    engine = fleet.engines[number]
    is_changed = _take_back(fleet, number, now_s)
    if is_changed:
        settle(engine, fleet.running[number], fleet.slots, now_s)
    whole = engine.block_count + engine.lent_blocks
    reserve = int(whole * fleet.clock[0].reserve_share)
    free = free_blocks(engine, now_s)
    if engine.waiting_count:
        engine.calm_since_s = now_s
    if engine.lent_blocks and engine.waiting_count > WAITING_MARGIN:
        reclaim(fleet, number, engine.lent_blocks, now_s)
    elif engine.lent_blocks and (free < reserve // 2 or engine.waiting_count):
        reclaim(fleet, number, min(engine.lent_blocks, max(1, reserve - free)), now_s)
    elif (
        engine.returning_count == 0
        and now_s - engine.calm_since_s >= CALM_S
        and (free - reserve) * _block_bytes(engine) >= SLAB_BYTES
    ):
        settle(engine, fleet.running[number], fleet.slots, now_s)
        blocks = engine.given_blocks - engine.taken_blocks - reserve
        if blocks > 0:
            engine.taken_blocks += blocks
            engine.block_count -= blocks
            engine.lent_blocks += blocks
        return True
    return is_changed


@compiled_part
def _integrate(fleet: FleetState, passed_s: float) -> None:
    """Count what is free, lent and used for so long."""
    clock = fleet.clock[0]
    clock.looked_s += passed_s
    inside_s = max(0.0, min(passed_s, clock.span_s - clock.looked_s + passed_s))
    for number in range(len(fleet.engines)):
        engine = fleet.engines[number]
        free = free_blocks(engine, clock.looked_s) + engine.lent_blocks
        engine.least_free_blocks = min(engine.least_free_blocks, free)
        if engine.is_producer:
            clock.offered_gb_s += engine.lent_blocks * _block_bytes(engine) * inside_s / 1e9
        if engine.has_peers:
            clock.offered_gb_s += engine.static_bytes * inside_s / 1e9
            clock.used_gb_s += _held_bytes(fleet, number) * inside_s / 1e9


@compiled_part
def _note_use(fleet: FleetState, number: int, now_s: float) -> None:
    """Tell the links what an engine has copied and computed since the last look."""
    engine, port = fleet.engines[number], fleet.ports[number]
    if port.collective_s > 0.0:
        count = engine.token_count
        if engine.extra_steps:
            count += extra_planned(engine, now_s) * engine.extra_count
        port.pending_tokens += count - engine.noted_tokens
        engine.noted_tokens = count
    copied = engine.copied_tokens * engine.kv_bytes * engine.peer_share
    engine.copied_tokens = 0
    if copied <= 0.0 or port.first_borrowed == NONE:
        return
    port.pending_bytes += copied
    index = port.first_borrowed
    while index != NONE:
        loan = fleet.loans[index]
        fleet.ports[loan.producer].pending_bytes += copied / port.loan_count
        index = loan.next_borrowed


@compiled_part
def _contend(fleet: FleetState, now_s: float) -> None:
    """Give copies, collectives and kernels the rates of the next second."""
    for number in range(len(fleet.engines)):
        _note_use(fleet, number, now_s)
    contend(fleet.ports, fleet.loans, LOOK_S)
    for number in range(len(fleet.engines)):
        engine, port = fleet.engines[number], fleet.ports[number]
        if port.first_borrowed != NONE:
            engine.rate_peer = port.copy_bytes_per_s
        if port.slowdown != engine.slowdown or port.shared_token_s != engine.shared_token_s:
            # What was planned before keeps its times.
            settle(engine, fleet.running[number], fleet.slots, now_s)
            engine.slowdown, engine.shared_token_s = port.slowdown, port.shared_token_s
            _advance(fleet, number, now_s)


@compiled_part
def _look(fleet: FleetState) -> bool:
    """A look at everything; whether some lender's requests wait for its memory alone."""
    _integrate(fleet, LOOK_S)
    now_s = fleet.clock[0].looked_s
    is_stuck = False
    for number in range(len(fleet.engines)):
        engine = fleet.engines[number]
        if engine.is_producer:
            is_changed = _look_at(fleet, number, now_s)
            is_idle = engine.waiting_count > 0 and fleet.event_s[number] == inf
            if is_changed or is_idle:
                _advance(fleet, number, now_s)
            is_stuck = is_stuck or (is_idle and fleet.event_s[number] == inf)
    if fleet.clock[0].has_contention:
        _contend(fleet, now_s)
    for number in range(len(fleet.engines)):
        if fleet.engines[number].has_peers:
            follow_producers(fleet, number)
    return is_stuck


# --- Arrivals -------------------------------------------------------------------------------


@compiled_part
def _arrive(fleet: FleetState, request: int) -> None:
    """Hand a request to the engine with the fewest; count it if none could ever hold it."""
    clock, model = fleet.clock[0], fleet.model[request]
    first = fleet.router_start[model]
    chosen = fleet.router[first]
    for place in range(first + 1, fleet.router_start[model + 1]):
        number = fleet.router[place]
        if fleet.request_count[number] < fleet.request_count[chosen]:
            chosen = number
    engine, now_s = fleet.engines[chosen], fleet.arrival_s[request]
    need = blocks_for(fleet.prompt_tokens[request] + fleet.output_tokens[request])
    away = engine.lent_blocks
    for place in range(engine.returning_count):
        away += fleet.returning_blocks[chosen, place]
    if need > engine.block_count + away:
        fleet.unserved_count[model] += 1
        return
    running, slots = fleet.running[chosen], fleet.slots
    if need > engine.block_count:
        # It fits once the loans are back, which is soon: no engine refuses it for them.
        reclaim(fleet, chosen, engine.lent_blocks, now_s)
        _take_back(fleet, chosen, inf)
    index = clock.first_vacant
    slot = slots[index]
    clock.first_vacant = slot.after
    slot.engine, slot.request = chosen, request
    slot.prompt_tokens = fleet.prompt_tokens[request]
    slot.output_tokens = fleet.output_tokens[request]
    slot.arrival_s = now_s
    slot.computed_tokens = slot.emitted_tokens = slot.block_count = slot.paged_tokens = 0
    slot.run_blocks = slot.floor_output = slot.floor_computed = slot.mark = 0
    fleet.request_count[chosen] += 1
    is_blocked = engine.waiting_count > 0 and engine.is_fair == 0 and engine.extra_steps > 0
    enqueue(engine, slots, index)
    engine.has_changed = 1
    if is_blocked:
        return  # First come, first served: the run goes on, for others waited before.
    settle(engine, running, slots, now_s)
    if engine.previous_end_s > now_s:
        reschedule(fleet, chosen, engine.previous_end_s)
    else:
        _advance(fleet, chosen, now_s)


@compiled
def drive(fleet: FleetState, until_s: float) -> int:
    """Move everything on to that time, or to the end of all requests and of the day."""
    clock = fleet.clock[0]
    request_count = len(fleet.arrival_s)
    is_stuck = True
    while True:
        arrival_s = inf
        if clock.next_request < request_count:
            arrival_s = fleet.arrival_s[clock.next_request]
        event_s = fleet.event_s[fleet.heap[0]]
        due_s = min(arrival_s, event_s)
        if clock.looked_s + LOOK_S <= due_s:
            if due_s == inf and not is_stuck and clock.looked_s + LOOK_S > clock.span_s:
                _integrate(fleet, max(0.0, clock.span_s - clock.looked_s))
                return DONE
            if clock.looked_s + LOOK_S > until_s:
                return PAUSED
            is_stuck = _look(fleet)
            continue
        if due_s > until_s:
            return PAUSED
        if arrival_s <= event_s:
            if clock.first_vacant == NONE:
                return NO_SLOTS
            _arrive(fleet, clock.next_request)
            clock.next_request += 1
        else:
            _advance(fleet, fleet.heap[0], event_s)
