"""Links and memory that copies, collectives and kernels share, second by second.

A *port* is an engine's or a lending GPU's way to its peers; a *loan* joins a consumer's to a
producer's. Once a second what was copied and computed in the last one says for which share of it
each was busy, and with that

- a copy takes as long as alone for the time in which the others on its links were not busy, and
  as long as with all of them for the rest (`alone_byte_s`, `together_byte_s`: max-min fair rates).
  With one full link and flows that want all of it that is the mean over who is busy, exactly;
- a producer's steps, and the collectives of any engine, are slower while copies run beside them.

Shares are those of the second before: within a second nothing is known of who meets whom. What a
consumer's own copies take of its own steps is reckoned step by step, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aqua_schedulers.compiled import compiled, compiled_part
from aqua_simulator.fleet.state import NONE


@dataclass(slots=True)
class PortRecord:
    """One engine's or lending GPU's links to its peers.

    Attributes:
        first_lent, first_borrowed: Begin the lists of loans to others and from others.
        loan_count: Loans from others.
        copy_bytes_per_s: Rate of copies: of a consumer at the moment, of a producer at most.
        pending_bytes, pending_tokens: Copied and computed, and not yet accounted for.
        lost_share: Of the work of a producer's kernels, while copies run beside them.
        collective_s: Seconds of collectives for each token, alone on their link.
        collective_lost_share: Of their rate, while copies run beside them.
        copy_share, collective_share: Of the last second, when there were copies and collectives.
        slowdown: Factor on the time of a producer's steps.
        shared_token_s: Seconds by which collectives are longer, for each token.
        copying_s, slowed_s: Integrals of `copy_share`, and of `slowdown` above 1.
    """

    first_lent: int
    first_borrowed: int
    loan_count: int
    copy_bytes_per_s: float
    pending_bytes: float
    pending_tokens: int
    lost_share: float
    collective_s: float
    collective_lost_share: float
    copy_share: float
    collective_share: float
    slowdown: float
    shared_token_s: float
    copying_s: float
    slowed_s: float
    worst_slowdown: float


@dataclass(slots=True)
class LoanRecord:
    """A producer's memory that a consumer has, or may have.

    Attributes:
        consumer, producer: Indices of ports.
        share: Of what the producer lends.
        weight: Of its copies, where they share a link.
        alone_byte_s, together_byte_s, byte_s: Seconds to copy a byte: while no other flow is on its
            links, while all are, and at the moment.
        next_lent, next_borrowed: Next loans of the producer, and of the consumer.
    """

    consumer: int
    producer: int
    share: float
    weight: float
    alone_byte_s: float
    together_byte_s: float
    byte_s: float
    next_lent: int
    next_borrowed: int


@compiled_part
def _slow_down(ports: Sequence[PortRecord], passed_s: float) -> None:
    """Work out for which share of the time each port was busy, and what that costs kernels."""
    for number in range(len(ports)):
        port = ports[number]
        copying = 0.0
        if port.pending_bytes > 0.0:
            most = port.copy_bytes_per_s * passed_s
            copying = min(1.0, port.pending_bytes / most)
            port.pending_bytes = max(0.0, port.pending_bytes - most)
        port.copy_share = copying
        port.collective_share = min(1.0, port.collective_s * port.pending_tokens / passed_s)
        port.pending_tokens = 0
        port.slowdown = 1.0
        if port.first_lent != NONE:
            port.slowdown = 1.0 / (1.0 - copying * port.lost_share)
        beside = 1.0 / (1.0 - copying * port.collective_lost_share)
        port.shared_token_s = port.collective_s * (beside - 1.0)
        port.copying_s += copying * passed_s
        port.slowed_s += (port.slowdown - 1.0) * passed_s
        port.worst_slowdown = max(port.worst_slowdown, port.slowdown)


@compiled_part
def _share(ports: Sequence[PortRecord], loans: Sequence[LoanRecord]) -> None:
    """Work out how long a copy takes beside the others on its links."""
    for number in range(len(loans)):
        loan = loans[number]
        consumer, producer = ports[loan.consumer], ports[loan.producer]
        weights = busy = 0.0
        if consumer.collective_s > 0.0:
            weights += 1.0
            busy += consumer.collective_share
        if producer.collective_s > 0.0:
            weights += 1.0
            busy += producer.collective_share
        index = producer.first_lent
        while index != NONE:
            other = loans[index]
            if other.consumer != loan.consumer:
                weights += other.weight
                busy += other.weight * ports[other.consumer].copy_share
            index = other.next_lent
        loan.byte_s = loan.alone_byte_s
        if weights > 0.0:
            loan.byte_s += busy / weights * (loan.together_byte_s - loan.alone_byte_s)


@compiled
def contend(ports: Sequence[PortRecord], loans: Sequence[LoanRecord], passed_s: float) -> None:
    """Rates and slowdowns for the next seconds, out of what the last `passed_s` have seen."""
    _slow_down(ports, passed_s)
    _share(ports, loans)
    for number in range(len(ports)):
        port = ports[number]
        if port.first_borrowed == NONE:
            continue
        slowest = 0.0
        index = port.first_borrowed
        while index != NONE:
            slowest = max(slowest, loans[index].byte_s)
            index = loans[index].next_borrowed
        port.copy_bytes_per_s = port.loan_count / slowest
