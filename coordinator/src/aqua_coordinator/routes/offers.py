"""Offers: the bytes that producers volunteer."""

from __future__ import annotations

from fastapi import APIRouter

from aqua_coordinator.hot_routes import hot
from aqua_coordinator.routes.pagination import Limit, NameCursor, next_name
from aqua_coordinator.services import CallerDep, ServicesDep
from aqua_coordinator.store.rows import offer_of
from aqua_coordinator.tokens import Role
from aqua_protocol.ids import Name
from aqua_protocol.members import OfferUpdate, OfferView
from aqua_protocol.pages import OfferPage

router = APIRouter(prefix="/v1/offers", tags=["offers"])


@router.get("")
async def list_offers(
    _: CallerDep, services: ServicesDep, cursor: NameCursor = None, limit: Limit = 100
) -> OfferPage:
    """Offers by the producer's name; free + leased == offered in each."""
    rows = await services.ledger.producers(cursor=cursor or "", limit=limit)
    offers = [offer_of(row.view) for row in rows]
    return OfferPage(
        offers=offers, next_cursor=next_name([offer.producer_id for offer in offers], limit)
    )


@router.put("/{producer_id}")
@hot
async def update_offer(
    producer_id: Name, body: OfferUpdate, caller: CallerDep, services: ServicesDep
) -> OfferView:
    """Change an offer between two reports; lent slabs stay under it until they are back."""
    caller.require(Role.PRODUCER, member=producer_id)
    return await services.ledger.update_offer(producer_id, body)
