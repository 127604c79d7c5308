"""Opens a producer from settings: the one call that a program which lends memory needs.

    with open_producer(model="sdxl") as producer, Informer(producer, engine, profile):
        serve()

A program that exports metrics hands its registry over (`registry=prometheus_client.REGISTRY`); one
that does not serves a registry for these alone: `prometheus_client.start_http_server(9400)`.

What it opens it closes: the memory is taken back, the books are told, the connection ends.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from aqualib.identity import find_identity, require_name
from aqualib.producer.device import device_memory
from aqualib.producer.metrics import ProducerMetrics
from aqualib.producer.producer import Producer
from aqualib.settings import load_settings, socket_directory
from aqualib.transports import select

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from aqua_protocol import TransportKind
    from aqualib.producer.device import DeviceMemory


@contextlib.contextmanager
def open_producer(  # noqa: PLR0913 - every setting by name; each has a default
    producer_id: str | None = None,
    *,
    coordinator_url: str | None = None,
    token: str | None = None,
    transport: TransportKind | str | None = None,
    device: str | None = None,
    memory: DeviceMemory | None = None,
    slab_bytes: int | str | None = None,
    model: str | None = None,
    registry: CollectorRegistry | None = None,
) -> Iterator[Producer]:
    """A producer of this process; what is not given comes from `AQUA_*` variables or defaults.

    Args:
        producer_id: Name in the books; by default made of the node and the process.
        coordinator_url: `http://host:port`.
        token: Bearer token with the role producer.
        transport: How slabs are shared; by default the best that works on `device`.
        device: Whose memory is lent (`cuda:1`, `cpu`).
        memory: What the slabs are taken from, where the engine shares the account; by default
            the GPU, or on a CPU a budget of `AQUA_EMULATED_HBM_BYTES`, if that is set.
        slab_bytes: Unit of offers and reclaims; must be that of the consumers.
        model: What runs here, for people.
        registry: Where its metrics are while it is open; None leaves them out.

    Raises:
        ConfigError: A value is wrong, and which, and what to write instead; or the registry has
            another producer's metrics.
        TransportUnavailableError: The transport asked for cannot work here.
        TransportError: The socket cannot be listened on.
    """
    settings = load_settings(
        coordinator_url=coordinator_url, token=token, transport=transport, slab_bytes=slab_bytes
    )
    chosen = select(settings.transport, device)
    identity = find_identity(settings, chosen.device, model)
    name = require_name("producer_id", producer_id or f"{identity.node}-{os.getpid()}")
    with (
        settings.coordinator_client() as link,
        Producer(
            name,
            transport=chosen,
            link=link,
            endpoint=socket_directory(settings.socket_dir) / f"{name}.sock",
            identity=identity,
            slab_bytes=settings.slab_bytes,
            policy=settings.escalation,
            deadline_s=settings.reclaim_deadline_s,
            grace_s=settings.reclaim_grace_s,
            device=memory or device_memory(chosen.device, settings.emulated_hbm_bytes),
            allowed_uids=settings.allowed_uids,
            heartbeat_s=settings.heartbeat_s,
        ) as producer,
        contextlib.ExitStack() as exported,
    ):
        if registry is not None:
            exported.callback(ProducerMetrics(producer, registry).close)
        yield producer
