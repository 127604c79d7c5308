"""Every key of the books, by name: what it holds, and why it may stay for ever.

All keys share one hash tag, so the books fit on one slot of a cluster, and one Redis database can
hold other things beside them. Scripts get these names from here as text (`KEY.leases`), never by
spelling them out.

A key ends in one of two ways. Either it expires by itself, or it is named in `PERMANENT` with who
removes it; a fixture of the test suite looks for keys of neither kind after every test.
"""

from __future__ import annotations

from typing import Final

TAG: Final = "{aqua}:"

EXPIRES: Final = "expires by itself"

_IN_FULL: Final = {
    "books": "one hash for the life of the books",
    "events": "one stream, trimmed to a length by every entry",
    "producers": "an index; a producer leaves it when it is removed or silent for too long",
    "producers_seen": "as `producers`, ordered by the last report",
    "consumers": "an index; a consumer leaves it when it is removed or silent for too long",
    "consumers_seen": "as `consumers`, ordered by the last report",
    "libraries": "one hash with a field for each version of late; the sweep drops old ones",
    "quarantine": "one stream, trimmed to a length by every entry",
    "deadlines": "leases whose right a clock can end; they leave it when it has ended",
    "reclaims": "an index; the sweep takes closed reclaims out once their records have expired",
    "ended_reclaims": "reclaims whose records are about to expire; the sweep empties it",
    "placements": "the placer's plan, replaced as a whole",
    "placement_reasons": "the placer's plan, replaced as a whole",
    "placement_names": "an index of the placer's plan, replaced with it",
    "profiles": "one hash, a bounded number of models; a model's profile replaces the one before",
    "tenants": "one hash: the bytes on lease of each tenant that has some",
    "quotas": "one hash, replaced as a whole with the quotas file",
    "reclaim_history": "one stream, trimmed to a length by every entry",
    "samples": "one stream, trimmed to a length by every entry",
    "probe": EXPIRES,
}
_BEFORE_AN_ID: Final = {
    "producer": "deleted when the producer is removed or silent for too long",
    "producer_leases": "booked leases of a producer; empty, and thus gone, when all have ended",
    "producer_reclaims": "open reclaims of a producer; gone when all are closed",
    "consumer": "deleted when the consumer is removed or silent for too long",
    "consumer_leases": "booked leases of a consumer; empty, and thus gone, when all have ended",
    "free": "producers with free bytes, by domain; gone when there are none",
    "unconfirmed": "producers that have yet to confirm the books, by domain; gone when none are",
    "lease": "while booked; from its end on the record expires",
    "reclaim": "while open; once closed the record expires",
    "tenant_leased": "consumers of a tenant with bytes on lease; gone when there are none",
    "producers_of": "an index of a tenant's producers; each leaves it with `producers`",
    "consumers_of": "an index of a tenant's consumers; each leaves it with `consumers`",
    "quota_waits": EXPIRES,
    "claims": EXPIRES,
    "idempotency": EXPIRES,
}

KEYS: Final = {name: f"{TAG}{name}" for name in _IN_FULL} | {
    name: f"{TAG}{name}:" for name in _BEFORE_AN_ID
}
"""Names in full, and beginnings of names, which an id follows."""
PERMANENT: Final = {name: why for name, why in (_IN_FULL | _BEFORE_AN_ID).items() if why != EXPIRES}
"""Names of `KEYS` without an expiry, and who removes them. The others always carry one."""
