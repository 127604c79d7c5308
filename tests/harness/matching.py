"""Every pair of a matching that would rather have each other, by looking at all of them."""

from __future__ import annotations

from typing import NamedTuple

from aqua_placer.problem.instance import GRAIN_GB
from aqua_placer.value.matches import ConsumerGroup, ProducerShard, ServerMatch


class BlockingPair(NamedTuple):
    """A consumer and a producer shard that would both rather have each other."""

    server: int
    consumer: ConsumerGroup
    producer: ProducerShard


def blocking_pairs(match: ServerMatch) -> list[BlockingPair]:
    """Every pair that would both rather have each other; empty for a stable matching.

    A single-shard consumer gains by a producer with more spare than its own, as far as it needs
    it. A producer gains by a consumer that needs more and weighs no less. Producers bound to a
    lockstep group do not leave it; a lockstep group gains by enough idle producers.
    """
    found = []
    serving: dict[tuple[int, int], ConsumerGroup] = {}
    has: dict[int, float] = {}
    for served in match.served_groups:
        for producer in served.producers:
            serving[producer.group, producer.shard] = served.consumer
        has[served.consumer.group] = min(producer.gb for producer in served.producers)
    everyone = [served.consumer for served in match.served_groups] + list(match.unserved)
    producers = [producer for s in match.served_groups for producer in s.producers] + list(
        match.idle
    )
    for consumer in everyone:
        if consumer.shards > 1:
            if consumer.group not in has and len(match.idle) >= consumer.shards:
                found.append(BlockingPair(match.server, consumer, match.idle[0]))
            continue
        for producer in producers:
            rival = serving.get((producer.group, producer.shard))
            wants = producer.gb > has.get(consumer.group, 0.0) + GRAIN_GB
            if rival is None:
                accepts = True
            else:
                accepts = (
                    rival.shards == 1
                    and rival.weight <= consumer.weight
                    and rival.gb < consumer.gb - GRAIN_GB
                )
            if wants and accepts:
                found.append(BlockingPair(match.server, consumer, producer))
    return found
