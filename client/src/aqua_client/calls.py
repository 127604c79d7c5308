"""Each operation of the coordinator's REST API as a value; nothing here sends anything.

A function of this module has the name of the operation in the coordinator's OpenAPI document and
takes what the operation needs; it returns a `Call` (or a `Listing` of pages), which either client
sends. Whether a call may be repeated is part of it:

- Reads, and writes of a full state (`put_placements`, `put_profile`), may.
- `grant_lease` and `open_reclaim` carry an idempotency key: repeated, they are done once.
- `renew_lease` and `release_lease` are harmless when repeated.
- Reports, updates of offers and farewells may be sent `elsewhere`, to another coordinator at once,
  since repeated word for word they do no harm. Not later: the next report says more.
- `revoke_lease` is not: its second answer would say that the lease has ended already.

A coordinator of the next version may say more than is known here: what an answer has beyond its
model is ignored, at any depth, while the coordinator refuses a request with a field that it does
not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from pydantic import BaseModel

from aqua_protocol import leases, members
from aqua_protocol.ids import new_idempotency_key
from aqua_protocol.profile import ModelProfile, Profiles

if TYPE_CHECKING:
    from aqua_protocol.lease import LeaseState

PAGE_LIMIT: Final = 1000
"""Entries asked for at once: the most that the coordinator puts on a page. Half as many would
double the requests of a listing; it grants no more."""

AnswerT = TypeVar("AnswerT")
ModelT = TypeVar("ModelT", bound=BaseModel)
PageT = TypeVar("PageT", bound=leases.Page)
EntryT = TypeVar("EntryT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[AnswerT]):
    """One request, before it is sent.

    Attributes:
        read: Reads the body of the answer; raises `ValidationError` if it is another schema.
        idempotency_key: Under which the coordinator does it once only.
        repeatable: Whether sending it twice, then or later, does no harm.
        elsewhere: Whether sending it to another coordinator at once does no harm.
        absent_is_done: Whether an unknown resource is what was wanted: leaving twice.
    """

    method: str
    path: str
    read: Callable[[bytes], AnswerT]
    body: bytes | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    idempotency_key: str | None = None
    repeatable: bool = False
    elsewhere: bool = False
    absent_is_done: bool = False


@dataclass(frozen=True, slots=True)
class Listing(Generic[PageT, EntryT]):
    """A listing, page after page: the call for the first, and what a page holds."""

    first: Call[PageT]
    entries: Callable[[PageT], list[EntryT]]

    def after(self, page: PageT) -> Call[PageT] | None:
        """Return the call for the page after `page`, or None at the end."""
        if page.next_cursor is None:
            return None
        return replace(self.first, params={**self.first.params, "cursor": page.next_cursor})


def report_producer(report: members.ProducerReport) -> Call[members.ProducerAck]:
    """Tell the books a producer's full state; sent once."""
    path = f"/v1/producers/{report.producer_id}"
    return _call("PUT", path, members.ProducerAck, report, elsewhere=True)


def report_consumer(report: members.ConsumerReport) -> Call[members.ConsumerAck]:
    """Tell the books a consumer's full state, which renews its leases; sent once."""
    path = f"/v1/consumers/{report.consumer_id}"
    return _call("PUT", path, members.ConsumerAck, report, elsewhere=True)


def heartbeat(reports: members.Heartbeat) -> Call[members.HeartbeatAck]:
    """Tell the books the full state of many members; sent once."""
    return _call("POST", "/v1/heartbeats", members.HeartbeatAck, reports, elsewhere=True)


def remove_producer(producer_id: str, incarnation: str) -> Call[None]:
    """Take a producer that holds nothing any more out of the books; not there is fine."""
    return _remove(f"/v1/producers/{producer_id}", incarnation)


def remove_consumer(consumer_id: str, incarnation: str) -> Call[None]:
    """Take a consumer that holds nothing any more out of the books; not there is fine."""
    return _remove(f"/v1/consumers/{consumer_id}", incarnation)


