"""The engines of a question before their first request: what each is, who lends to whom.

Who lends: engines whose memory was never short without Aqua, and GPUs of the deployment list that
have memory to spare. Who borrows: the others. Pairs are a plan's matches, or by server, the largest
spare to the largest need; where several may borrow of one, those that found nothing else share what
it lends by their weights. Copies, collectives and kernels share links and memory (`links`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from aqua_protocol.decoders import BYTES_PER_VALUE
from aqua_protocol.hardware import GpuModel
from aqua_schedulers.cfs import PagingTier, PolicyName, policy_named
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.serving.setup import BLOCK_TOKENS
from aqua_simulator.whatif.cluster import Cluster, EngineShape, SpareGpu, gpu_called
from aqua_simulator.whatif.links import (
    LoanTerms,
    PortTerms,
    SharedLinks,
    lost_share,
    shared_links,
)
from aqua_simulator.whatif.step_times import StepCoefficients

RESERVE_SHARE: Final = 0.1
"""Of a producer's KV memory, kept free beside loans; by judgement, and among the sensitivities.
Doubled, less is lent and less is taken back."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is assumed beside the recording; a sensitivity changes one at a time.

    Attributes:
        load, outputs: Factors on the rate and the output lengths.
        link: Factor on the rates of links.
        memory: Factor on the KV memory of engines.
        speed: Factor on the speed of steps.
        reserve_share: As `RESERVE_SHARE`.
        contention: Factor on what copies cost kernels; 0 for no contention at all.
    """

    load: float = 1.0
    outputs: float = 1.0
    link: float = 1.0
    memory: float = 1.0
    speed: float = 1.0
    reserve_share: float = RESERVE_SHARE
    contention: float = 1.0

    def block_count(self, shape: EngineShape) -> int:
        """Blocks of an engine's KV memory."""
        return max(1, int(shape.block_count * self.memory))


@dataclass(frozen=True, slots=True)
class ServingTerms:
    """Under which parts of Aqua, and assumptions, a day is served.

    Attributes:
        short: Models whose memory ran short without Aqua: the consumers.
    """

    is_harvesting: bool = False
    is_fair: bool = False
    short: Sequence[str] = ()
    assumed: Assumptions = Assumptions()


