"""Connecting as a consumer or a producer by settings, and the process's own consumer.

Like a database driver: `connect` gives an independent `Aqua`, to be passed to what needs it. Most
programs need one, so the first that is connected is also the *default*, which `aqualib.empty`,
`aqualib.offload`, `aqualib.block_store` and `aqualib.step` use. It stays the default until it is
closed; then the next `connect` gives another. `Aqua(...)` itself never becomes the default, and
nothing connects by itself: a program that forgot to is told so.

`open_producer` is the other side: what it opens it closes, so that the memory is taken back, the
books are told and the connection ends. A program that exports metrics hands its registry over
(`registry=prometheus_client.REGISTRY`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from aqua_protocol import ConfigError, TransportKind
from aqualib.consumer import Aqua, StepChanges

if TYPE_CHECKING:
    import torch
    from prometheus_client import CollectorRegistry

    from aqualib.blocks import BlockStore
    from aqualib.producer.device import EmulatedMemory
    from aqualib.producer.producer import Producer
    from aqualib.reporter import Identity
    from aqualib.settings import Settings
    from aqualib.tensor import AquaTensor

HOST_SHARE: Final = 0.25
"""Part of the memory of the machine, or of its container, that spilled data may take unless
`host_bytes` says otherwise: a machine has other processes. It is a bound, and memory is taken slab
by slab. Doubled, two consumers could fill a machine."""

_lock = threading.Lock()
_default: Aqua | None = None


def connect(  # noqa: PLR0913 - every setting by name; each has a default
    consumer_id: str | None = None,
    *,
    coordinator_url: str | None = None,
    token: str | None = None,
    transport: TransportKind | str | None = None,
    device: str | None = None,
    host_bytes: int | str | None = None,
    wanted_bytes: int | str | None = None,
    slab_bytes: int | str | None = None,
    checksum: bool | None = None,
    model: str | None = None,
    registry: CollectorRegistry | None = None,
    is_offline: bool = False,
    leases_from_first_step: bool = False,
) -> Aqua:
    """Connect to the coordinator and make this the default, unless another is.

    Returns at once, whether the coordinator answers or not: until it does, everything lives in host
    memory. What is not given comes from `AQUA_*` variables (see `aqualib.settings`).

    Args:
        consumer_id: Name in the books, kept across restarts; by default `AQUA_MEMBER`, or made of
            node and process.
        coordinator_url: `http://host:port`.
        token: Bearer token with the role consumer.
        transport: How slabs are shared; by default the best that works on `device`.
        device: Where the engine's tensors are (`cuda:1`, `cpu`).
        host_bytes: Bound of host memory, and so of everything stored: `8GiB` or a number. By
            default a quarter of what the machine, or this container, has.
        wanted_bytes: Peer memory to hold ahead of need.
        slab_bytes: Unit of leases; must be that of the producers.
        checksum: Sum what is stored and compare what comes back.
        model: What runs here, for people.
        registry: For metrics; by default a private one (`aqua.metrics.registry`).
        is_offline: Talk to no coordinator at all.
        leases_from_first_step: Ask for no lease before the first `step`, as engines want that
            capture graphs when they start.

    Raises:
        ConfigError: A value is wrong; says which and what to write instead.
        TransportUnavailableError: The transport asked for cannot work here.
    """
    from aqualib.host_memory import host_memory_bytes
    from aqualib.settings import load_settings, require_name
    from aqualib.topology import find_identity
    from aqualib.transports import select

    settings = load_settings(
        coordinator_url=coordinator_url,
        token=token,
        transport=transport,
        host_bytes=host_bytes,
        wanted_bytes=wanted_bytes,
        slab_bytes=slab_bytes,
        checksum=checksum,
    )
    chosen = select(settings.transport, device)
    if model is not None:
        require_name("model", model)
    identity = find_identity(settings, chosen.device, model)
    with contextlib.ExitStack() as undo:
        link = None if is_offline else undo.enter_context(settings.coordinator_client())
        aqua = Aqua(
            require_name("consumer_id", consumer_id or _own_name(settings, identity)),
            transport=chosen,
            link=link,
            identity=identity,
            host_bytes=settings.host_bytes or int(host_memory_bytes() * HOST_SHARE),
            wanted_bytes=settings.wanted_bytes or 0,
            slab_bytes=settings.slab_bytes,
            is_checking=settings.checksum,
            registry=registry,
            heartbeat_s=settings.heartbeat_s,
            lease_ttl_s=settings.lease_ttl_s,
            allowed_uids=settings.allowed_uids,
            leases_from_first_step=leases_from_first_step,
            writes_behind=settings.write_behind,
            tracer=settings.tracer(),
        )
        undo.pop_all()
    _offer_as_default(aqua)
    return aqua


@contextlib.contextmanager
def open_producer(  # noqa: PLR0913 - every setting by name; each has a default
    producer_id: str | None = None,
    *,
    coordinator_url: str | None = None,
    token: str | None = None,
    transport: TransportKind | str | None = None,
    device: str | None = None,
    memory: EmulatedMemory | None = None,
    slab_bytes: int | str | None = None,
    model: str | None = None,
    profile_names: Sequence[str] | None = None,
    gpu_uuid: str | None = None,
    registry: CollectorRegistry | None = None,
) -> Iterator[Producer]:
    """A producer of this process; what is not given comes from `AQUA_*` variables or defaults.

    Args, beside those of `connect`:
        producer_id: Name in the books; by default as above.
        device: Whose memory is lent (`cuda:1`, `cpu`).
        memory: Budget that the slabs are taken from, where the engine shares it; by default one
            of `AQUA_EMULATED_HBM_BYTES` on a CPU, if that is set. A GPU's driver accounts itself.
        profile_names: Names that the model may have been profiled by; `model` if left out. What the
            books have under one of them is `producer.measured_profile`, and an `Informer` that is
            given no profile goes by it. Where there is none, `producer.profile_follower` says why.
        gpu_uuid: Name of an emulated GPU; a real one has its own.
        registry: Where its metrics are while it is open; None leaves them out.

    Raises:
        ConfigError: A value is wrong, and which, and what to write instead; or the registry has
            another producer's metrics.
        TransportUnavailableError: The transport asked for cannot work here.
        TransportError: The socket cannot be listened on.
    """
    from aqualib.channel import remove_abandoned
    from aqualib.producer.device import device_memory
    from aqualib.producer.metrics import ProducerMetrics
    from aqualib.producer.producer import Producer
    from aqualib.producer.profile_follower import ProfileFollower
    from aqualib.settings import load_settings, require_name, socket_directory
    from aqualib.topology import find_identity
    from aqualib.transports import select

    settings = load_settings(
        coordinator_url=coordinator_url,
        token=token,
        transport=transport,
        slab_bytes=slab_bytes,
        gpu_uuid=gpu_uuid,
    )
    chosen = select(settings.transport, device)
    if model is not None:
        require_name("model", model)
    identity = find_identity(settings, chosen.device, model)
    name = require_name("producer_id", producer_id or _own_name(settings, identity))
    directory = socket_directory(settings.socket_dir)
    remove_abandoned(directory)
    with (
        settings.coordinator_client() as link,
        Producer(
            name,
            transport=chosen,
            link=link,
            endpoint=directory / f"{name}.sock",
            identity=identity,
            slab_bytes=settings.slab_bytes,
            policy=settings.escalation,
            deadline_s=settings.reclaim_deadline_s,
            grace_s=settings.reclaim_grace_s,
            device=memory or device_memory(chosen.device, settings.emulated_hbm_bytes),
            allowed_uids=settings.allowed_uids,
            heartbeat_s=settings.heartbeat_s,
            tracer=settings.tracer(),
            harm_share=settings.harm_share,
        ) as producer,
        contextlib.ExitStack() as opened,
    ):
        if names := [*filter(None, [model])] if profile_names is None else [*profile_names]:
            producer.profile_follower = opened.enter_context(
                ProfileFollower(link, names, max_age_s=settings.profile_max_age_s)
            )
        if registry is not None:
            opened.callback(ProducerMetrics(producer, registry).close)
        yield producer


def default() -> Aqua:
    """The default instance.

    Raises:
        ConfigError: Nothing is connected.
    """
    if _default is None or _default.is_closed:
        raise ConfigError(
            "no Aqua is connected",
            remedy="Call aqualib.connect() first, or use the methods of an Aqua of your own.",
        )
    return _default


def empty(shape: Sequence[int] | int, dtype: torch.dtype | None = None) -> AquaTensor:
    """`Aqua.empty` of the default instance."""
    return default().empty(shape, dtype)


def offload(tensor: torch.Tensor) -> AquaTensor:
    """`Aqua.offload` of the default instance."""
    return default().offload(tensor)


def block_store(block_bytes: int, capacity_blocks: int) -> BlockStore:
    """`Aqua.block_store` of the default instance."""
    return default().block_store(block_bytes, capacity_blocks)


def step() -> StepChanges | None:
    """`Aqua.step` of the default instance; None without one, so that engines may always call it."""
    aqua = _default
    return None if aqua is None else aqua.step()


def _own_name(settings: Settings, identity: Identity) -> str:
    """The name of a member that was given none."""
    return settings.member or f"{identity.node}-{os.getpid()}"


def _offer_as_default(aqua: Aqua) -> None:
    global _default  # noqa: PLW0603 - the default is the process's, as documented
    with _lock:
        if _default is None or _default.is_closed:
            _default = aqua
