"""The console's sentences and its HTML, of snapshots made by hand."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

import pytest

from aqua_coordinator.console import reasons, views
from aqua_coordinator.console.markup import cluster_markup, happened_markup, member_markup
from aqua_coordinator.console.snapshot import Snapshot
from aqua_coordinator.console.views import ConsoleViews
from aqua_coordinator.store.rows import ProducerRow
from aqua_protocol import LeaseState, TransportKind
from aqua_protocol.leases import (
    EndedReclaim,
    Event,
    EventKind,
    LeaseView,
    Pairing,
    QuotaView,
    ReclaimOrigin,
    ReclaimOutcome,
    ReclaimView,
)
from aqua_protocol.members import ConsumerView

GIB = 1 << 30
HOSTILE = "\"><script>alert(1)</script><img src=x onerror='alert(1)'>&amp;"


def producer(name: str = "sdxl-0", **changes: object) -> ProducerRow:
    fields: dict[str, Any] = {
        "producer_id": name,
        "node": "node-0",
        "domain": "nvl-0",
        "gpu_uuid": f"GPU-{name}",
        "model": "sdxl",
        "endpoint": "/run/aqua.sock",
        "transport": TransportKind.MEMFD,
        "slab_bytes": 64 << 20,
        "offered_bytes": 8 * GIB,
        "leased_bytes": 0,
        "free_bytes": 8 * GIB,
        "grantable": True,
        "silent_s": 0.1,
        "queue_length": 0,
        "memory_total_bytes": 80 * GIB,
    }
    return ProducerRow.model_construct(**(fields | changes))


def consumer(name: str = "llm-0", **changes: object) -> ConsumerView:
    fields: dict[str, Any] = {
        "consumer_id": name,
        "node": "node-1",
        "domain": "nvl-0",
        "gpu_uuid": f"GPU-{name}",
        "model": None,
        "leased_bytes": 0,
        "wanted_bytes": 0,
        "spilled_bytes": 0,
        "silent_s": 0.1,
    }
    return ConsumerView.model_construct(**(fields | changes))


def lease(producer_id: str, consumer_id: str, state: LeaseState = LeaseState.ACTIVE) -> LeaseView:
    return LeaseView.model_construct(
        lease_id="lease-1",
        epoch=1,
        state=state,
        producer_id=producer_id,
        consumer_id=consumer_id,
        bytes=2 * GIB,
        expires_in_s=30.0,
    )


def snapshot(
    producers: Sequence[ProducerRow] = (), consumers: Sequence[ConsumerView] = (), **more: object
) -> Snapshot:
    free = Counter({row.domain: row.free_bytes for row in producers if row.grantable})
    fields: dict[str, Any] = {"at_s": 0.0, "tenant": "", "leases": (), "free_by_domain": free}
    return Snapshot(producers=producers, consumers=consumers, **(fields | more))


def ended(outcome: ReclaimOutcome = ReclaimOutcome.RETURNED, **changes: object) -> EndedReclaim:
    fields: dict[str, Any] = {
        "reclaim_id": "reclaim-1",
        "producer_id": "sdxl-0",
        "origin": ReclaimOrigin.PRODUCER,
        "requested_bytes": 4 * GIB,
        "returned_bytes": 4 * GIB,
        "deadline_s": 5.0,
        "done": True,
        "escalated": outcome is ReclaimOutcome.ESCALATED,
        "first_slab_ms": 9.5,
        "total_ms": 2345.6,
        "outcome": outcome,
    }
    return EndedReclaim.model_validate(fields | changes)


def test_words_of_others_are_escaped_wherever_they_are_shown() -> None:
    """Names have a grammar that has no such letters; what is shown does not rely on it."""
    rows = [producer(HOSTILE, model=HOSTILE, domain=HOSTILE, node=HOSTILE, gpu_uuid=HOSTILE)]
    users = [consumer(HOSTILE, model=HOSTILE, domain=HOSTILE, wanted_bytes=GIB)]
    pairing = Pairing.model_construct(consumer_id=HOSTILE, producers=[HOSTILE], reason=HOSTILE)
    seen = snapshot(
        rows,
        users,
        leases=[lease(HOSTILE, HOSTILE), lease(f"{HOSTILE}2", HOSTILE)],
        pairings={HOSTILE: pairing},
        reclaims=[ReclaimView.model_construct(**dict(ended()) | {"producer_id": HOSTILE})],
    )
    event = Event.model_construct(
        event_id="1-0",
        at_s=0.0,
        kind=EventKind.CONSUMER_JOINED,
        producer_id=None,
        consumer_id=HOSTILE,
        lease_id=None,
        state=None,
        bytes=None,
        reclaim=None,
    )
    texts = [
        "".join(cluster_markup(seen)),
        happened_markup([event]),
        member_markup(HOSTILE, reasons.producer_reasons(seen, rows[0])),
        member_markup(HOSTILE, reasons.consumer_reasons(seen, users[0])),
    ]
    for text in texts:
        assert escape(HOSTILE) in text
        assert HOSTILE not in text
        assert not re.search(r"<script|<img|<[^>]*\son\w+=", text.replace(escape(HOSTILE), ""))


def test_bars_share_one_scale_and_arrows_point_from_lenders_to_borrowers() -> None:
    seen = snapshot(
        [producer(leased_bytes=2 * GIB, free_bytes=6 * GIB)],
        [consumer(leased_bytes=2 * GIB, spilled_bytes=4 * GIB)],
        leases=[lease("sdxl-0", "llm-0")],
    )
    text = "".join(cluster_markup(seen))
    bars = dict(re.findall(r'<rect class="(\w+)" x="[\d.]+%" width="([\d.]+)%"', text))
    assert bars == {"own": "90.00", "offered": "7.50", "leased": "2.50", "spilled": "5.00"}
    assert text.count('class="link leased"') == 1
    assert "style=" not in text
    assert "2 GiB of 8 GiB lent" in text


@pytest.mark.parametrize("state", [LeaseState.RECLAIMING, LeaseState.FENCED])
def test_an_arrow_shows_that_memory_is_on_its_way_back(state: LeaseState) -> None:
    seen = snapshot([producer()], [consumer()], leases=[lease("sdxl-0", "llm-0", state)])
    assert 'class="link reclaiming"' in "".join(cluster_markup(seen))


def test_a_lender_that_a_tenant_may_not_see_is_shown_by_name_alone() -> None:
    seen = snapshot((), [consumer()], leases=[lease("other", "llm-0")], tenant="red")
    text = "".join(cluster_markup(seen))
    assert "of another tenant" in text
    assert 'id="producers.other"' not in text


@pytest.mark.parametrize(
    ("rows", "more", "why"),
    [
        ([], {}, "no producer in nvl-0 offers memory now"),
        ([producer(free_bytes=0)], {}, "all that is offered in nvl-0 is lent"),
        ([producer(offered_bytes=0, free_bytes=0)], {}, "no producer in nvl-0 offers memory now"),
        ([producer(grantable=False)], {}, "waits until its producers have confirmed the books"),
        ([producer()], {}, "8 GiB is free in nvl-0, and it asks again within seconds"),
        ([producer()], {"plan": ["far-0"]}, "the plan pairs it with far-0, not in its domain now"),
        ([producer(free_bytes=0)], {"plan": ["sdxl-0"]}, "pairs it with sdxl-0, with nothing free"),
        ([producer()], {"plan": ["sdxl-0"]}, "memory is free where the plan pairs it"),
        ([producer()], {"available": 0}, "the quota of its tenant is used up"),
    ],
)
def test_a_consumer_is_told_why_it_has_no_more(
    rows: list[ProducerRow], more: dict[str, Any], why: str
) -> None:
    row = consumer(wanted_bytes=GIB)
    known: dict[str, Any] = {}
    if "plan" in more:
        pairing = Pairing(consumer_id="llm-0", producers=more["plan"])
        known["pairings"] = {"llm-0": pairing}
    if "available" in more:
        nominal: dict[str, Any] = dict.fromkeys(QuotaView.model_fields, 0)
        known["quotas"] = [QuotaView.model_construct(**nominal)]
    sentence = reasons.why_not_more(snapshot(rows, [row], **known), row)
    assert sentence is not None
    assert sentence.startswith("llm-0 would take 1 GiB more: ")
    assert why in sentence


def test_a_consumer_that_wants_no_more_is_told_nothing() -> None:
    assert reasons.why_not_more(snapshot(), consumer()) is None


@pytest.mark.parametrize(
    ("reclaim", "sentence"),
    [
        (
            ended(),
            (
                "sdxl-0 took back 4 GiB in 2.3 s, the first of it after 9.5 ms; "
                "its own engine needed it."
            ),
        ),
        (
            ended(ReclaimOutcome.ESCALATED, origin=ReclaimOrigin.OPERATOR, first_slab_ms=None),
            (
                "sdxl-0 took back 4 GiB in 2.3 s; an operator asked for it. "
                "That was past its deadline of 5 s."
            ),
        ),
        (
            ended(ReclaimOutcome.DROPPED, returned_bytes=GIB, total_ms=None),
            "sdxl-0 stopped taking memory back after 1 GiB; its own engine needed it.",
        ),
        (ended(ReclaimOutcome.PRODUCER_LOST), "sdxl-0 left while it took memory back."),
    ],
)
def test_a_reclaim_is_told_with_its_times_and_who_wanted_it(
    reclaim: EndedReclaim, sentence: str
) -> None:
    assert reasons.reclaim_sentence(reclaim) == sentence


@pytest.mark.parametrize("kind", EventKind)
def test_every_kind_of_event_has_a_sentence(kind: EventKind) -> None:
    event = Event(
        event_id="1-0",
        at_s=1.0,
        kind=kind,
        producer_id="p",
        consumer_id="c",
        lease_id="l",
        state=LeaseState.GRANTED,
        bytes=GIB,
        reclaim=ended() if kind is EventKind.RECLAIM_CLOSED else None,
    )
    sentence = reasons.event_sentence(event)
    assert sentence is not None
    assert sentence.endswith(".")
    assert "None" not in sentence


def test_the_beginning_of_a_short_reclaim_is_not_told_beside_its_end() -> None:
    facts: dict[str, Any] = {"producer_id": "sdxl-0", "bytes": GIB}
    closed = Event(
        event_id="2-0", at_s=11.0, kind=EventKind.RECLAIM_CLOSED, reclaim=ended(), **facts
    )
    short, long = (
        Event(event_id=f"1-{n}", at_s=at_s, kind=EventKind.RECLAIM_OPENED, **facts)
        for n, at_s in enumerate((10.9, 1.0))
    )
    assert happened_markup([closed, short]).count("<li") == 1
    assert happened_markup([closed, long]).count("<li") == 2


async def test_all_who_look_at_once_are_given_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a new one as soon as an event was written, unless making it takes long."""
    made: list[str] = []
    now_s = [100.0]

    class Ledger:
        event_id = "1-0"

        async def last_event_id(self) -> str:
            return self.event_id

    async def read_snapshot(_: object, tenant: str) -> Snapshot:
        made.append(tenant)
        await asyncio.sleep(0)
        now_s[0] += took_s
        return snapshot(tenant=tenant)

    monkeypatch.setattr(views, "read_snapshot", read_snapshot)
    took_s = 0.0
    ledger = Ledger()
    console = ConsoleViews(ledger, object(), lambda: now_s[0])  # type: ignore[arg-type] # all that is asked is above
    await asyncio.gather(*(console.cluster("") for _ in range(5)), console.cluster("red"))
    assert sorted(made) == ["", "red"]
    await console.cluster("")
    assert len(made) == 2
    ledger.event_id = "2-0"
    await console.cluster("")
    assert len(made) == 3
    now_s[0] += views.MAX_AGE_S
    took_s = 0.5
    await console.cluster("")
    assert len(made) == 4
    ledger.event_id = "3-0"
    await console.cluster("")
    assert len(made) == 4
    now_s[0] += 2.1
    await console.cluster("")
    assert len(made) == 5
