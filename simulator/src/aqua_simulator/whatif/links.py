"""Who shares which links in a cluster, and what that costs: the terms of `fleet.links`.

Rates of copies alone and beside all others on their links are max-min fair (`timing.contention`); a
consumer's weight is its guarantee. Kernels lose what an interference curve says at the rate at
which copies run, as a share of the memory bandwidth that kernels reach. Each GPU has a host link of
its own. Without a curve there is no contention: every copy has its link, and no kernel is slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from aqua_schedulers.compiled import records
from aqua_simulator.fleet.links import LoanRecord, PortRecord
from aqua_simulator.fleet.state import NONE
from aqua_simulator.timing.contention import Flow, Interference, max_min_rates
from aqua_simulator.timing.iteration import BANDWIDTH_SHARE

MOST_LOST: Final = 0.9
"""Of the work of kernels, that copies take at most; no link is so fast. It cannot be doubled."""


@dataclass(frozen=True, slots=True)
class PortTerms:
    """What a port can, and what runs on it beside copies.

    Attributes:
        name: Of the model or of the lending GPUs.
        bytes_per_s: Of its links, all GPUs of an engine together.
        hbm_bytes_per_s: Memory bandwidth of those GPUs by the data sheet.
        collective_s: Seconds of collectives for each token.
    """

    name: str
    bytes_per_s: float
    hbm_bytes_per_s: float
    collective_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoanTerms:
    """A loan: consumer and producer as indices of ports, and the weight of its copies."""

    consumer: int
    producer: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What the links of a model's engines, or of a lender's GPUs, saw over the day.

    Attributes:
        copying_share: Of the time, when copies ran.
        slowdown, worst_slowdown: Factor on the time of kernels, a mean over the day, and of the
            worst second; 1 for those that lend nothing.
    """

    copying_share: float
    slowdown: float
    worst_slowdown: float


@dataclass(frozen=True, slots=True, eq=False)
class SharedLinks:
    """Ports and loans as the kernels take them.

    Attributes:
        is_on: Whether there is contention; without, loans say who lends to whom and no more.
        names: Of the ports.
    """

    is_on: bool
    names: tuple[str, ...]
    ports: Sequence[PortRecord]
    loans: Sequence[LoanRecord]

    def note_copies(self, consumer: int, copied: float) -> None:
        """A consumer has copied so many bytes from and to its producers."""
        port = self.ports[consumer]
        port.pending_bytes += copied
        index = port.first_borrowed
        while index != NONE:
            self.ports[self.loans[index].producer].pending_bytes += copied / port.loan_count
            index = self.loans[index].next_borrowed

    def note_reclaim(self, producer: int, moved: float) -> None:
        """So many bytes of a producer's memory are moved to the host."""
        self.ports[producer].pending_bytes += moved

    def use(self, passed_s: float) -> dict[str, LinkUse]:
        """What was seen, by name, of ports with loans."""
        if not self.is_on or passed_s <= 0.0:
            return {}
        seen: dict[str, list[PortRecord]] = {}
        for name, port in zip(self.names, self.ports, strict=True):
            if port.first_lent != NONE or port.first_borrowed != NONE:
                seen.setdefault(name, []).append(port)
        return {
            name: LinkUse(
                sum(float(each.copying_s) for each in mine) / len(mine) / passed_s,
                1.0 + sum(float(each.slowed_s) for each in mine) / len(mine) / passed_s,
                max(1.0, *(float(each.worst_slowdown) for each in mine)),
            )
            for name, mine in seen.items()
        }


def lost_share(curve: Interference, copy_bytes_per_s: float, hbm_bytes_per_s: float) -> float:
    """The share of the work of kernels that copies at that rate take while they run."""
    share = copy_bytes_per_s / (hbm_bytes_per_s * BANDWIDTH_SHARE)
    return 1.0 - 1.0 / curve.slowdown(min(1.0, share))


def shared_links(
    ports: Sequence[PortTerms],
    loans: Sequence[LoanTerms],
    curve: Interference | None,
    *,
    factor: float = 1.0,
) -> SharedLinks:
    """Work out all rates.

    Args:
        curve: What copies cost kernels; None for no contention.
        factor: On what they cost; 0 for no contention.
    """
    is_on = curve is not None and factor > 0.0
    made_ports = cast("Any", records(PortRecord, len(ports)))
    made_loans = cast("Any", records(LoanRecord, len(loans)))
    made_ports["first_lent"] = made_ports["first_borrowed"] = NONE
    made_ports["slowdown"] = 1.0
    weights = [0.0] * len(ports)
    for loan in loans:
        weights[loan.producer] += loan.weight
    for index in reversed(range(len(loans))):
        loan, made = loans[index], made_loans[index]
        made.consumer, made.producer, made.weight = loan.consumer, loan.producer, loan.weight
        made.share = loan.weight / weights[loan.producer]
        consumer, producer = made_ports[loan.consumer], made_ports[loan.producer]
        made.next_borrowed, consumer.first_borrowed = consumer.first_borrowed, index
        made.next_lent, producer.first_lent = producer.first_lent, index
        consumer.loan_count += 1
    found = SharedLinks(is_on, tuple(each.name for each in ports), made_ports, made_loans)
    if curve is not None and is_on:
        _set_rates(ports, loans, curve, factor, found)
    return found


def _set_rates(
    ports: Sequence[PortTerms],
    loans: Sequence[LoanTerms],
    curve: Interference,
    factor: float,
    found: SharedLinks,
) -> None:
    """Rates of loans alone and together, and what ports lose while copies run."""
    capacity = {str(index): port.bytes_per_s for index, port in enumerate(ports)}
    by_consumer: dict[int, list[int]] = {}
    for index, loan in enumerate(loans):
        by_consumer.setdefault(loan.consumer, []).append(index)
    flows = [
        Flow(
            (str(loan.consumer), str(loan.producer)),
            ports[loan.consumer].bytes_per_s / len(by_consumer[loan.consumer]),
            loan.weight,
        )
        for loan in loans
    ]
    used = sorted({port for loan in loans for port in (loan.consumer, loan.producer)})
    collectives = {port: Flow((str(port),)) for port in used if ports[port].collective_s > 0.0}
    together = max_min_rates(
        {str(port): capacity[str(port)] for port in used}, [*flows, *collectives.values()]
    )
    at_most = [0.0] * len(ports)
    for consumer, mine in by_consumer.items():
        alone = _rates_of([flows[index] for index in mine], capacity)
        for index, rate in zip(mine, alone, strict=True):
            made = found.loans[index]
            made.alone_byte_s = made.byte_s = 1.0 / rate
            made.together_byte_s = max(made.alone_byte_s, 1.0 / together[index])
            at_most[loans[index].producer] = max(at_most[loans[index].producer], rate)
        at_most[consumer] = len(mine) * min(alone)
    for port, terms in enumerate(ports):
        record = found.ports[port]
        record.copy_bytes_per_s, record.collective_s = at_most[port], terms.collective_s
        if record.first_lent != NONE:
            lost = lost_share(curve, at_most[port], terms.hbm_bytes_per_s)
            record.lost_share = min(MOST_LOST, factor * lost)
    for (port, flow), rate in zip(collectives.items(), together[len(flows) :], strict=True):
        found.ports[port].collective_lost_share = 1.0 - rate / capacity[flow.links[0]]


def _rates_of(flows: Iterable[Flow], capacity: Mapping[str, float]) -> list[float]:
    flows = list(flows)
    links = {link for flow in flows for link in flow.links}
    return max_min_rates({link: capacity[link] for link in links}, flows)
