"""A consumer attaches to real producers over real sockets, or is told why it cannot."""

from __future__ import annotations

import errno
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aqua_protocol import (
    ConfigError,
    ProtocolError,
    SocketPathTooLongError,
    TransportError,
    TransportKind,
)
from aqua_protocol.errors import CapabilityError, VersionMismatchError
from aqua_protocol.leases import LeaseGrant
from aqua_protocol.supervision import SupervisedThread
from aqualib.channel import ChannelClosedError, LingeringSelector
from aqualib.consumer import Aqua
from aqualib.leasing import client, handshake
from aqualib.leasing.attachment import Attachment
from aqualib.producer.producer import Producer
from aqualib.tensor import Location
from aqualib.transports import select
from harness.bounds import HANG_S, until
from harness.consumers import await_rest, consuming, grant
from harness.loans import COUNT, lend, locations, require_intact, values
from harness.producers import SLAB
from harness.raw_consumer import TokenIssuer
from harness.transport_peer import open_descriptors

if TYPE_CHECKING:
    from aqualib.transports.base import MappedSlab


class TestAttaching:
    def test_a_producer_that_cannot_be_listened_to_for_want_of_memory_is_heard_later(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, refused = LingeringSelector.register, [errno.ENOMEM, errno.ENOSPC]

        def register(selector: LingeringSelector, watched: Any, mask: int, data: Any = None) -> Any:  # noqa: ANN401 - as of a selector
            if isinstance(data, Attachment) and refused:
                raise OSError(refused.pop(), "the kernel has no room")
            return plain(selector, watched, mask, data)

        monkeypatch.setattr(LingeringSelector, "register", register)
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        lend(aqua, issuer, producer)
        until(lambda: not refused, "the kernel refused")
        reclaim = producer.reclaim(COUNT * SLAB)
        assert reclaim.wait(HANG_S)
        assert producer.quarantined_bytes == producer.leased_bytes == 0
        require_intact(zip(tensors, stored, strict=True))

    def test_a_lease_that_is_not_listened_to_yet_ends_with_the_consumer(
        self, issuer: TokenIssuer, producer: Producer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closes = threading.Event()
        select_now, join = LingeringSelector.select, SupervisedThread.join

        def select_late(selector: LingeringSelector, timeout: float | None = None) -> Any:  # noqa: ANN401 - as of a selector
            found = select_now(selector, timeout)
            if threading.current_thread().name == "aqua-events":
                assert closes.wait(HANG_S)
            return found

        def join_and_tell(thread: SupervisedThread, *how: Any) -> bool:  # noqa: ANN401 - as of a thread
            if thread.name == "aqua-events":
                closes.set()
            return join(thread, *how)

        monkeypatch.setattr(LingeringSelector, "select", select_late)
        monkeypatch.setattr(SupervisedThread, "join", join_and_tell)
        with consuming(COUNT, SLAB) as aqua:
            late = aqua.attach(grant(issuer, producer.endpoint, 1))
        assert late.channel.fileno() < 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(late.pidfd)
        until(lambda: not producer.leased_bytes, "all slabs are back")

    def test_a_lease_that_comes_up_after_the_consumer_has_closed_ends_at_once(
        self, issuer: TokenIssuer, producer: Producer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        has_closed = threading.Event()

        def attach_late(*what: Any, **how: Any) -> Attachment:  # noqa: ANN401 - as of `attach`
            attachment = handshake.attach(*what, **how)
            assert has_closed.wait(HANG_S)
            return attachment

        monkeypatch.setattr(client, "attach", attach_late)
        lease = grant(issuer, producer.endpoint, 1)
        with ThreadPoolExecutor(1) as pool:
            with consuming(COUNT, SLAB) as aqua:
                late = pool.submit(aqua.attach, lease)
                until(lambda: bool(producer.leased_bytes), "it is attached")
            # Descriptors of others, which take the numbers of those that were closed.
            others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(64)]
            has_closed.set()
            attachment = late.result()
        assert attachment.channel.fileno() < 0
        for other in others:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(other)
            os.close(other)

    def test_data_in_host_memory_moves_to_a_peer_that_begins_to_lend(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        stored = values()
        tensors = [aqua.offload(value) for value in stored]
        assert locations(tensors) == [Location.HOST] * COUNT
        lend(aqua, issuer, producer)
        await_rest(aqua)
        assert locations(tensors) == [Location.PEER] * COUNT
        assert aqua.stats().promoted_bytes == COUNT * SLAB
        require_intact(zip(tensors, stored, strict=True))

    def test_new_data_goes_to_the_peer_first_and_to_host_memory_when_that_is_full(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 2)
        stored = values(3)
        tensors = [aqua.offload(value) for value in stored]
        assert locations(tensors) == [Location.PEER, Location.PEER, Location.HOST]
        require_intact(zip(tensors, stored, strict=True))

    def test_a_tensor_larger_than_the_lease_lies_in_both_places(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        lend(aqua, issuer, producer, 2)
        (value,) = values(1, 3 * SLAB + 5)
        tensor = aqua.offload(value)
        assert tensor.location is Location.MIXED
        require_intact([(tensor, value)])

    def test_the_measured_path_is_logged_and_exported(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "aqualib"):
            lend(aqua, issuer, producer)
        assert "GB/s" in caplog.text
        (link,) = aqua.stats().links
        assert link.transport is TransportKind.MEMFD
        assert link.write_bytes_per_s > 0
        registry = aqua.metrics.registry
        labels = {"transport": "memfd", "direction": "out"}
        rate = registry.get_sample_value("aqua_ipc_link_bytes_per_second", labels)
        assert rate == link.write_bytes_per_s
        assert registry.get_sample_value("aqua_ipc_transport_info", {"transport": "memfd"}) == 1

    def test_a_forged_token_is_refused_with_the_producers_own_error(
        self, aqua: Aqua, producer: Producer
    ) -> None:
        with pytest.raises(CapabilityError, match="not signed"):
            lend(aqua, TokenIssuer(), producer)
        assert not aqua.attachments

    def test_a_producer_of_another_version_is_refused_by_name(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 999)
        with pytest.raises(VersionMismatchError) as caught:
            lend(aqua, issuer, producer)
        assert "Install" in caught.value.remedy

    def test_a_socket_path_that_is_too_long_is_named(self, aqua: Aqua, issuer: TokenIssuer) -> None:
        endpoint = Path("/run/aqua") / ("x" * 200)
        with pytest.raises(SocketPathTooLongError) as caught:
            aqua.attach(_with_endpoint(grant(issuer, Path("/run/aqua/producer.sock"), 1), endpoint))
        assert caught.value.details["path"] == str(endpoint)

    def test_a_producer_that_is_not_there_is_a_transport_error(
        self, aqua: Aqua, issuer: TokenIssuer, tmp_path: Path
    ) -> None:
        with pytest.raises(ChannelClosedError, match="no producer answers"):
            aqua.attach(grant(issuer, Path("/nonexistent/aqua.sock"), 1))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"slab_bytes": 2 * SLAB}, "frames of 65536"),
            ({"transport": TransportKind.CUDA_VMM}, "cuda_vmm"),
        ],
    )
    def test_what_does_not_fit_this_store_is_refused_before_connecting(
        self, aqua: Aqua, issuer: TokenIssuer, change: dict[str, Any], message: str
    ) -> None:
        unfit = grant(issuer, Path("/nonexistent/aqua.sock"), 1).model_copy(update=change)
        with pytest.raises(ConfigError, match=message):
            aqua.attach(unfit)

    def test_a_welcome_under_another_epoch_is_refused_and_every_slab_goes_back(
        self, aqua: Aqua, issuer: TokenIssuer, producer: Producer
    ) -> None:
        genuine = grant(issuer, producer.endpoint, 2)
        lease = genuine.lease.model_copy(update={"epoch": genuine.lease.epoch + 1})
        with pytest.raises(ProtocolError, match="welcomes under"):
            aqua.attach(genuine.model_copy(update={"lease": lease}))
        assert not aqua.attachments

    def test_slabs_that_cannot_be_mapped_are_declined_so_that_others_may_have_them(
        self, issuer: TokenIssuer, producer: Producer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        transport = select(TransportKind.MEMFD)
        opened: list[MappedSlab] = []

        def open_two(handle: Any, nbytes: int) -> Any:  # noqa: ANN401 - as the transport's
            if len(opened) == 2:
                handle.close()
                raise TransportError("no more address space")
            opened.append(select(TransportKind.MEMFD).open(handle, nbytes))
            return opened[-1]

        monkeypatch.setattr(transport, "open", open_two)
        with consuming(transport=transport) as aqua:
            with pytest.raises(TransportError, match="address space"):
                lend(aqua, issuer, producer)
            until(lambda: producer.free_bytes == COUNT * SLAB, "every slab is free again")
            assert producer.quarantined_bytes == 0

    def test_no_descriptor_is_left_open_by_attaches_that_fail_or_end(
        self, issuer: TokenIssuer, producer: Producer
    ) -> None:
        with consuming() as aqua:
            lend(aqua, issuer, producer)
            producer.reclaim(producer.offered_bytes).wait(HANG_S)
            until(lambda: not aqua.attachments, "the lease has ended")
        before = open_descriptors()
        with consuming() as aqua:
            for _ in range(5):
                producer.offer(COUNT * SLAB)
                lend(aqua, issuer, producer)
                with pytest.raises(CapabilityError):
                    lend(aqua, TokenIssuer(), producer)
                producer.reclaim(producer.offered_bytes).wait(HANG_S)
                until(lambda: not aqua.attachments, "the lease has ended")
        until(lambda: open_descriptors() <= before, "no descriptor is left")


def _with_endpoint(terms: LeaseGrant, endpoint: Path) -> LeaseGrant:
    return terms.model_copy(update={"endpoint": str(endpoint)})
