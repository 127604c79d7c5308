"""Each operation of the coordinator's REST API as a value; nothing here sends anything.

A function of this module has the name of the operation in the coordinator's OpenAPI document and
takes what the operation needs; it returns a `Call` (or a `Listing` of pages), which either client
sends. Whether a call may be repeated is part of it:

- Reads, and writes of a full state (`put_placements`, `put_profile`), may.
- `grant_lease` and `open_reclaim` carry an idempotency key: repeated, they are done once.
- `renew_lease` and `release_lease` are harmless when repeated.
- Reports and updates of offers are not: the next one, with a higher revision, says more.
- `revoke_lease` is not: its second answer would say that the lease has ended already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from aqua_protocol.ids import new_idempotency_key
from aqua_protocol.leases import (
    Health,
    LeaseAction,
    LeaseGrant,
    LeaseRenewal,
    LeaseRequest,
    LeaseView,
    Page,
    PlacementPlan,
    ReclaimRequest,
    ReclaimView,
)
from aqua_protocol.members import (
    ConsumerAck,
    ConsumerReport,
    ConsumerView,
    Heartbeat,
    HeartbeatAck,
    OfferUpdate,
    OfferView,
    ProducerAck,
    ProducerReport,
    ProducerView,
)
from aqua_protocol.pages import ConsumerPage, LeasePage, OfferPage, ProducerPage, ReclaimPage
from aqua_protocol.profile import ModelProfile, Profiles

if TYPE_CHECKING:
    from pydantic import BaseModel

    from aqua_protocol.lease import LeaseState

PAGE_LIMIT: Final = 1000
"""Entries asked for at once: the most that the coordinator puts on a page. Half as many would
double the requests of a listing; it grants no more."""

AnswerT = TypeVar("AnswerT")
PageT = TypeVar("PageT", bound=Page)
EntryT = TypeVar("EntryT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[AnswerT]):
    """One request, before it is sent.

    Attributes:
        method: HTTP verb.
        path: From the root of the server.
        read: Reads the body of the answer; raises `ValidationError` if it is another schema.
        body: JSON, or nothing.
        params: Query parameters.
        idempotency_key: Under which the coordinator does it once only.
        repeatable: Whether sending it twice does no harm.
        absent_is_done: Whether an unknown resource is what was wanted: leaving twice.
    """

    method: str
    path: str
    read: Callable[[bytes], AnswerT]
    body: bytes | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    idempotency_key: str | None = None
    repeatable: bool = False
    absent_is_done: bool = False


@dataclass(frozen=True, slots=True)
class Listing(Generic[PageT, EntryT]):
    """A listing, page after page.

    Attributes:
        first: The call for the first page.
        entries: What a page holds.
    """

    first: Call[PageT]
    entries: Callable[[PageT], list[EntryT]]

    def page_at(self, cursor: str) -> Call[PageT]:
        """The call for the page after `cursor`."""
        return replace(self.first, params={**self.first.params, "cursor": cursor})


# --- Members ------------------------------------------------------------------------------


def report_producer(report: ProducerReport) -> Call[ProducerAck]:
    """Tell the books a producer's full state; sent once."""
    path = f"/v1/producers/{report.producer_id}"
    return Call(method="PUT", path=path, body=_json(report), read=ProducerAck.model_validate_json)


def report_consumer(report: ConsumerReport) -> Call[ConsumerAck]:
    """Tell the books a consumer's full state, which renews its leases; sent once."""
    path = f"/v1/consumers/{report.consumer_id}"
    return Call(method="PUT", path=path, body=_json(report), read=ConsumerAck.model_validate_json)


def heartbeat(reports: Heartbeat) -> Call[HeartbeatAck]:
    """Tell the books the full state of many members; sent once."""
    return Call(
        method="POST",
        path="/v1/heartbeats",
        body=_json(reports),
        read=HeartbeatAck.model_validate_json,
    )


