"""Members: producers, which offer memory, and consumers, which page into memory on lease.

Their reports come one by one or, from a node agent that speaks for its engines, many in one
heartbeat. Offers are the bytes that producers volunteer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query

from aqua_coordinator.access.audit import note
from aqua_coordinator.access.auth import Caller
from aqua_coordinator.access.rates import RateKind
from aqua_coordinator.access.tokens import Role
from aqua_coordinator.http.hot_routes import hot
from aqua_coordinator.services import CallerDep, Limit, NameCursor, Services, ServicesDep, next_name
from aqua_protocol import (
    AquaError,
    ErrorBody,
    RequestInvalidError,
    UnavailableError,
    require_protocol_version,
)
from aqua_protocol.ids import Name
from aqua_protocol.members import (
    ConsumerAck,
    ConsumerPage,
    ConsumerReport,
    ConsumerView,
    Heartbeat,
    HeartbeatAck,
    OfferPage,
    OfferUpdate,
    OfferView,
    ProducerAck,
    ProducerPage,
    ProducerReport,
    ProducerView,
)

producers = APIRouter(prefix="/v1/producers", tags=["producers"])
consumers = APIRouter(prefix="/v1/consumers", tags=["consumers"])
heartbeats = APIRouter(prefix="/v1/heartbeats", tags=["heartbeats"])
offers = APIRouter(prefix="/v1/offers", tags=["offers"])

AckT = TypeVar("AckT")
Incarnation = Annotated[Name, Query(description="Life of the process that takes its leave.")]


@producers.put("/{producer_id}")
@hot
async def report_producer(
    producer_id: Name, body: ProducerReport, caller: CallerDep, services: ServicesDep
) -> ProducerAck:
    """Report a producer's full state: registration, heartbeat and every change."""
    if body.producer_id != producer_id:
        raise RequestInvalidError("producer_id: body and path name different producers")
    services.rates.take(caller, RateKind.REPORTS, 1 + len(body.reclaims))
    return await _book_producer(body, caller, services)


async def _book_producer(report: ProducerReport, caller: Caller, services: Services) -> ProducerAck:
    caller.require(Role.PRODUCER, member=report.producer_id)
    require_protocol_version(report.protocol_version, who=f"producer {report.producer_id}")
    booked = await services.ledger.report_producer(
        report, as_tenant=caller.tenant, is_bound=caller.is_bound
    )
    services.metrics.attached(booked.attached_s)
    services.metrics.reclaimed(booked.reclaimed)
    key = await services.signer.checking_key(
        booked.books_id, report.producer_id, report.incarnation
    )
    return ProducerAck(
        books_id=booked.books_id,
        heartbeat_s=services.heartbeats.next_s(report.producer_id),
        ended=booked.ended,
        min_epoch=booked.min_epoch,
        capability_key=key,
        grantable=booked.grantable,
        reclaims=booked.orders,
    )


@producers.get("")
async def list_producers(
    caller: CallerDep, services: ServicesDep, cursor: NameCursor = None, limit: Limit = 100
) -> ProducerPage:
    """Producers by name; to a token of a tenant, its own."""
    rows = await services.ledger.producers(
        cursor=cursor or "", limit=limit, as_tenant=caller.tenant
    )
    return ProducerPage(
        producers=[*rows], next_cursor=next_name([row.producer_id for row in rows], limit)
    )


@producers.get("/{producer_id}")
async def get_producer(producer_id: Name, caller: CallerDep, services: ServicesDep) -> ProducerView:
    """Read one producer."""
    return await services.ledger.producer(producer_id, as_tenant=caller.tenant)


@producers.delete("/{producer_id}", status_code=204)
async def remove_producer(
    producer_id: Name, incarnation: Incarnation, caller: CallerDep, services: ServicesDep
) -> None:
    """Leave the books; refused while consumers hold slabs."""
    caller.require(Role.PRODUCER, member=producer_id)
    await services.ledger.remove_producer(producer_id, incarnation, as_tenant=caller.tenant)


@consumers.put("/{consumer_id}")
@hot
async def report_consumer(
    consumer_id: Name, body: ConsumerReport, caller: CallerDep, services: ServicesDep
) -> ConsumerAck:
    """Report a consumer's full state; every lease it names is renewed."""
    if body.consumer_id != consumer_id:
        raise RequestInvalidError("consumer_id: body and path name different consumers")
    services.rates.take(caller, RateKind.REPORTS)
    return await _book_consumer(body, caller, services)


