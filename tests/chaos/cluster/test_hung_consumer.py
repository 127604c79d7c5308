"""A consumer that hangs while it holds slabs, and comes back when nobody counts on it any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from harness.bounds import until
from harness.cluster import Cluster, new_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

OFFERED: Final = 6
HUNG: Final = "consumer-hung"
NEXT: Final = "consumer-next"
DEADLINE_S: Final = 0.2


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A consumer holds slabs and hangs."""
    with new_cluster() as cluster:
        cluster.start_coordinator()
        producer = cluster.start_producer()
        producer.call("offer", OFFERED)
        hung = cluster.start_consumer(HUNG)
        hung.call("fill", 4, 1)
        until(lambda: hung.call("on_peer"), "the data is in peer memory")
        hung.freeze()
        yield cluster


def test_slabs_of_a_hung_consumer_are_quarantined_and_never_lent_again(cluster: Cluster) -> None:
    producer, hung = cluster.processes["producer"], cluster.processes[HUNG]
    held = producer.call("state")["held"]
    kept = hung.mapped_slabs()
    assert len(kept) == held > 0

    outcome = producer.call("reclaim", OFFERED, DEADLINE_S, 2.0)
    # The free slabs are back; the deadline for the others has escalated, and permits nothing.
    assert outcome == {"done": False, "returned": OFFERED - held, "escalated": True}
    assert producer.call("state")["quarantined"] == held

    producer.call("offer", OFFERED)
    successor = cluster.start_consumer(NEXT)
    successor.call("fill", 4, 100)
    until(lambda: successor.call("on_peer"), "somebody else's data is in peer memory")
    cluster.check_mappings()
    assert hung.mapped_slabs() == kept, "a mapping was taken from a hung process"
    assert successor.call("verify") == 4

    hung.thaw()
    assert hung.call("verify") == 4
    until(lambda: not producer.call("state")["quarantined"], "late answers retire the slabs")
    assert hung.call("verify") == successor.call("verify") == 4
    cluster.check_mappings()
    assert not kept & producer.mapped_slabs(), "a quarantined slab is in use again"


def test_a_hung_consumer_that_is_killed_gives_its_memory_back_as_new_slabs(
    cluster: Cluster,
) -> None:
    producer, hung = cluster.processes["producer"], cluster.processes[HUNG]
    kept = hung.mapped_slabs()
    assert not producer.call("reclaim", OFFERED, DEADLINE_S, 1.0)["done"]
    hung.kill()
    until(lambda: not producer.call("state")["held"], "its death is noticed")
    # The books turn first; the mapping goes a moment later, outside the lock.
    until(lambda: not kept & producer.mapped_slabs(), "its slabs are unmapped for good")
    producer.call("offer", OFFERED)
    assert producer.call("state") == {
        "offered": OFFERED,
        "free": OFFERED,
        "held": 0,
        "quarantined": 0,
    }


def test_the_books_keep_the_bytes_of_a_hung_consumer_booked(cluster: Cluster) -> None:
    producer = cluster.processes["producer"]
    held = producer.call("state")["held"]
    producer.call("reclaim", OFFERED, DEADLINE_S, 1.0)

    def booked() -> bool:
        (view,) = cluster.get("/producers")["producers"]
        return bool(
            view["offered_bytes"] == view["leased_bytes"] == held * view["slab_bytes"]
            and view["free_bytes"] == 0
        )

    until(booked, "what may be mapped stays booked, and nothing else is offered")
