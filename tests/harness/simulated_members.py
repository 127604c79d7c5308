"""Members of a simulated cluster: real producers, informers and lease clients in virtual processes.

What stands in for something are the memory, the engine and the consumer's frames. The memory knows
who maps it and whose bytes are in it, and complains of whatever must never be. The frames come and
go as a workload wants them; a slab that is asked back goes back after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import torch

from aqua_client import CoordinatorClient
from aqua_protocol import TransportError, TransportKind
from aqua_protocol.members import LoadReport
from aqualib.leasing.client import LeaseClient
from aqualib.memory.frame import PeerSlab
from aqualib.memory.frame_store import FrameStore
from aqualib.probe import LinkMeasurement
from aqualib.producer.escalation import Escalation
from aqualib.producer.informer import Informer
from aqualib.producer.producer import Producer
from aqualib.producer.profile import Profile
from aqualib.reporter import Identity
from aqualib.transports.base import Handle, Transport
from harness.simulated_store import Link
from harness.virtual_machine import Machine, Process

SLAB: Final = 65_536
SPARE_SLABS: Final = 8
DOMAIN: Final = "domain-0"
LINK: Final = LinkMeasurement(TransportKind.MEMFD, 1e9, 1e9)
DEADLINE_S: Final = 1.0
GRACE_S: Final = 2.0
POLL_S: Final = 1.0
_WORDS: Final = 8


class Memory:
    """Physical slabs of all processes, and who maps them.

    Args:
        failed: Told what must never be.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        self.failed = failed
        self.slabs: dict[int, _Slab] = {}
        self.count = 0

    def mapped(self) -> int:
        """Mappings by living processes that do not own them."""
        return sum(len(slab.mappers) for slab in self.slabs.values())


class _Slab:
    """One physical slab."""

    def __init__(self, memory: Memory, owner: Process) -> None:
        memory.count += 1
        self.number = memory.count
        self.owner = owner
        self.memory = memory
        self.tensor = torch.zeros(_WORDS, dtype=torch.int64)
        self.is_owned = True
        self.mappers: list[_Mapped] = []
        self.keepers: list[_Mapped] = []
        memory.slabs[self.number] = self
        owner.on_death.append(self.let_go)

    def let_go(self) -> None:
        """The owner has closed it, or is dead."""
        if self.is_owned:
            self.is_owned = False
            self.owner.on_death.remove(self.let_go)
            self.close_if_unused()

    def close_if_unused(self) -> None:
        if not self.mappers and not self.keepers and not self.is_owned:
            self.memory.slabs.pop(self.number, None)


class _Owned:
    """The owner's side: `OwnedSlab`."""

    nbytes = SLAB

    def __init__(self, slab: _Slab) -> None:
        self._slab = slab

    @property
    def tensor(self) -> torch.Tensor:
        return self._slab.tensor

    @property
    def is_closed(self) -> bool:
        return not self._slab.is_owned

    def export(self) -> Handle:
        slab = self._slab
        if not slab.is_owned:
            raise TransportError("a closed slab cannot be lent")
        if slab.mappers:
            names = ", ".join(mapped.process.name for mapped in slab.mappers)
            slab.memory.failed(f"slab {slab.number} is lent anew while {names} maps it")
        return Handle(b"%d" % slab.number, None)

    def close(self) -> None:
        self._slab.let_go()


class _Mapped:
    """The borrower's side: `MappedSlab`."""

    nbytes = SLAB

    def __init__(self, slab: _Slab, process: Process) -> None:
        self._slab = slab
        self.process = process
        slab.mappers.append(self)
        process.on_death.append(self.close)

    @property
    def tensor(self) -> torch.Tensor:
        return self._slab.tensor

    def close(self) -> None:
        for mapping in (self._slab.mappers, self._slab.keepers):
            if self in mapping:
                mapping.remove(self)
                self.process.on_death.remove(self.close)
                self._slab.close_if_unused()

    def keep(self) -> None:
        """Stay mapped, and let the owner hear otherwise."""
        self._slab.mappers.remove(self)
        self._slab.keepers.append(self)


class SimulatedTransport:
    """A `Transport` over `Memory`, of one process."""

    kind = TransportKind.MEMFD
    device = torch.device("cpu")

    def __init__(self, memory: Memory, process: Process) -> None:
        self._memory = memory
        self._process = process

    def create(self, nbytes: int) -> _Owned:
        """As the contract says."""
        assert nbytes == SLAB, nbytes
        return _Owned(_Slab(self._memory, self._process))

    def open(self, handle: Handle, nbytes: int) -> _Mapped:
        """As the contract says; what is in the slab is looked at, and written over."""
        assert nbytes == SLAB, nbytes
        slab = self._memory.slabs.get(int(handle.payload))
        if slab is None:
            raise TransportError("the slab is gone")
        me = self._process
        mapped = [mapped.process for mapped in slab.mappers + slab.keepers]
        strangers = [process for process in mapped if process is not me]
        if strangers:
            self._memory.failed(f"slab {slab.number}: {strangers[0].name} and {me.name} map it")
        found = int(slab.tensor.max())
        if found not in {0, me.pid}:
            self._memory.failed(
                f"slab {slab.number}: {me.name} reads what process {found} has left"
            )
        slab.tensor.fill_(me.pid)
        return _Mapped(slab, me)

    def copier(self, **_: bool) -> Any:  # noqa: ANN401 - as much of a `Copier` as is used
        """As the contract says."""
        return SimpleNamespace(copy=lambda dst, src: dst.copy_(src), fence=lambda: None)