def get_producer(producer_id: str) -> Call[members.ProducerView]:
    """Read one producer as the books have it."""
    return _get(f"/v1/producers/{producer_id}", members.ProducerView)


def get_consumer(consumer_id: str) -> Call[members.ConsumerView]:
    """Read one consumer as the books have it."""
    return _get(f"/v1/consumers/{consumer_id}", members.ConsumerView)


def list_producers() -> Listing[members.ProducerPage, members.ProducerView]:
    """List producers by name."""
    return _pages("/v1/producers", members.ProducerPage, lambda page: page.producers)


def list_consumers() -> Listing[members.ConsumerPage, members.ConsumerView]:
    """List consumers by name."""
    return _pages("/v1/consumers", members.ConsumerPage, lambda page: page.consumers)


def list_offers() -> Listing[members.OfferPage, members.OfferView]:
    """List offers by the producer's name."""
    return _pages("/v1/offers", members.OfferPage, lambda page: page.offers)


def update_offer(producer_id: str, update: members.OfferUpdate) -> Call[members.OfferView]:
    """Change an offer between two reports; sent once."""
    path = f"/v1/offers/{producer_id}"
    return _call("PUT", path, members.OfferView, update, elsewhere=True)


def grant_lease(
    request: leases.LeaseRequest, *, idempotency_key: str | None = None
) -> Call[leases.LeaseGrant]:
    """Ask for a lease; repeated under one key, so at most one is granted.

    Args:
        idempotency_key: To go on with a call that ended in `UnavailableError`.

    Raises:
        CapacityError: No producer can lend that much now.
        UnavailableError: No answer. The lease may have been granted: call again with the same
            key, or let it expire unattached.
    """
    return _post_once("/v1/leases", leases.LeaseGrant, request, idempotency_key)


def renew_lease(lease_id: str, renewal: leases.LeaseRenewal) -> Call[leases.LeaseView]:
    """Start a lease's time to live anew, outside of a report.

    Raises:
        LeaseLostError: It has ended.
        StaleEpochError: It was granted under another epoch.
    """
    return _call("POST", f"/v1/leases/{lease_id}/renew", leases.LeaseView, renewal, repeatable=True)


def release_lease(
    lease_id: str, epoch: int, failure: leases.AttachFailure | None = None
) -> Call[leases.LeaseView]:
    """Give up a lease's right; a second release is harmless."""
    path = f"/v1/leases/{lease_id}/release"
    action = leases.LeaseRelease(epoch=epoch, failure=failure)
    return _call("POST", path, leases.LeaseView, action, repeatable=True)


def revoke_lease(lease_id: str, epoch: int) -> Call[leases.LeaseView]:
    """End the right to a lease, as an operator; sent once."""
    path, action = f"/v1/leases/{lease_id}/revoke", leases.LeaseAction(epoch=epoch)
    return _call("POST", path, leases.LeaseView, action)


def get_lease(lease_id: str) -> Call[leases.LeaseView]:
    """Read one lease as the books have it."""
    return _get(f"/v1/leases/{lease_id}", leases.LeaseView)


def list_leases(
    *,
    state: LeaseState | None = None,
    producer_id: str | None = None,
    consumer_id: str | None = None,
) -> Listing[leases.LeasePage, leases.LeaseView]:
    """List booked leases by producer, all or those of a state or member."""
    wanted = {"state": state, "producer_id": producer_id, "consumer_id": consumer_id}
    params = {name: str(value) for name, value in wanted.items() if value is not None}
    return _pages("/v1/leases", leases.LeasePage, lambda page: page.leases, **params)


def open_reclaim(
    request: leases.ReclaimRequest, *, idempotency_key: str | None = None
) -> Call[leases.ReclaimView]:
    """Ask a producer to take memory back, as an operator; repeated under one key."""
    return _post_once("/v1/reclaims", leases.ReclaimView, request, idempotency_key)


def get_reclaim(reclaim_id: str) -> Call[leases.ReclaimView]:
    """Read one reclaim as the books have it."""
    return _get(f"/v1/reclaims/{reclaim_id}", leases.ReclaimView)


