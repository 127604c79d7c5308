"""The story as a table of phases: when each is over, decided purely from what was observed.

    START ── the offer is there ──> PREFILL ── first new token ──> HARVEST
    HARVEST ── all pages with the peer, enough tokens ──> BURST ── memory taken back, pages in
    host memory, enough tokens ──> CALM ── pages back with the peer ──> AGAIN
    AGAIN ── all pages with the peer, enough tokens ──> VERIFY

No phase ends because time has passed. One that makes no progress for too long is a failure with a
reason; progress is a goal met, or a count that a goal shows, seen for the first time in the phase,
or what a program tells of itself. So a busy machine takes longer and no more than that. What goes
with entering a phase (double the arrivals, halve them, let the generation end) is the
orchestration's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from aqua_demo.messages import ConsumerSample, ProducerSample
from aqua_demo.scale import DemoScale
from aqua_protocol import format_bytes


class DemoPhase(StrEnum):
    """Where the story is."""

    START = "start"
    PREFILL = "prefill"
    HARVEST = "harvest"
    BURST = "burst"
    CALM = "calm"
    AGAIN = "again"
    VERIFY = "verify"


TITLES: Final = {
    DemoPhase.START: "the image service starts and offers idle memory",
    DemoPhase.PREFILL: "the LLM reads its prompt",
    DemoPhase.HARVEST: "keys and values live in borrowed memory",
    DemoPhase.BURST: "twice the images: the memory is taken back",
    DemoPhase.CALM: "the burst is over: memory is offered again",
    DemoPhase.AGAIN: "keys and values are back in borrowed memory",
    DemoPhase.VERIFY: "an uninterrupted run for comparison",
}

GENERATING: Final = (DemoPhase.HARVEST, DemoPhase.BURST, DemoPhase.CALM, DemoPhase.AGAIN)
"""Phases with new tokens all the way through."""

NEARLY_ALL: Final = 0.9
"""Share of the pages that counts as all: new pages appear in host memory first. At 1 a phase would
wait for a moment without new pages; at half of it, it would end with pages still on their way."""

NO_PRODUCER: Final = ProducerSample(at_s=0.0)
NO_CONSUMER: Final = ConsumerSample(at_s=0.0)


@dataclass(frozen=True, slots=True)
class Observation:
    """The latest that both programs have said; zeros before they have said anything."""

    producer: ProducerSample = NO_PRODUCER
    consumer: ConsumerSample = NO_CONSUMER
    before: ConsumerSample = NO_CONSUMER  # When the present phase began.
    reclaims_before: int = 0  # Finished by then.
    compared: int = 0  # New tokens that the uninterrupted run has made.


@dataclass(frozen=True, slots=True)
class Goal:
    """One condition of a phase's end; `text` tells people what is waited for."""

    text: str
    is_met: bool


def _on_peer(seen: Observation) -> Goal:
    peer, host = seen.consumer.peer_bytes, seen.consumer.host_bytes
    return Goal("all pages with the peer", peer > 0 and peer >= NEARLY_ALL * (peer + host))


def _tokens(seen: Observation, wanted: int) -> Goal:
    made = seen.consumer.tokens - seen.before.tokens
    return Goal(f"{min(made, wanted)}/{wanted} tokens", made >= wanted)


def goals(  # noqa: PLR0911 - the table of phases, a row each
    phase: DemoPhase, seen: Observation, scale: DemoScale
) -> list[Goal]:
    """List what the present phase waits for; it is over when all goals are met."""
    latest = seen.consumer
    match phase:
        case DemoPhase.START:
            met = seen.producer.offered_bytes >= scale.offer_bytes
            return [Goal(f"{format_bytes(scale.offer_bytes)} offered", met)]
        case DemoPhase.PREFILL:
            return [Goal("the first new token", latest.tokens > 0)]
        case DemoPhase.HARVEST:
            return [_on_peer(seen), _tokens(seen, scale.harvest_tokens)]
        case DemoPhase.BURST:
            return [
                Goal("a reclaim finished", len(seen.producer.reclaims) > seen.reclaims_before),
                Goal("pages in host memory", latest.host_bytes > latest.peer_bytes),
                _tokens(seen, scale.burst_tokens),
            ]
        case DemoPhase.CALM:
            returned = latest.returned_bytes > seen.before.returned_bytes
            return [Goal("pages returned to the peer", returned), _on_peer(seen)]
        case DemoPhase.AGAIN:
            return [_on_peer(seen), _tokens(seen, scale.again_tokens)]
        case DemoPhase.VERIFY:
            text = f"the same tokens once more, {seen.compared}/{latest.tokens}"
            return [Goal(text, is_met=False)]


def next_phase(phase: DemoPhase, seen: Observation, scale: DemoScale) -> DemoPhase:
    """Return the phase after this observation: the present one until all its goals are met."""
    if phase is DemoPhase.VERIFY or not all(goal.is_met for goal in goals(phase, seen, scale)):
        return phase
    order = list(DemoPhase)
    return order[order.index(phase) + 1]


def served_share(before: ProducerSample, now: ProducerSample) -> float:
    """Images served between two samples, of those that are asked for now."""
    asked = now.arrivals_per_s * (now.at_s - before.at_s)
    return (now.images - before.images) / asked if asked > 0.0 else 1.0


class StallTimer:
    """A watch on how long a phase has made no progress."""

    def __init__(self, now_s: float) -> None:
        self._known: set[Goal] = set()
        self._since_s = now_s

    def stalled_s(self, found: list[Goal], now_s: float) -> float:
        """Return the seconds since `found`, the goals as they stand at `now_s`, last had news."""
        # What was there before is no news: goals that are met now and then would last for ever.
        if not self._known.issuperset(found):
            self._known.update(found)
            self._since_s = now_s
        return now_s - self._since_s