class Frames:
    """A consumer's frames, as far as leasing knows them: `FrameStore`.

    Attributes:
        wanted: Frames that the workload has.
        slow_s: Longest time that a slab takes to go back.
        keeps: Whether slabs stay mapped when they are said to have gone back.
    """

    slab_bytes = SLAB
    frame_limit = 64

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._slabs: dict[PeerSlab, None] = {}
        self.wanted = 0
        self.slow_s = 0.2
        self.keeps = False

    def counts(self) -> tuple[int, int]:
        """Frames, and host slabs."""
        return self.wanted, self.wanted

    def snapshot(self) -> Any:  # noqa: ANN401 - as much of `StoreStats` as is used
        """What is spilled."""
        spilled = max(0, self.wanted - len(self._slabs))
        return SimpleNamespace(spilled_bytes=spilled * SLAB)

    def reserve(self, count: int) -> None:
        """Host memory is always there."""

    def adopt(self, slabs: Sequence[PeerSlab]) -> None:
        """Take freshly mapped slabs."""
        self._slabs |= dict.fromkeys(slabs)

    def ask_back(self, slabs: Iterable[PeerSlab]) -> None:
        """Start giving slabs back."""
        asked = [slab for slab in slabs if slab in self._slabs and slab.asked_at_s is None]
        for slab in asked:
            slab.asked_at_s = self._machine.now_s
        if asked:
            self._machine.process.start(lambda: self._give_back(asked))

    def ask_back_unused(self, count: int) -> int:
        """Start giving up to `count` slabs back."""
        kept = [slab for slab in self._slabs if slab.asked_at_s is None][:count]
        self.ask_back(kept)
        return len(kept)

    def _give_back(self, slabs: list[PeerSlab]) -> None:
        for slab in slabs:
            self._machine.sleep(self._machine.random.uniform(0.0, self.slow_s))
            if self._slabs.pop(slab, slab) is None:
                if self.keeps:
                    cast("_Mapped", slab.memory).keep()
                else:
                    slab.memory.close()
                slab.lender.take_back(slab)


class Engine:
    """A producer's engine: `LoadSource`."""

    def __init__(self) -> None:
        self.queue_length = 0

    def load(self) -> LoadReport:
        """As the workload has set it."""
        total = 4 * SPARE_SLABS * SLAB
        return LoadReport(
            queue_length=self.queue_length, memory_used_bytes=0, memory_total_bytes=total
        )

    def shrink(self, nbytes: int) -> int:
        """All of it, at once."""
        return nbytes

    def grow(self, nbytes: int) -> None:
        """Nothing to do."""


class SimulatedProducer:
    """A producer process: producer, informer, engine and its load."""

    def __init__(self, machine: Machine, name: str, memory: Memory, link: Link) -> None:
        self.process = Process(machine, name)
        self.engine = Engine()
        self.producer: Producer | None = None
        self._machine = machine
        self._memory = memory
        self._link = link
        self.process.start(self._live)

    def _live(self) -> None:
        machine, name = self._machine, self.process.name
        chance = machine.random
        self.producer = Producer(
            name,
            transport=cast("Transport", SimulatedTransport(self._memory, self.process)),
            link=cast("CoordinatorClient", self._link),
            endpoint=Path(f"/run/{name}.s"),
            identity=Identity(node="node-0", domain=DOMAIN, gpu_uuid=f"GPU-{name}"),
            slab_bytes=SLAB,
            policy=chance.choice(list(Escalation)),
            deadline_s=DEADLINE_S,
            grace_s=GRACE_S,
        )
        profile = Profile(
            SLAB, spare_bytes=SPARE_SLABS * SLAB, queue_margin=2, least_offer_bytes=0, calm_s=2.0
        )
        informer = Informer(self.producer, self.engine, profile, poll_s=POLL_S)
        informer.start()
        while True:
            machine.sleep(chance.uniform(2.0, 15.0))
            self.engine.queue_length = chance.choice([0, 0, 1, 5])
            if chance.random() < 0.2:
                self.producer.reclaim(chance.randint(1, SPARE_SLABS) * SLAB)


class SimulatedConsumer:
    """A consumer process: lease client, frames and their workload."""

    def __init__(self, machine: Machine, name: str, memory: Memory, link: Link) -> None:
        self.process = Process(machine, name)
        self.frames = Frames(machine)
        self.client: LeaseClient | None = None
        self.is_idle = False
        self._machine = machine
        self._memory = memory
        self._link = link
        self.process.start(self._live)

    def _live(self) -> None:
        machine, name = self._machine, self.process.name
        chance = machine.random
        self.client = LeaseClient(
            name,
            store=cast("FrameStore", self.frames),
            transport=cast("Transport", SimulatedTransport(self._memory, self.process)),
            link=cast("CoordinatorClient", self._link),
            identity=Identity(node="node-0", domain=DOMAIN, gpu_uuid=f"GPU-{name}"),
            lease_ttl_s=chance.uniform(5.0, 30.0),
        )
        self.client.start()
        while True:
            self.frames.wanted = 0 if self.is_idle else chance.choice([0, 0, 0, 1, 2, 4, 8])
            self.client.changed()
            machine.sleep(chance.uniform(1.0, 8.0))
