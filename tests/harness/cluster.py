"""A cluster on one machine: real processes for producer, consumers and coordinator.

Members are forked from a server process that has imported torch and aqualib already, so that a
process costs milliseconds and a suite can afford hundreds. A member obeys the test over a pipe, one
call at a time, and dies where its `Doom` says. The cluster checks what must hold whoever dies:

- `check_mappings`: no slab is mapped by two consumers, by what the kernel says of both;
- `wait_for_books`: the books say what producer and consumers say;
- `Consumer.verify`: every byte is what was stored, also while parts of the cluster are dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import tempfile
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import httpx

from harness.bounds import HANG_S, until
from harness.doom import Doom, Ledger, recorded, watch_coordinator, watch_member
from harness.fork_server import SERVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SLAB: Final = 256 * 1024
CALL_TIMEOUT_S: Final = HANG_S
"""Bound of every wait; nothing here should need more than a second or two."""

HEARTBEAT_S: Final = 0.1

_MAPPED_SLAB: Final = re.compile(r"(\d+) +/memfd:aqua-slab")


class DiedError(Exception):
    """The member's process is gone."""


class Process:
    """A forked process that answers calls.

    Args:
        name: Of the member, also in the ledger's file name.
        main: Run in the process with the name, the pipe, the ledger and `options`.
        directory: For ledgers, sockets and data.
        doom: Where the process dies; None lets it live.
        options: For `main`.
    """

    def __init__(
        self,
        name: str,
        main: Callable[..., None],
        directory: Path,
        doom: Doom | None,
        **options: Any,  # noqa: ANN401 - of `main`
    ) -> None:
        self.name = name
        self.steps_path = directory / f"{name}-{os.urandom(4).hex()}.steps"
        self._pipe, theirs = SERVER.Pipe()
        self._process = SERVER.Process(
            target=_run, args=(main, name, theirs, self.steps_path, doom, options), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        pid = self._process.pid
        assert pid is not None, f"{self.name} has not started"
        return pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def call(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401 - whatever the member says
        """Have the member do something, and return its answer.

        Raises:
            DiedError: The process is gone.
        """
        self.tell(method, *arguments)
        return self.hear()

    def tell(self, method: str, *arguments: Any) -> None:  # noqa: ANN401 - of the method
        """Have the member do something, without waiting for the answer."""
        with self._or_died():
            self._pipe.send((method, arguments))

    def hear(self) -> Any:  # noqa: ANN401 - whatever the member says
        """The answer to the oldest `tell`."""
        with self._or_died():
            assert self._pipe.poll(CALL_TIMEOUT_S), f"{self.name} does not answer"
            answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.join(HANG_S)

    def freeze(self) -> None:
        """Stop every thread, as a hung process would be."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on after `freeze`."""
        os.kill(self.pid, signal.SIGCONT)

    def finish(self) -> bool:
        """Let the member close in an orderly way, wait for its end; returns whether it did so."""
        with contextlib.suppress(DiedError):
            self.call("close")
        self._process.join(HANG_S)
        assert not self._process.is_alive(), f"{self.name} does not end"
        return self._process.exitcode == 0

    def mapped_slabs(self) -> set[int]:
        """Inodes of all slabs that the kernel says are mapped there."""
        try:
            maps = Path(f"/proc/{self.pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return set()
        return {int(inode) for inode in _MAPPED_SLAB.findall(maps)}

    @contextlib.contextmanager
    def _or_died(self) -> Any:  # noqa: ANN401 - a context manager
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self._process.join(HANG_S)
            raise DiedError(self.name) from error


def _run(
    main: Callable[..., None],
    name: str,
    pipe: Connection,
    steps_path: Path,
    doom: Doom | None,
    options: Mapping[str, Any],
) -> None:
    logging.disable(logging.WARNING)  # What members say of dying peers is what they should say.
    main(name, pipe, Ledger(steps_path, doom), **options)


def serve_member(pipe: Connection, member: object) -> None:
    """Obey the test until it says `close` or goes away."""
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(member, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the test decides what it means
            answer = error
        pipe.send(answer)
        if method == "close":
            return


def run_producer(name: str, pipe: Connection, ledger: Ledger, *, url: str, endpoint: Path) -> None:
    """A producer that lends when told."""
    watch_member(ledger)
    from harness.members import ProducerMember

    serve_member(pipe, ProducerMember(url, endpoint, name))


def run_consumer(name: str, pipe: Connection, ledger: Ledger, *, url: str) -> None:
    """A consumer that stores and verifies when told."""
    watch_member(ledger)
    from harness.members import ConsumerMember

    serve_member(pipe, ConsumerMember(url, name))


def run_coordinator(_: str, pipe: Connection, ledger: Ledger, *, port: int, data_dir: Path) -> None:
    """A coordinator with its embedded store; it obeys nobody, so the pipe only holds it."""
    pipe.close()
    watch_coordinator(ledger)
    from aqua_coordinator.server import serve
    from aqua_coordinator.settings import CoordinatorSettings

    settings = CoordinatorSettings(
        listen_port=port,
        data_dir=data_dir,
        heartbeat_s=HEARTBEAT_S,
        # Members that all leave while no coordinator is there are silent together: that much longer
        # until the books give them up.
        max_clock_stop_s=1.0,
    )
    serve(settings)


class Cluster:
    """One coordinator, one producer, consumers; a context manager that leaves nothing behind.

    Args:
        directory: Short enough for Unix sockets.
        port: Free on loopback, and kept by the coordinator across its deaths.
        dooms: By process name (`coordinator`, `producer`, a consumer's): where the first process
            of that name dies. Its successors live.
    """

    def __init__(self, directory: Path, port: int, dooms: Mapping[str, Doom] | None = None) -> None:
        self.directory = directory
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._dooms = dict(dooms or {})
        self._http = httpx.Client(
            base_url=f"{self.url}/v1", timeout=CALL_TIMEOUT_S, trust_env=False
        )
        self.processes: dict[str, Process] = {}
        self.deaths: Counter[str] = Counter()
        self._steps: dict[str, list[Path]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        self._http.close()

    # --- Starting -------------------------------------------------------------------------

    def start_coordinator(self) -> Process:
        """Start it, and wait until it is ready or dead."""
        process = self._start(
            "coordinator", run_coordinator, port=self._port, data_dir=self.directory / "d"
        )
        until(lambda: self.is_ready() or not process.is_alive, "the coordinator is ready")
        return process

    def start_producer(self, name: str = "producer") -> Process:
        """Start a producer; it offers nothing yet."""
        return self._start(name, run_producer, url=self.url, endpoint=self.directory / f"{name}.s")

    def start_consumer(self, name: str) -> Process:
        """Start a consumer; it holds nothing yet."""
        return self._start(name, run_consumer, url=self.url)

    def _start(self, name: str, main: Callable[..., None], **options: Any) -> Process:  # noqa: ANN401 - of `main`
        process = Process(name, main, self.directory, self._dooms.pop(name, None), **options)
        self._steps.setdefault(name, []).append(process.steps_path)
        self.processes[name] = process
        return process

    # --- What can be seen -----------------------------------------------------------------

    def is_ready(self) -> bool:
        """Whether a coordinator answers and its store takes writes."""
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{self.url}/readyz", trust_env=False, timeout=HANG_S)
            return answer.status_code == httpx.codes.OK
        return False

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """A resource of the books."""
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.json()

    def steps(self, name: str) -> Counter[str]:
        """The steps that all processes of that name have passed."""
        return sum((recorded(path) for path in self._steps.get(name, [])), Counter())

    def check_mappings(self) -> None:
        """No slab is mapped by two consumers at once."""
        seen: dict[int, str] = {}
        for name, process in self.processes.items():
            if name.startswith("consumer"):
                for inode in process.mapped_slabs():
                    assert inode not in seen, f"{seen[inode]} and {name} both map slab {inode}"
                    seen[inode] = name


@contextlib.contextmanager
def new_cluster(doomed: str = "", doom: Doom | None = None) -> Iterator[Cluster]:
    """A cluster on a free port, in a directory that is removed."""
    directory = Path(tempfile.mkdtemp(prefix="aqua-", dir="/tmp"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        with Cluster(directory, port, {doomed: doom} if doom else None) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)
