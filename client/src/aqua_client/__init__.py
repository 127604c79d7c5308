"""The one typed client of Aqua's coordinator, synchronous and asynchronous.

    with CoordinatorClient("http://127.0.0.1:7700", token) as client:
        grant = client.grant_lease(LeaseRequest(consumer_id="llm", bytes=2 * GIB))
        for producer in client.list_producers():
            print(producer.producer_id, producer.free_bytes)

`AsyncCoordinatorClient` has the same methods, to be awaited (`async for` over listings).

Modules, from the ground up: `calls` (each operation of the REST API as a value, checked against the
coordinator's OpenAPI document); `tls` (certificates that are renewed meanwhile); `tracing`
(spans, where asked for); `http` (calls in
the terms of httpx); `client` (the two clients, and when they repeat a call); `doctor` (what `aqua
doctor` asks about the coordinator).
"""

from __future__ import annotations

from aqua_client.calls import Call, Listing
from aqua_client.client import AsyncCoordinatorClient, CoordinatorClient, RetryRule

__all__ = ["AsyncCoordinatorClient", "Call", "CoordinatorClient", "Listing", "RetryRule"]