async def _book_consumer(report: ConsumerReport, caller: Caller, services: Services) -> ConsumerAck:
    caller.require(Role.CONSUMER, member=report.consumer_id)
    require_protocol_version(report.protocol_version, who=f"consumer {report.consumer_id}")
    booked = await services.ledger.report_consumer(
        report, as_tenant=caller.tenant, is_bound=caller.is_bound
    )
    return ConsumerAck(
        books_id=booked.books_id,
        heartbeat_s=services.heartbeats.next_s(report.consumer_id),
        ended=booked.ended,
        available_bytes=booked.available_bytes,
    )


@consumers.get("")
async def list_consumers(
    caller: CallerDep, services: ServicesDep, cursor: NameCursor = None, limit: Limit = 100
) -> ConsumerPage:
    """Consumers by name; to a token of a tenant, its own."""
    views = await services.ledger.consumers(
        cursor=cursor or "", limit=limit, as_tenant=caller.tenant
    )
    return ConsumerPage(
        consumers=views, next_cursor=next_name([view.consumer_id for view in views], limit)
    )


@consumers.get("/{consumer_id}")
async def get_consumer(consumer_id: Name, caller: CallerDep, services: ServicesDep) -> ConsumerView:
    """Read one consumer."""
    return await services.ledger.consumer(consumer_id, as_tenant=caller.tenant)


@consumers.delete("/{consumer_id}", status_code=204)
async def remove_consumer(
    consumer_id: Name, incarnation: Incarnation, caller: CallerDep, services: ServicesDep
) -> None:
    """Leave the books, and give up every right that is left."""
    caller.require(Role.CONSUMER, member=consumer_id)
    await services.ledger.remove_consumer(consumer_id, incarnation, as_tenant=caller.tenant)


@heartbeats.post("")
@hot
async def heartbeat(body: Heartbeat, caller: CallerDep, services: ServicesDep) -> HeartbeatAck:
    """Take many reports; one that is refused does not spoil the others."""
    reclaims = sum(len(report.reclaims) for report in body.producers)
    count = len(body.producers) + len(body.consumers) + reclaims
    services.rates.take(caller, RateKind.REPORTS, count)
    lending = [_ack_or_error(_book_producer(one, caller, services)) for one in body.producers]
    paging = [_ack_or_error(_book_consumer(one, caller, services)) for one in body.consumers]
    acks = await asyncio.gather(asyncio.gather(*lending), asyncio.gather(*paging))
    answer = HeartbeatAck(producers=acks[0], consumers=acks[1])
    note(
        producers=_outcomes((report.producer_id for report in body.producers), answer.producers),
        consumers=_outcomes((report.consumer_id for report in body.consumers), answer.consumers),
    )
    return answer


def _outcomes(names: Iterable[str], acks: Iterable[object]) -> dict[str, str]:
    """What came of each report, by its member."""
    return {name: getattr(ack, "code", "ok") for name, ack in zip(names, acks, strict=True)}


async def _ack_or_error(booking: Awaitable[AckT]) -> AckT | ErrorBody:
    try:
        return await booking
    except UnavailableError:
        # The store's absence is no fault of one report: the call fails as a whole.
        raise
    except AquaError as error:
        return error.to_body()


@offers.get("")
async def list_offers(
    _: CallerDep, services: ServicesDep, cursor: NameCursor = None, limit: Limit = 100
) -> OfferPage:
    """Offers of all by the producer's name; free + leased == offered in each."""
    rows = await services.ledger.producers(cursor=cursor or "", limit=limit)
    return OfferPage(
        offers=[OfferView.model_validate(row, from_attributes=True) for row in rows],
        next_cursor=next_name([row.producer_id for row in rows], limit),
    )


@offers.put("/{producer_id}")
@hot
async def update_offer(
    producer_id: Name, body: OfferUpdate, caller: CallerDep, services: ServicesDep
) -> OfferView:
    """Change an offer between two reports; lent slabs stay under it until they are back."""
    caller.require(Role.PRODUCER, member=producer_id)
    services.rates.take(caller, RateKind.REPORTS)
    return await services.ledger.update_offer(producer_id, body, as_tenant=caller.tenant)
