"""A producer goes by what the books have of its model, and says what it goes by."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

import aqualib
from aqua_client import CoordinatorClient
from aqua_protocol import GIB, UnavailableError
from aqua_protocol.errors import ProfileUnusableError
from aqua_protocol.members import LoadReport
from aqua_protocol.profile import ModelProfile
from aqualib.producer.informer import Informer
from aqualib.producer.offer_rule import ObservedLoad, OfferBytes, ReclaimBytes
from aqualib.producer.producer import Producer
from aqualib.producer.profile_follower import ProfileFollower, ProfileState
from harness.bounds import HANG_S, until
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.patience import patient_client
from harness.producers import SLAB, socket_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "llama"
NOW_S = 1.8e9
DAY_S = 86_400.0
PROFILE: dict[str, Any] = {
    "model": MODEL,
    "kind": "llm",
    "label": "producer",
    "spare_bytes": 4 * SLAB,
    "threshold_bytes": SLAB,
    "stable_rate_per_s": 2.5,
    "queue": {"mean_length": 0.3, "waiting_share": 0.1},
    "provenance": {"measured_at": "2027-01-01T00:00:00+00:00"},
}


@pytest.fixture(scope="module")
def coordinator() -> Iterator[CoordinatorProcess]:
    with data_dir() as path, CoordinatorProcess(path) as process:
        yield process


def pushed(link: CoordinatorClient, **changes: object) -> ModelProfile:
    return link.put_profile(ModelProfile.model_validate(PROFILE | changes))


def follower(link: CoordinatorClient, *names: str) -> ProfileFollower:
    return ProfileFollower(link, names, max_age_s=180 * DAY_S, now_s=lambda: NOW_S)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket_dir() as path:
        monkeypatch.setenv("AQUA_SOCKET_DIR", str(path))
        for name in ("NODE", "DOMAIN", "GPU_UUID"):
            monkeypatch.setenv(f"AQUA_{name}", name.lower())
        yield


def opened(
    url: str, model: str, registry: CollectorRegistry | None = None
) -> AbstractContextManager[Producer]:
    return aqualib.open_producer(
        coordinator_url=url, model=model, slab_bytes=SLAB, registry=registry
    )


class Engine:
    """Reserves all memory, counts its arrivals, and gives memory up when asked."""

    def __init__(self) -> None:
        self.arrived_count = 0
        self.swapped_bytes = 0

    def load(self) -> LoadReport:
        return ObservedLoad(
            queue_length=0,
            memory_used_bytes=0,
            memory_total_bytes=GIB,
            arrived_count=self.arrived_count,
            swapped_bytes=self.swapped_bytes,
        )

    def shrink(self, nbytes: int) -> int:
        return nbytes

    def grow(self, nbytes: int) -> None:
        del nbytes


@pytest.mark.usefixtures("sockets")
def test_an_opened_producer_lends_by_the_profile_of_its_model(
    coordinator: CoordinatorProcess, link: CoordinatorClient
) -> None:
    pushed(link)
    registry, engine = CollectorRegistry(), Engine()
    with opened(coordinator.url, MODEL, registry) as producer:
        until(lambda: producer.measured_profile is not None, "the profile has been read")
        informer = Informer(producer, engine)
        informer.look(0.0)
        assert informer.look(5.0) == OfferBytes(4 * SLAB)
        assert informer.profile.steady_requests_per_s == 2.5
        engine.arrived_count = 100  # In five seconds.
        assert informer.look(10.0) == ReclaimBytes(4 * SLAB)
        value = registry.get_sample_value
        assert value("aqua_lender_profile", {"state": "followed"}) == 1
        assert value("aqua_lender_profile", {"state": "missing"}) == 0
        assert value("aqua_lender_pressures_total", {"cause": "rate"}) == 1
        assert producer.flush_report(HANG_S), "the books take the load of an engine that counts"


@pytest.mark.usefixtures("sockets")
def test_a_profile_that_is_pushed_later_is_gone_by_from_then_on(
    coordinator: CoordinatorProcess, link: CoordinatorClient
) -> None:
    registry = CollectorRegistry()
    with opened(coordinator.url, "later", registry) as producer:
        found = producer.profile_follower
        assert found is not None
        until(lambda: found.state is ProfileState.MISSING, "the books have been read")
        informer = Informer(producer, Engine())
        informer.look(0.0)
        assert informer.profile.steady_requests_per_s is None, "as without a profile"
        assert registry.get_sample_value("aqua_lender_profile", {"state": "missing"}) == 1
        pushed(link, model="later")
        found.refresh()
        informer.look(1.0)
        assert informer.profile.steady_requests_per_s == 2.5


@pytest.mark.usefixtures("sockets")
def test_a_model_that_is_no_producer_lends_nothing(
    coordinator: CoordinatorProcess, link: CoordinatorClient
) -> None:
    pushed(link, model="needy", label="consumer", needed_bytes=SLAB, spare_bytes=0)
    with opened(coordinator.url, "needy") as producer:
        until(lambda: producer.measured_profile is not None, "the profile has been read")
        informer = Informer(producer, Engine())
        informer.look(0.0)
        assert informer.look(1000.0) is None


@pytest.mark.usefixtures("sockets")
def test_swap_that_the_engine_has_allocated_is_taken_from_what_is_lent(
    coordinator: CoordinatorProcess, link: CoordinatorClient
) -> None:
    pushed(link)
    engine = Engine()
    engine.swapped_bytes = 3 * SLAB
    with opened(coordinator.url, MODEL) as producer:
        until(lambda: producer.measured_profile is not None, "the profile has been read")
        informer = Informer(producer, engine)
        informer.look(0.0)
        assert informer.look(5.0) == OfferBytes(SLAB)


def test_the_first_name_that_the_books_know_counts(link: CoordinatorClient) -> None:
    pushed(link, model="org/llama")
    assert follower(link, "served-as", "org/llama", "llama").refresh().model == "org/llama"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"model": "half", "partial": True, "label": "unknown"}, ProfileState.UNUSABLE),
        ({"model": "half", "label": "unknown"}, ProfileState.UNUSABLE),
        ({"model": "old", "provenance": {"measured_at": "2026-01-01"}}, ProfileState.STALE),
    ],
)
def test_what_cannot_be_gone_by_is_named(
    link: CoordinatorClient, changes: dict[str, Any], state: ProfileState
) -> None:
    pushed(link, **changes)
    found = follower(link, changes["model"])
    with pytest.raises(ProfileUnusableError) as failed:
        found.refresh()
    assert failed.value.details == {"model": changes["model"], "state": state.value}
    assert failed.value.remedy
    assert (found.profile, found.state) == (None, state)


def test_a_profile_that_does_not_say_its_age_is_gone_by(link: CoordinatorClient) -> None:
    pushed(link, model="ageless", provenance={"measured_at": ""})
    assert follower(link, "ageless").refresh().model == "ageless"


def test_what_was_found_stays_while_no_coordinator_answers() -> None:
    with (
        data_dir() as path,
        CoordinatorProcess(path) as coordinator,
        patient_client(coordinator.url) as link,
    ):
        pushed(link)
        found, late = follower(link, MODEL), follower(link, MODEL)
        measured = found.refresh()
        coordinator.kill()
        for each in (found, late):
            with pytest.raises(UnavailableError):
                each.refresh()
        assert (found.profile, found.state) == (measured, ProfileState.FOLLOWED)
        assert (late.profile, late.state) == (None, ProfileState.UNREACHABLE)