def remove_producer(producer_id: str, incarnation: str) -> Call[None]:
    """Take a producer that holds nothing any more out of the books; not there is fine."""
    return _leave(f"/v1/producers/{producer_id}", incarnation)


def remove_consumer(consumer_id: str, incarnation: str) -> Call[None]:
    """Take a consumer that holds nothing any more out of the books; not there is fine."""
    return _leave(f"/v1/consumers/{consumer_id}", incarnation)


def get_producer(producer_id: str) -> Call[ProducerView]:
    """One producer as the books have it."""
    return _get(f"/v1/producers/{producer_id}", ProducerView.model_validate_json)


def get_consumer(consumer_id: str) -> Call[ConsumerView]:
    """One consumer as the books have it."""
    return _get(f"/v1/consumers/{consumer_id}", ConsumerView.model_validate_json)


def list_producers() -> Listing[ProducerPage, ProducerView]:
    """Producers by name."""
    first = _first_page("/v1/producers", ProducerPage.model_validate_json)
    return Listing(first, lambda page: page.producers)


def list_consumers() -> Listing[ConsumerPage, ConsumerView]:
    """Consumers by name."""
    first = _first_page("/v1/consumers", ConsumerPage.model_validate_json)
    return Listing(first, lambda page: page.consumers)


def list_offers() -> Listing[OfferPage, OfferView]:
    """Offers by the producer's name."""
    first = _first_page("/v1/offers", OfferPage.model_validate_json)
    return Listing(first, lambda page: page.offers)


def update_offer(producer_id: str, update: OfferUpdate) -> Call[OfferView]:
    """Change an offer between two reports; sent once."""
    return Call(
        method="PUT",
        path=f"/v1/offers/{producer_id}",
        body=_json(update),
        read=OfferView.model_validate_json,
    )


# --- Leases and reclaims ------------------------------------------------------------------


def grant_lease(request: LeaseRequest, *, idempotency_key: str | None = None) -> Call[LeaseGrant]:
    """Ask for a lease; repeated under one key, so at most one is granted.

    Args:
        request: What is wanted.
        idempotency_key: To go on with a call that ended in `UnavailableError`.

    Raises:
        CapacityError: No producer can lend that much now.
        UnavailableError: No answer. The lease may have been granted: call again with the same
            key, or let it expire unattached.
    """
    return _post_once("/v1/leases", request, LeaseGrant.model_validate_json, idempotency_key)


def renew_lease(lease_id: str, renewal: LeaseRenewal) -> Call[LeaseView]:
    """Start a lease's time to live anew, outside of a report.

    Raises:
        LeaseLostError: It has ended.
        StaleEpochError: It was granted under another epoch.
    """
    return _act_on_lease(lease_id, "renew", renewal, repeatable=True)


def release_lease(lease_id: str, epoch: int) -> Call[LeaseView]:
    """Give up a lease's right; a second release is harmless."""
    return _act_on_lease(lease_id, "release", LeaseAction(epoch=epoch), repeatable=True)


def revoke_lease(lease_id: str, epoch: int) -> Call[LeaseView]:
    """End the right to a lease, as an operator; sent once."""
    return _act_on_lease(lease_id, "revoke", LeaseAction(epoch=epoch), repeatable=False)


def get_lease(lease_id: str) -> Call[LeaseView]:
    """One lease as the books have it."""
    return _get(f"/v1/leases/{lease_id}", LeaseView.model_validate_json)


def list_leases(
    *,
    state: LeaseState | None = None,
    producer_id: str | None = None,
    consumer_id: str | None = None,
) -> Listing[LeasePage, LeaseView]:
    """Booked leases by producer, all or those of a state or member."""
    wanted = {"state": state, "producer_id": producer_id, "consumer_id": consumer_id}
    params = {name: str(value) for name, value in wanted.items() if value is not None}
    first = _first_page("/v1/leases", LeasePage.model_validate_json, params)
    return Listing(first, lambda page: page.leases)


