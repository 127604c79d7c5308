"""Producers for tests: small slabs, a short socket path, and books that are checked at the end."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aqua_protocol import TransportKind
from aqualib.producer.producer import Producer
from aqualib.reporter import Identity
from aqualib.transports import select
from harness.raw_consumer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator

SLAB: Final = 64 * 1024
IDENTITY: Final = Identity(node="node", domain="domain", gpu_uuid="GPU-0")


@contextlib.contextmanager
def socket_dir() -> Iterator[Path]:
    """A directory with a path short enough for a Unix address."""
    path = Path(tempfile.mkdtemp(prefix="aqua-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def lending(issuer: TokenIssuer | None, slab_count: int, **options: Any) -> Iterator[Producer]:  # noqa: ANN401 - a producer's
    """A producer that offers `slab_count` slabs and trusts `issuer`; audited, then closed."""
    with socket_dir() as directory:
        settings: dict[str, Any] = {
            "transport": select(TransportKind.MEMFD),
            "slab_bytes": SLAB,
            **options,
        }
        producer = Producer(
            settings.pop("producer_id", "producer"),
            link=None,
            endpoint=directory / "p.sock",
            identity=IDENTITY,
            **settings,
        )
        try:
            producer.offer(slab_count * producer.slab_bytes)
            if issuer is not None:
                producer.acknowledge(issuer.ack())
            yield producer
            producer.audit()
        finally:
            producer.close(deadline_s=0.001)
