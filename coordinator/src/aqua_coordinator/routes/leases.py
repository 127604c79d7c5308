"""Leases: rights to slabs, granted, renewed, given up and revoked."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from aqua_client.tracing import span_of
from aqua_coordinator.access.audit import note
from aqua_coordinator.access.rates import RateKind
from aqua_coordinator.access.tokens import Role
from aqua_coordinator.http.hot_routes import hot
from aqua_coordinator.services import CallerDep, IdempotencyKey, Limit, ServicesDep
from aqua_protocol import LeaseState
from aqua_protocol.errors import QuotaExceededError
from aqua_protocol.ids import Name
from aqua_protocol.leases import (
    LeaseAction,
    LeaseGrant,
    LeasePage,
    LeaseRelease,
    LeaseRenewal,
    LeaseRequest,
    LeaseView,
)

router = APIRouter(prefix="/v1/leases", tags=["leases"])


LeaseCursor = Annotated[
    str | None,
    Query(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}@([0-9]{1,16}|\+inf)$",
        description="`next_cursor` of the page before.",
    ),
]


@router.post("", status_code=201)
@hot
async def grant_lease(
    body: LeaseRequest, caller: CallerDep, services: ServicesDep, idempotency_key: IdempotencyKey
) -> LeaseGrant:
    """Ask for memory of a producer; safe to repeat under the same Idempotency-Key."""
    note(consumer_id=body.consumer_id)
    caller.require(Role.CONSUMER, member=body.consumer_id)
    services.rates.take(caller, RateKind.GRANTS)
    try:
        with span_of(services.tracer, "grant", {"aqua.bytes": body.bytes}) as span:
            grant = await services.ledger.grant_lease(
                body,
                idempotency_key=idempotency_key,
                attach_window_s=services.settings.attach_window_s,
                as_tenant=caller.tenant,
            )
            if span is not None:
                span.set_attribute("aqua.lease.id", grant.lease.lease_id)
                span.set_attribute("aqua.producer.id", grant.lease.producer_id)
    except QuotaExceededError as error:
        services.metrics.quota_refusals.labels(error.details["quota"]).inc()
        raise
    lease = grant.lease
    note(lease_id=lease.lease_id, producer_id=lease.producer_id, bytes=lease.bytes)
    return LeaseGrant(
        lease=lease,
        token=await services.signer.capability(grant),
        endpoint=grant.endpoint,
        transport=grant.transport,
        slab_bytes=grant.slab_bytes,
    )


@router.get("")
async def list_leases(
    caller: CallerDep,
    services: ServicesDep,
    *,
    state: Annotated[LeaseState | None, Query(description="Only in this state.")] = None,
    producer_id: Annotated[Name | None, Query(description="Only of this producer.")] = None,
    consumer_id: Annotated[Name | None, Query(description="Only of this consumer.")] = None,
    cursor: LeaseCursor = None,
    limit: Limit = 100,
) -> LeasePage:
    """Booked leases by producer, and in the order of their grants.

    To a token of a tenant those of its consumers, as if it had filtered. With a filter a page may
    be short, or empty, and still not be the last: go on until `next_cursor` is null.
    """
    views, position = await services.ledger.leases(
        cursor=cursor,
        limit=limit,
        state=state,
        producer_id=producer_id or "",
        consumer_id=consumer_id or "",
        as_tenant=caller.tenant,
    )
    return LeasePage(leases=views, next_cursor=position)


@router.get("/{lease_id}")
async def get_lease(lease_id: Name, caller: CallerDep, services: ServicesDep) -> LeaseView:
    """Read one lease."""
    return await services.ledger.lease(lease_id, as_tenant=caller.tenant)


@router.post("/{lease_id}/renew")
@hot
async def renew_lease(
    lease_id: Name, body: LeaseRenewal, caller: CallerDep, services: ServicesDep
) -> LeaseView:
    """Start the time to live anew. A report that names the lease does the same."""
    caller.require(Role.CONSUMER)
    services.rates.take(caller, RateKind.REPORTS)
    return await services.ledger.renew_lease(
        lease_id,
        epoch=body.epoch,
        ttl_s=body.ttl_s,
        as_consumer=caller.member,
        as_tenant=caller.tenant,
    )


@router.post("/{lease_id}/release")
@hot
async def release_lease(
    lease_id: Name, body: LeaseRelease, caller: CallerDep, services: ServicesDep
) -> LeaseView:
    """Give up the right. Bytes that were handed out stay booked until the producer has them."""
    caller.require(Role.CONSUMER)
    return await services.ledger.release_lease(
        lease_id,
        epoch=body.epoch,
        as_consumer=caller.member,
        failure=body.failure,
        voice=caller.token_id,
        as_tenant=caller.tenant,
    )


@router.post("/{lease_id}/revoke")
async def revoke_lease(
    lease_id: Name, body: LeaseAction, caller: CallerDep, services: ServicesDep
) -> LeaseView:
    """End the right to a lease, as an operator."""
    caller.require(Role.OPERATOR)
    return await services.ledger.revoke_lease(lease_id, epoch=body.epoch)