def open_reclaim(
    request: ReclaimRequest, *, idempotency_key: str | None = None
) -> Call[ReclaimView]:
    """Ask a producer to take memory back, as an operator; repeated under one key."""
    return _post_once("/v1/reclaims", request, ReclaimView.model_validate_json, idempotency_key)


def get_reclaim(reclaim_id: str) -> Call[ReclaimView]:
    """One reclaim as the books have it."""
    return _get(f"/v1/reclaims/{reclaim_id}", ReclaimView.model_validate_json)


def list_reclaims() -> Listing[ReclaimPage, ReclaimView]:
    """Reclaims in the order they were opened, also for a while after their end."""
    first = _first_page("/v1/reclaims", ReclaimPage.model_validate_json)
    return Listing(first, lambda page: page.reclaims)


# --- Plans, profiles, health --------------------------------------------------------------


def put_placements(plan: PlacementPlan) -> Call[PlacementPlan]:
    """Replace the plan that new leases follow, as an operator."""
    return Call(
        method="PUT",
        path="/v1/placements",
        body=_json(plan),
        read=PlacementPlan.model_validate_json,
        repeatable=True,
    )


def get_placements() -> Call[PlacementPlan]:
    """The plan in force."""
    return _get("/v1/placements", PlacementPlan.model_validate_json)


def put_profile(profile: ModelProfile) -> Call[ModelProfile]:
    """Keep a model's profile, as an operator.

    Only the fields that the schema fixes are sent: the measurements behind them stay in the file.
    """
    return Call(
        method="PUT",
        path="/v1/profiles",
        body=profile.model_dump_json(exclude=set(profile.model_extra or ())).encode(),
        read=ModelProfile.model_validate_json,
        repeatable=True,
    )


def get_profiles(model: str = "") -> Call[list[ModelProfile]]:
    """The profiles of all models, or of one, if it was pushed."""

    def read(body: bytes) -> list[ModelProfile]:
        return Profiles.model_validate_json(body).profiles

    return _get("/v1/profiles", read, {"model": model} if model else {})


def healthz() -> Call[Health]:
    """Whether the process lives; needs no token."""
    return _get("/healthz", Health.model_validate_json)


def readyz() -> Call[Health]:
    """Whether the store answers and takes writes; needs no token."""
    return _get("/readyz", Health.model_validate_json)


# --- Shapes -------------------------------------------------------------------------------


def _json(model: BaseModel) -> bytes:
    return model.model_dump_json().encode()


def _get(
    path: str, read: Callable[[bytes], AnswerT], params: Mapping[str, str] | None = None
) -> Call[AnswerT]:
    return Call(method="GET", path=path, read=read, params=params or {}, repeatable=True)


def _first_page(
    path: str, read: Callable[[bytes], PageT], params: Mapping[str, str] | None = None
) -> Call[PageT]:
    return _get(path, read, {**(params or {}), "limit": str(PAGE_LIMIT)})


def _post_once(
    path: str, body: BaseModel, read: Callable[[bytes], AnswerT], idempotency_key: str | None
) -> Call[AnswerT]:
    return Call(
        method="POST",
        path=path,
        body=_json(body),
        read=read,
        idempotency_key=idempotency_key or new_idempotency_key(),
        repeatable=True,
    )


def _act_on_lease(
    lease_id: str, action: str, body: LeaseAction, *, repeatable: bool
) -> Call[LeaseView]:
    return Call(
        method="POST",
        path=f"/v1/leases/{lease_id}/{action}",
        body=_json(body),
        read=LeaseView.model_validate_json,
        repeatable=repeatable,
    )


def _leave(path: str, incarnation: str) -> Call[None]:
    return Call(
        method="DELETE",
        path=path,
        read=lambda _: None,
        params={"incarnation": incarnation},
        absent_is_done=True,
    )
