"""A second process that shares slabs with the test: started, driven and killed by it.

The process serves one command per packet of a SOCK_SEQPACKET socket; `Peer` is the test's side.
Commands are the verbs of the transport contract, so one peer plays exporter and importer alike.
Slabs are named by the test; an error in the peer comes back by type and message.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from aqua_protocol import TransportKind
from harness.fork_server import ForkedProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqualib.transports import Handle, MappedSlab, OwnedSlab, Transport

ANSWER_WITHIN_S = 240.0
"""Covers the import of torch and the start of CUDA."""

STANDS_IN = "stand-in"
"""Argument of a peer that has the stand-in for the driver."""


class PeerError(Exception):
    """What the peer raised; `kind` is the name of its type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply: a JSON value, the descriptors that came with it, and how long the peer took."""

    value: Any
    fds: list[int]
    spent_ms: float

    def as_handle(self) -> Handle:
        """The handle that came with it, now the caller's."""
        from aqualib.transports import Handle

        return Handle(payload=base64.b64decode(self.value), fd=self.fds[0] if self.fds else None)


class Peer:
    """The test's end of a second process."""

    def __init__(self, kind: TransportKind, *, stands_in: bool = False) -> None:
        stands_in = stands_in or bool(os.environ.get("AQUA_GPU_TESTS_ON_STAND_IN"))
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_WITHIN_S)
        with theirs:
            self.process = ForkedProcess(
                _serve, theirs, kind.value, STANDS_IN if stands_in else None
            )

    def call(self, verb: str, *, fds: tuple[int, ...] = (), **arguments: object) -> Answer:
        """Run `verb` in the peer and wait for its answer."""
        socket.send_fds(self._socket, [json.dumps([verb, arguments]).encode()], list(fds))
        packet, received, _, _ = socket.recv_fds(self._socket, 65536, 4)
        if not packet:
            raise PeerError("Died", f"exit status {self.process.wait(ANSWER_WITHIN_S)}")
        kind, value, spent_ms = json.loads(packet)
        if kind != "ok":
            raise PeerError(kind, value)
        return Answer(value, received, spent_ms)

    def export(self, name: str) -> Handle:
        """A handle to the peer's slab `name`, owned by the test."""
        return self.call("export", name=name).as_handle()

    def open(self, name: str, handle: Handle, nbytes: int) -> None:
        """Have the peer map what `handle` names; consumes the handle."""
        with handle:
            payload = base64.b64encode(handle.payload).decode()
            fds = () if handle.fd is None else (handle.fd,)
            self.call("open", name=name, payload=payload, nbytes=nbytes, fds=fds)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(ANSWER_WITHIN_S)

    def close(self) -> None:
        """End the process, politely where it still listens."""
        self._socket.close()
        try:
            self.process.wait(ANSWER_WITHIN_S)
        finally:
            self.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server:
    """The commands, in the peer's process."""

    def __init__(self, transport: Transport, check: Callable[[], None] = lambda: None) -> None:
        self.transport = transport
        self._check = check
        self.owned: dict[str, OwnedSlab] = {}
        self.slabs: dict[str, MappedSlab] = {}

    def create(self, _: list[int], name: str, nbytes: int) -> None:
        self.slabs[name] = self.owned[name] = self.transport.create(nbytes)

    def export(self, _: list[int], name: str) -> Handle:
        return self.owned[name].export()

    def open(self, fds: list[int], name: str, payload: str, nbytes: int) -> None:
        from aqualib.transports import Handle

        handle = Handle(payload=base64.b64decode(payload), fd=fds[0] if fds else None)
        self.slabs[name] = self.transport.open(handle, nbytes)

    def fill(self, _: list[int], name: str, seed: int) -> None:
        """Write the pattern of `seed`, by the transport's own copier."""
        tensor = self.slabs[name].tensor
        copier = self.transport.copier()
        copier.copy(tensor, pattern(seed, tensor.numel()).to(tensor.device))
        copier.fence()

    def matches(self, _: list[int], name: str, seed: int) -> bool:
        """Whether the slab holds exactly the pattern of `seed`."""
        tensor = self.slabs[name].tensor.cpu()
        return bool((tensor == pattern(seed, tensor.numel())).all())

    def churn(self, _: list[int], name: str) -> None:
        """Copy into the slab and out of it from now on, until the process ends."""
        tensor, copier = self.slabs[name].tensor, self.transport.copier()
        near = tensor.clone()

        def work() -> None:
            while True:
                copier.copy(near, tensor)
                copier.copy(tensor, near)
                copier.fence()

        threading.Thread(target=work, daemon=True).start()

    def close(self, _: list[int], name: str) -> None:
        self.slabs[name].close()

    def open_fds(self, _: list[int]) -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def serve(self, sock: socket.socket) -> None:
        while True:
            packet, fds, _, _ = socket.recv_fds(sock, 65536, 4)
            if not packet:
                return
            verb, arguments = json.loads(packet)
            handle: Handle | None = None
            begin = time.perf_counter()
            try:
                value = getattr(self, verb)(fds, **arguments)
                self._check()
            except Exception as error:  # noqa: BLE001 - the test decides what was expected
                answer: list[Any] = [type(error).__name__, str(error)]
            else:
                if verb == "export":
                    handle = value
                    value = base64.b64encode(handle.payload).decode()
                answer = ["ok", value]
            answer.append(round((time.perf_counter() - begin) * 1e3, 4))
            with handle or contextlib.nullcontext():
                passed = [handle.fd] if handle is not None and handle.fd is not None else []
                socket.send_fds(sock, [json.dumps(answer).encode()], passed)


def pattern(seed: int, count: int) -> Any:  # noqa: ANN401 - torch is imported where it is used
    """`count` reproducible bytes, uint8 on the CPU; another seed gives other bytes."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def descriptor_targets() -> list[str]:
    """What this process has open."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The listing's own, closed since.
            targets.append(str(link.readlink()))
    return targets


def open_descriptors() -> Counter[str]:
    """What this process has open, by kind, so that a leak says what it is.

    Without what waits to be collected: that of an earlier test would be gone at the next look.
    """
    gc.collect()
    return Counter(target.partition(":[")[0] for target in descriptor_targets())


def _serve(sock: socket.socket, name: str, stands_in: str | None) -> None:
    kind = TransportKind(name)
    with sock:
        if stands_in is None:
            from aqualib.transports import select

            _Server(select(kind)).serve(sock)
            return
        from harness.cuda.stand_in import stand_in

        with stand_in() as standing:
            _Server(standing.transport(kind), standing.machine.check).serve(sock)
