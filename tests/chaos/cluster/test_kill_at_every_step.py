"""SIGKILL at every step of the protocol: first the steps are recorded, then each is died at.

One scenario lends, pages, reclaims under data, lends again, rewrites and releases. A run without
deaths says which steps each process takes. Then, for every process and every recorded step, the
scenario runs again and the process dies right before or right after that step. Whoever died is
started again under its old name, and the scenario goes on. A second consumer lives through it all
with data of its own, so that a slab handed out twice would be seen.

`make test-slow` draws some of these deaths. `make chaos` takes each step of each process, and then
later repetitions of steps until `KILLS` processes were killed.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Final

import httpx
import pytest

from harness.bounds import HANG_S, until
from harness.cluster import Cluster, DiedError, new_cluster
from harness.doom import KILL, Doom, Victim
from harness.slices import IS_WHOLE, shuffled

if TYPE_CHECKING:
    from collections.abc import Callable

OFFERED: Final = 12
TENSORS: Final = 8
BYSTANDER: Final = "consumer-bystander"
CONSUMER: Final = "consumer"
VICTIMS: Final = [
    ("producer", Victim.SELF),
    (CONSUMER, Victim.SELF),
    ("coordinator", Victim.SELF),
    ("coordinator", Victim.STORE),
    ("coordinator", Victim.STORE_AND_DATA),
]
"""Process by whose steps the deaths are named, and who dies. The coordinator starts its store."""

DEEPEST: Final = 16
"""Repetitions of a step that are died at, once each step was. Doubled, most of what is added are
copies of the consumer, much the same situation again."""

KILLS: Final = int(os.environ.get("AQUA_CHAOS_KILLS", "1000"))
SLICE: Final = 4
"""Kills of each victim that `make test-slow` takes; `make chaos` takes its share of `KILLS`."""

AT_ONCE: Final = 4
"""Clusters at the same time."""


class Scenario:
    """The story, told so that any stage can be repeated after somebody's death."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.offered = OFFERED
        self.stages: list[Callable[[], None]] = [
            self.lend,
            self.store,
            self.move_to_peer,
            self.reclaim_some,
            self.lend_again,
            self.move_to_peer,
            self.rewrite,
            self.reclaim_all,
            self.lend_again,
            self.move_to_peer,
            self.release_some,
            self.settle,
        ]

    def play(self) -> None:
        """Every stage, each repeated until nobody dies in it."""
        self.cluster.start_coordinator()
        self.cluster.start_producer()
        self.cluster.start_consumer(BYSTANDER)
        self.cluster.start_consumer(CONSUMER)
        self._survive(lambda: self._call(BYSTANDER, "fill", 3, 1_000))
        for stage in self.stages:
            self._survive(stage)
            self._survive(self.verify)
        for name in (CONSUMER, BYSTANDER, "producer"):
            if not self.cluster.processes.pop(name).finish():
                self.cluster.deaths[name] += 1  # In its last steps, where it has no successor.
        self._survive(self.books_are_empty)

    # --- Stages ---------------------------------------------------------------------------

    def lend(self) -> None:
        self._call("producer", "offer", self.offered)

    def store(self) -> None:
        missing = TENSORS - self._call(CONSUMER, "verify")
        self._call(CONSUMER, "fill", missing, 1)

    def move_to_peer(self) -> None:
        self._wait(lambda: self._call(CONSUMER, "on_peer"), "the data is in peer memory")
        self._wait(lambda: self._call(BYSTANDER, "on_peer"), "the bystander's data is, too")

    def reclaim_some(self) -> None:
        self._reclaim(OFFERED // 2)

    def reclaim_all(self) -> None:
        self._reclaim(0)
        self._wait(lambda: self._call(CONSUMER, "on_host"), "everything has left the producer")

    def lend_again(self) -> None:
        self.offered = OFFERED
        self.lend()

    def rewrite(self) -> None:
        self._call(CONSUMER, "rewrite", 500)

    def release_some(self) -> None:
        self._call(CONSUMER, "release", 3)

    def verify(self) -> None:
        self.cluster.check_mappings()
        self._call(CONSUMER, "verify")
        assert self._call(BYSTANDER, "verify") == 3

    def settle(self) -> None:
        self._wait(self._books_agree, "the books say what the members say")

    def books_are_empty(self) -> None:
        def empty() -> bool:
            leases = self.cluster.get("/leases")["leases"]
            booked = [lease for lease in leases if lease["state"] not in {"released", "lost"}]
            return not booked and not self.cluster.get("/producers")["producers"]

        self._wait(empty, "nothing is booked when everybody has left")

    # --- What stages are made of ----------------------------------------------------------

    def _call(self, name: str, method: str, *arguments: object) -> int:
        answer = self.cluster.processes[name].call(method, *arguments)
        return int(answer or 0)

    def _reclaim(self, keep: int) -> None:
        """Take back all but `keep`; the deadline is long, so that nothing is quarantined."""
        producer = self.cluster.processes["producer"]
        self.offered = keep
        excess = producer.call("state")["offered"] - keep
        if excess > 0:
            assert producer.call("reclaim", excess, HANG_S, HANG_S)["done"], "reclaim stalls"

    def _books_agree(self) -> bool:
        state = self.cluster.processes["producer"].call("state")
        leased = sum(self._call(name, "leased_slabs") for name in (CONSUMER, BYSTANDER))
        views = self.cluster.get("/producers")["producers"]
        if not views:
            return False  # Books that were lost have yet to hear of it.
        (view,) = views
        slab = view["slab_bytes"]
        return bool(
            state["held"] == leased
            and state["quarantined"] == 0
            and view["offered_bytes"] == state["offered"] * slab
            and view["leased_bytes"] == state["held"] * slab
            and view["free_bytes"] + view["leased_bytes"] == view["offered_bytes"]
        )

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> bool:
            self._revive_coordinator()
            for name, process in self.cluster.processes.items():
                if name != "coordinator" and not process.is_alive:
                    raise DiedError(name)
            try:
                return bool(condition())
            except httpx.HTTPError:  # From a coordinator without its store, or a dead one.
                return False

        until(holds, what)

    # --- Deaths ---------------------------------------------------------------------------

    def _survive(self, stage: Callable[[], object]) -> None:
        while True:
            try:
                stage()
            except DiedError as death:
                self._mourn(str(death))
            else:
                return

    def _mourn(self, name: str) -> None:
        """Somebody died: what must hold now, and a successor of the same name."""
        cluster = self.cluster
        cluster.deaths[name] += 1
        assert cluster.deaths[name] == 1, f"{name} died again: {cluster.deaths}"
        if name == "producer":
            # The data outlives its keeper, before any successor is there.
            for consumer in (CONSUMER, BYSTANDER):
                cluster.processes[consumer].call("verify")
            cluster.start_producer()
            self._survive(self.lend)
        else:
            assert name == CONSUMER, f"{name} was not to die"
            self._call(BYSTANDER, "verify")
            cluster.start_consumer(CONSUMER)
            self._survive(self.store)

    def _revive_coordinator(self) -> None:
        coordinator = self.cluster.processes["coordinator"]
        if coordinator.is_alive:
            return
        self.cluster.deaths["coordinator"] += 1
        assert self.cluster.deaths["coordinator"] == 1, "the coordinator died again"
        # Without a coordinator every copy and every reclaim goes on.
        members = {n: p for n, p in self.cluster.processes.items() if n != "coordinator"}
        if members:
            self.verify()
            if members["producer"].call("state")["offered"]:
                assert members["producer"].call("reclaim", 1, HANG_S, HANG_S)["done"]
                self.verify()
        self.cluster.start_coordinator()
        if members and self.offered:
            self.lend()


@pytest.fixture(scope="module")
def steps() -> dict[str, Counter[str]]:
    """The steps of a run in which nobody dies."""
    with new_cluster() as cluster:
        Scenario(cluster).play()
        assert not cluster.deaths
        return {name: cluster.steps(name) for name in ("producer", CONSUMER, "coordinator")}


def test_the_scenario_takes_every_step_of_the_lease_channel(steps: dict[str, Counter[str]]) -> None:
    said_by_producer = {"welcome", "slabs", "reclaim", "goodbye"}
    said_by_consumer = {"hello", "released", "goodbye"}
    seen = {step[5:] for step in steps["producer"] if step[:5] == "send:"}
    # Memory may be taken back between a grant and its attach: that attach is refused.
    assert said_by_producer <= seen <= said_by_producer | {"refused"}
    assert {step[5:] for step in steps[CONSUMER] if step[:5] == "send:"} == said_by_consumer
    assert {"script:grant_lease", "script:report_producer"} <= set(steps["coordinator"])


def play_all(name: str, dooms: list[Doom]) -> int:
    """Play the scenario once for every doom; returns how many kills there were."""

    def play(doom: Doom) -> tuple[int, str]:
        with new_cluster(name, doom) as cluster:
            try:
                Scenario(cluster).play()
            except (AssertionError, DiedError) as error:
                return 0, f"{name} dies {doom}: {error!r}"
            kills = cluster.steps(name)[KILL]
            if cluster.deaths[name] != (kills if doom.victim is Victim.SELF else 0):
                return 0, f"{name} dies {doom}: {kills} kills, but {cluster.deaths} died"
            return kills, ""

    # Clusters share nothing, and a scenario mostly waits.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(play, dooms))
    failures = [failure for _, failure in results if failure]
    assert not failures, "\n".join(failures)
    return sum(kills for kills, _ in results)


@pytest.mark.parametrize(("name", "victim"), VICTIMS)
def test_nothing_is_lost_whoever_dies_at_whatever_step(
    steps: dict[str, Counter[str]], name: str, victim: Victim
) -> None:
    first = list(Doom.walk(steps[name], deepest=1, victim=victim))
    later = [
        doom for doom in Doom.walk(steps[name], deepest=DEEPEST, victim=victim) if doom.number > 1
    ]
    # Reports and copies are not the same number in every run: a step that did not come is replaced
    # by the next of the draw, and when all were drawn, they come again.
    key = f"{name} {victim}"
    drawn = chain(shuffled(first, key=key), cycle(shuffled(later, key=key)))
    kills, wanted = 0, KILLS // len(VICTIMS) if IS_WHOLE else SLICE
    while kills < wanted:
        kills += play_all(name, list(islice(drawn, wanted - kills)))


def test_one_bit_that_changes_is_seen() -> None:
    with new_cluster() as cluster:
        scenario = Scenario(cluster)
        scenario.stages[-1:] = [lambda: cluster.processes[CONSUMER].call("corrupt")]
        with pytest.raises(AssertionError, match="holds wrong bytes"):
            scenario.play()
