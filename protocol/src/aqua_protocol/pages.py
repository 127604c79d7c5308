"""Listings of the coordinator, page by page: entries and where the listing goes on."""

from __future__ import annotations

from aqua_protocol.leases import LeaseView, Page, ReclaimView
from aqua_protocol.members import ConsumerView, OfferView, ProducerView


class ProducerPage(Page):
    """A page of producers."""

    producers: list[ProducerView]


class ConsumerPage(Page):
    """A page of consumers."""

    consumers: list[ConsumerView]


class OfferPage(Page):
    """A page of offers."""

    offers: list[OfferView]


class LeasePage(Page):
    """A page of leases."""

    leases: list[LeaseView]


class ReclaimPage(Page):
    """A page of reclaims."""

    reclaims: list[ReclaimView]