def list_reclaims() -> Listing[leases.ReclaimPage, leases.ReclaimView]:
    """List reclaims in the order they were opened, also for a while after their end."""
    return _pages("/v1/reclaims", leases.ReclaimPage, lambda page: page.reclaims)


def list_quotas() -> Listing[leases.QuotaPage, leases.QuotaView]:
    """List tenants by name, with their quotas."""
    return _pages("/v1/quotas", leases.QuotaPage, lambda page: page.quotas)


def list_quarantine() -> Listing[leases.QuarantinePage, leases.QuarantinedRecord]:
    """List records of the books that were set aside, oldest first, as an operator."""
    return _pages("/v1/quarantine", leases.QuarantinePage, lambda page: page.records)


def put_placements(plan: leases.PlacementPlan) -> Call[leases.PlacementPlan]:
    """Replace the plan that new leases follow, as an operator."""
    return _call("PUT", "/v1/placements", leases.PlacementPlan, plan, repeatable=True)


def get_placements(
    *, cursor: str | None = None, limit: int | None = None
) -> Call[leases.PlacementPage]:
    """Read the plan in force; one of more than 1000 pairings, page by page.

    Args:
        cursor: `next_cursor` of the page before, which must have the same `plan_hash`.
    """
    wanted = {"cursor": cursor, "limit": limit}
    params = {name: str(value) for name, value in wanted.items() if value is not None}
    return _get("/v1/placements", leases.PlacementPage, **params)


def put_profile(profile: ModelProfile) -> Call[ModelProfile]:
    """Keep a model's profile, as an operator.

    Only the fields that the schema fixes are sent: the measurements behind them stay in the file.
    """
    call = _call("PUT", "/v1/profiles", ModelProfile, profile, repeatable=True)
    fixed = profile.model_dump_json(exclude=set(profile.model_extra or ()))
    return replace(call, body=fixed.encode())


def get_profiles(model: str = "") -> Call[list[ModelProfile]]:
    """Read the profiles of all models, or of one, if it was pushed."""
    return Call(
        method="GET",
        path="/v1/profiles",
        read=lambda body: _reader(Profiles)(body).profiles,
        params={"model": model} if model else {},
        repeatable=True,
    )


def healthz() -> Call[leases.Health]:
    """Ask whether the process lives; needs no token."""
    return _get("/healthz", leases.Health)


def readyz() -> Call[leases.Health]:
    """Ask whether the store answers and takes writes; needs no token."""
    return _get("/readyz", leases.Health)


def _call(
    method: str,
    path: str,
    answer: type[ModelT],
    body: BaseModel,
    *,
    repeatable: bool = False,
    elsewhere: bool = False,
    idempotency_key: str | None = None,
) -> Call[ModelT]:
    return Call(
        method=method,
        path=path,
        # Without nulls: a coordinator of the version before refuses fields that it does not know.
        body=body.model_dump_json(exclude_none=True).encode(),
        read=_reader(answer),
        repeatable=repeatable,
        elsewhere=elsewhere,
        idempotency_key=idempotency_key,
    )


def _post_once(path: str, answer: type[ModelT], body: BaseModel, key: str | None) -> Call[ModelT]:
    key = key or new_idempotency_key()
    return _call("POST", path, answer, body, repeatable=True, idempotency_key=key)


def _get(path: str, answer: type[ModelT], **params: str) -> Call[ModelT]:
    return Call(method="GET", path=path, read=_reader(answer), params=params, repeatable=True)


def _reader(answer: type[ModelT]) -> Callable[[bytes], ModelT]:
    return partial(answer.model_validate_json, extra="ignore")


def _pages(
    path: str, answer: type[PageT], entries: Callable[[PageT], list[EntryT]], **params: str
) -> Listing[PageT, EntryT]:
    return Listing(_get(path, answer, limit=str(PAGE_LIMIT), **params), entries)


def _remove(path: str, incarnation: str) -> Call[None]:
    params = {"incarnation": incarnation}
    return Call(
        method="DELETE",
        path=path,
        read=lambda _: None,
        params=params,
        elsewhere=True,
        absent_is_done=True,
    )
