"""The story as a table of phases: when each is over, decided purely from what was observed.

    START ── the offer is there ──> PREFILL ── first new token ──> HARVEST
    HARVEST ── all pages with the peer, enough tokens ──> BURST ── memory taken back, pages in
    host memory, enough tokens ──> CALM ── pages back with the peer ──> AGAIN
    AGAIN ── all pages with the peer, enough tokens ──> VERIFY

No phase ends because time has passed. One that makes no progress for too long is a failure with a
reason; progress is a goal met, or a count that a goal shows, seen for the first time in the phase.
So a busy machine takes longer and no more than that. What goes with entering a phase (double the
arrivals, halve them, let the generation end) is the orchestration's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from aqua_demo.messages import ConsumerSample, ProducerSample
from aqua_demo.scale import Scale
from aqua_protocol import format_bytes


class Phase(StrEnum):
    """Where the story is."""

    START = "start"
    PREFILL = "prefill"
    HARVEST = "harvest"
    BURST = "burst"
    CALM = "calm"
    AGAIN = "again"
    VERIFY = "verify"


TITLES: Final = {
    Phase.START: "the image service starts and offers idle memory",
    Phase.PREFILL: "the LLM reads its prompt",
    Phase.HARVEST: "keys and values live in borrowed memory",
    Phase.BURST: "twice the images: the memory is taken back",
    Phase.CALM: "the burst is over: memory is offered again",
    Phase.AGAIN: "keys and values are back in borrowed memory",
    Phase.VERIFY: "an uninterrupted run for comparison",
}

GENERATING: Final = (Phase.HARVEST, Phase.BURST, Phase.CALM, Phase.AGAIN)
"""Phases with new tokens all the way through."""

NEARLY_ALL: Final = 0.9
"""Share of the pages that counts as all: new pages appear in host memory first."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The latest that both programs have said; None before they have said anything.

    Attributes:
        entered: The consumer's sample when the present phase began.
        reclaims_before: Reclaims that had finished by then.
        compared: New tokens that the uninterrupted run has made.
    """

    producer: ProducerSample | None
    consumer: ConsumerSample | None
    entered: ConsumerSample | None
    reclaims_before: int = 0
    compared: int = 0


@dataclass(frozen=True, slots=True)
class Goal:
    """One condition of a phase's end.

    Attributes:
        text: What is waited for, for the view and for the reason of a failure.
        is_met: Whether it holds.
    """

    text: str
    is_met: bool


def goals(phase: Phase, seen: Observation, scale: Scale) -> list[Goal]:
    """What the present phase waits for; it is over when all goals are met."""
    return _GOALS[phase](seen, scale)


def next_phase(phase: Phase, seen: Observation, scale: Scale) -> Phase:
    """The phase after this observation: the present one until all its goals are met."""
    if phase is Phase.VERIFY or not all(goal.is_met for goal in goals(phase, seen, scale)):
        return phase
    order = list(Phase)
    return order[order.index(phase) + 1]


class Patience:
    """For how long a phase has made no progress.

    Args:
        now_s: When the phase began.
    """

    def __init__(self, now_s: float) -> None:
        self._known: set[Goal] = set()
        self._since_s = now_s

    def stalled_s(self, found: list[Goal], now_s: float) -> float:
        """Seconds since `found`, the goals as they stand at `now_s`, last had any news."""
        # What was there before is no news: goals that are met now and then would last for ever.
        if not self._known.issuperset(found):
            self._known.update(found)
            self._since_s = now_s
        return now_s - self._since_s


def _start(seen: Observation, scale: Scale) -> list[Goal]:
    offered = seen.producer.offered_bytes if seen.producer is not None else 0
    wanted = format_bytes(scale.offer_bytes)
    return [Goal(f"{wanted} offered", offered >= scale.offer_bytes)]


def _prefill(seen: Observation, scale: Scale) -> list[Goal]:
    del scale
    return [Goal("the first new token", _tokens(seen.consumer) > 0)]


def _harvest(seen: Observation, scale: Scale) -> list[Goal]:
    return [_on_peer(seen), _tokens_since(seen, scale.harvest_tokens)]


def _burst(seen: Observation, scale: Scale) -> list[Goal]:
    reclaims = seen.producer.reclaims if seen.producer is not None else []
    host = seen.consumer.host_bytes if seen.consumer is not None else 0
    peer = seen.consumer.peer_bytes if seen.consumer is not None else 0
    return [
        Goal("a reclaim finished", len(reclaims) > seen.reclaims_before),
        Goal("pages in host memory", host > peer),
        _tokens_since(seen, scale.burst_tokens),
    ]


def _calm(seen: Observation, scale: Scale) -> list[Goal]:
    del scale
    returned = seen.consumer.returned_bytes if seen.consumer is not None else 0
    before = seen.entered.returned_bytes if seen.entered is not None else 0
    return [Goal("pages returned to the peer", returned > before), _on_peer(seen)]


def _again(seen: Observation, scale: Scale) -> list[Goal]:
    return [_on_peer(seen), _tokens_since(seen, scale.again_tokens)]


def _verify(seen: Observation, scale: Scale) -> list[Goal]:
    del scale
    text = f"the same tokens once more, {seen.compared}/{_tokens(seen.consumer)}"
    return [Goal(text, is_met=False)]


_GOALS: Final[dict[Phase, Callable[[Observation, Scale], list[Goal]]]] = {
    Phase.START: _start,
    Phase.PREFILL: _prefill,
    Phase.HARVEST: _harvest,
    Phase.BURST: _burst,
    Phase.CALM: _calm,
    Phase.AGAIN: _again,
    Phase.VERIFY: _verify,
}


def _on_peer(seen: Observation) -> Goal:
    peer = seen.consumer.peer_bytes if seen.consumer is not None else 0
    host = seen.consumer.host_bytes if seen.consumer is not None else 0
    return Goal("all pages with the peer", peer > 0 and peer >= NEARLY_ALL * (peer + host))


def _tokens_since(seen: Observation, wanted: int) -> Goal:
    made = _tokens(seen.consumer) - _tokens(seen.entered)
    return Goal(f"{min(made, wanted)}/{wanted} tokens", made >= wanted)


def _tokens(sample: ConsumerSample | None) -> int:
    return sample.tokens if sample is not None else 0
