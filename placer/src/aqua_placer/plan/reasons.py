"""Why a match is as it is, in one line; the long answers are in `explanation`."""

from __future__ import annotations

from aqua_placer.problem.instance import GRAIN_GB
from aqua_placer.value.matches import ConsumerGroup, ProducerShard, ServedGroup, ServerMatch
from aqua_protocol.plan import MatchingMode

CHOICE = {
    MatchingMode.STABLE: "largest need with most spare",
    MatchingMode.EXACT: "part of the matching that covers most",
    MatchingMode.BEST_FIT: "smallest producer that suffices",
    MatchingMode.LINKS: "best of spare times link bandwidth",
}


def match_reason(served: ServedGroup, producer: ProducerShard, mode: MatchingMode) -> str:
    """One line for one producer of a consumer group."""
    need, covered = served.consumer.gb, served.covered_gb
    why = CHOICE[mode]
    if served.consumer.shards > 1:
        why = f"one of {served.consumer.shards} producers in lockstep"
    told = f"{why}: lends {covered:g} of the {need:g} GB needed, has {producer.gb:g} GB"
    if covered < min(producer.gb, need) - GRAIN_GB:
        return f"{told}; the weakest of the {served.consumer.shards} has {covered:g} GB"
    return told


def unmatched_reason(match: ServerMatch, consumer: ConsumerGroup) -> str:
    """One line for a consumer group without producers."""
    producers = sum(len(served.producers) for served in match.served_groups) + len(match.idle)
    if not producers:
        return "no producer on this server"
    if len(match.idle) < consumer.shards <= producers:
        if match.idle:
            return (
                f"needs {consumer.shards} producers at once, {len(match.idle)} are left beside "
                "consumers that cover more"
            )
        return f"all {producers} producer shards here serve consumers that cover more"
    return f"needs {consumer.shards} producers at once, this server has {producers}"