@dataclass(slots=True, eq=False)
class LenderGpu:
    """A GPU of another engine with unused memory, and who borrows it."""

    listed: SpareGpu
    gpu: GpuModel
    consumers: list[Member] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Member:
    """An engine with what it lends and from whom it borrows.

    Attributes:
        peer_share: Of what its store holds, what is at peers.
        lost_s_per_byte: By how much its steps are longer for each byte that it copies beside them,
            to peers and to the host.
    """

    model: str
    shape: EngineShape
    engine: Engine
    is_producer: bool = False
    lent_blocks: int = 0
    returning: list[tuple[float, int]] = field(default_factory=list)
    calm_since_s: float = 0.0
    consumers: list[Member] = field(default_factory=list)
    producers: list[Member] = field(default_factory=list)
    lenders: list[LenderGpu] = field(default_factory=list)
    static_bytes: float = 0.0
    peer_share: float = 0.0
    lost_s_per_byte: tuple[float, float] = (0.0, 0.0)
    rates: tuple[float, float] = (0.0, 0.0)
    host_tokens: int = 0
    least_free: int = 0
    noted_tokens: int = 0
    noted_copies: int = 0
    place: int = 0

    @property
    def block_bytes(self) -> int:
        """A block's keys and values."""
        return BLOCK_TOKENS * self.shape.model.kv_bytes_per_token

    @property
    def peer_bytes(self) -> float:
        """What it may have of its producers now."""
        return self.static_bytes + sum(each.lent_to(self) for each in self.producers)

    @property
    def is_consumer(self) -> bool:
        """Whether it borrows."""
        return bool(self.producers or self.lenders)

    @property
    def weight(self) -> float:
        """The weight of its share, where it borrows beside others."""
        return self.shape.deployed.copy_weight

    def lent_to(self, consumer: Member) -> float:
        """Bytes that it lends to one of its consumers now."""
        return self.lent_blocks * self.block_bytes * share_of(consumer, self.consumers)

    def follow_producers(self) -> None:
        """Give its store the size and the rate of the moment."""
        store = self.engine.store
        if store is None:
            return
        peer = int(self.peer_bytes // self.shape.model.kv_bytes_per_token)
        at_peer = min(store.used_tokens, peer)
        store.capacity_tokens = max(store.used_tokens, peer + self.host_tokens)
        share = at_peer / store.used_tokens if store.used_tokens else float(peer > 0)
        self.peer_share = share
        store.link_bytes_per_s = 1.0 / (share / self.rates[0] + (1.0 - share) / self.rates[1])
        at_peers_s, on_host_s = self.lost_s_per_byte
        store.lost_s_per_byte = share * at_peers_s + (1.0 - share) * on_host_s
        store.location = PagingTier.PEER if peer else PagingTier.HOST


def share_of(consumer: Member, consumers: Sequence[Member]) -> float:
    """The share of a producer that the weights of its consumers give to one of them."""
    return consumer.weight / sum(each.weight for each in consumers)


def lenders_of(members: Mapping[str, Sequence[Member]]) -> tuple[str, ...]:
    """Models whose engines lend."""
    return tuple(name for name, mine in members.items() if any(one.is_producer for one in mine))


def members_of(
    cluster: Cluster, times: Mapping[str, StepCoefficients], terms: ServingTerms
) -> dict[str, list[Member]]:
    """All engines by model, before the first request, with who lends to whom."""
    members = {
        name: [
            _member(cluster, name, index, times[name], terms)
            for index in range(shape.deployed.replicas)
        ]
        for name, shape in cluster.engines.items()
    }
    if terms.is_harvesting:
        _match(cluster, members, terms.short)
    return members


def _member(
    cluster: Cluster, name: str, index: int, coefficients: StepCoefficients, terms: ServingTerms
) -> Member:
    shape, assumed = cluster.engines[name], terms.assumed
    deployed, kv = shape.deployed, shape.model.kv_bytes_per_token
    peer, host = (
        assumed.link * deployed.tp * cluster.link_bytes_per_s(name, is_peer=is_peer)
        for is_peer in (True, False)
    )
    host_tokens = int(cluster.listed.host_gb * 1e9 // kv)
    store = None
    if terms.is_harvesting or terms.is_fair:
        store = PageStore(name, host_tokens, host, location=PagingTier.HOST)
    times = replace(coefficients, speed=coefficients.speed * assumed.speed)
    engine = Engine(
        f"{name}-{index}",
        EngineSettings(
            deployed.max_num_batched_tokens, deployed.max_num_seqs, kv_bytes_per_token=kv
        ),
        times.iteration_time(shape),
        PagedMemory(assumed.block_count(shape), BLOCK_TOKENS),
        store,
        policy_named(PolicyName.best() if terms.is_fair else PolicyName.FCFS),
    )
    return Member(
        name,
        shape,
        engine,
        rates=(peer or host, host),
        host_tokens=host_tokens,
        least_free=engine.memory.free_count,
    )


def _match(cluster: Cluster, members: Mapping[str, Sequence[Member]], short: Sequence[str]) -> None:
    """Give each consumer its producers: a plan's, or those of its server."""
    lenders = [
        LenderGpu(each, gpu_called(each.gpu))
        for each in cluster.listed.lenders
        for _ in range(each.count)
    ]
    free = [each for name in members if name not in short for each in members[name]]
    free.sort(key=lambda each: (-each.shape.kv_bytes, each.engine.name))
    spare = sorted(lenders, key=lambda each: (-each.listed.spare_gb, each.listed.name))
    consumers = [each for name in members if name in short for each in members[name]]

    def may(consumer: Member, producer: str, server: str) -> bool:
        if cluster.pairs is not None:
            return (consumer.model, producer) in cluster.pairs
        return consumer.shape.deployed.server == server

    # Each shard of a consumer wants a producer of its own; who finds none shares one.
    for consumer in consumers:
        for _shard in range(consumer.shape.deployed.tp):
            lender = _fewest(
                [one for one in spare if may(consumer, one.listed.name, one.listed.server)]
            )
            producer = _fewest(
                [one for one in free if may(consumer, one.model, one.shape.deployed.server)]
            )
            if lender is not None and (
                producer is None
                or (len(lender.consumers), -lender.listed.spare_gb * 1e9)
                <= (len(producer.consumers), -producer.shape.kv_bytes)
            ):
                lender.consumers.append(consumer)
                consumer.lenders.append(lender)
                if len(lender.consumers) == cluster.listed.consumers_per_producer:
                    spare.remove(lender)
            elif producer is not None:
                producer.is_producer = True
                producer.consumers.append(consumer)
                consumer.producers.append(producer)
                if len(producer.consumers) == cluster.listed.consumers_per_producer:
                    free.remove(producer)
    for consumer in consumers:
        shares = (
            each.listed.spare_gb * 1e9 * share_of(consumer, each.consumers)
            for each in consumer.lenders
        )
        consumer.static_bytes = sum(shares)
        consumer.follow_producers()


BorrowedT = TypeVar("BorrowedT", LenderGpu, Member)


def _fewest(producers: Sequence[BorrowedT]) -> BorrowedT | None:
    """The first of those that the fewest borrow from."""
    return min(producers, key=lambda each: len(each.consumers), default=None)


def links_of(
    cluster: Cluster, members: Mapping[str, Sequence[Member]], assumed: Assumptions
) -> SharedLinks:
    """Who shares which links: ports of all engines in order, then of the GPUs that lend."""
    everyone = [each for mine in members.values() for each in mine]
    place: dict[int, int] = {}
    for index, each in enumerate(everyone):
        each.place = index
    ports = [_port(each) for each in everyone]
    loans: list[LoanTerms] = []
    for consumer in everyone:
        loans += [
            LoanTerms(consumer.place, producer.place, consumer.weight)
            for producer in consumer.producers
        ]
        for lender in consumer.lenders:
            if id(lender) not in place:
                place[id(lender)] = len(ports)
                peer, host = (
                    assumed.link * cluster.gpu_bytes_per_s(lender.gpu, is_peer=is_peer)
                    for is_peer in (True, False)
                )
                ports.append(
                    PortTerms(lender.listed.name, peer or host, lender.gpu.hbm_bytes_per_s)
                )
            loans.append(LoanTerms(consumer.place, place[id(lender)], consumer.weight))
    links = shared_links(ports, loans, cluster.interference, factor=assumed.contention)
    curve = cluster.interference
    if links.is_on and curve is not None:
        for member, port in zip(everyone, ports, strict=False):
            peer_s, host_s = (
                assumed.contention * lost_share(curve, rate, port.hbm_bytes_per_s) / rate
                for rate in member.rates
            )
            member.lost_s_per_byte = peer_s, host_s
            member.follow_producers()
    return links


def _port(member: Member) -> PortTerms:
    """An engine's links; of several GPUs each layer ends in two ring all-reduces."""
    deployed, model, gpu = member.shape.deployed, member.shape.model, member.shape.gpu
    moved = 2.0 * (deployed.tp - 1) / deployed.tp * model.hidden_size * BYTES_PER_VALUE
    return PortTerms(
        member.model,
        member.rates[0],
        deployed.tp * gpu.hbm_bytes_per_s,
        2 * model.layer_count * moved * deployed.tp / member.rates[0],
    )
