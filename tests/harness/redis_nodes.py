"""Redis servers that copy each other, and the Sentinels that watch them: Debian's redis-server.

Each node keeps a log of writes, can be killed or stopped at any moment and comes back on its data.
Ports lie below those that the kernel hands out by itself, so that a node finds its own again.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import pytest
import redis

from harness.bounds import HANG_S, until
from harness.store_servers import preloaded

SERVICE: Final = "aqua"
CLIENT, PEER = "client", "peer"
"""Users and their passwords: coordinators and tests, and nodes and Sentinels to each other."""
USERS: Final = (
    # Redis loads its log as `default`, and 7.0 skips the transactions of one that may do nothing.
    "user default off ~* &* +@all",
    *(f"user {name} on >{name} ~* &* +@all" for name in (CLIENT, PEER)),
    f"masteruser {PEER}",
    f"masterauth {PEER}",
)
LOWEST_PORT: Final = 20_000
PORTS: Final = 12_000
"""Below 32768, where Linux begins to hand them out."""
DOWN_AFTER_MS: Final = 300
"""Silence after which a Sentinel thinks that a node is down: short, so that failovers are many."""
PERIODS_MS: Final = {
    "info-period": 100,
    "ask-period": 100,
    "publish-period": 500,
    "tilt-period": 1000,
}
"""Of what Sentinels do every one, two, ten or thirty seconds otherwise. One that has not heard of a
failover within four publications undoes it, so these are not as short as the others."""


def redis_program() -> str:
    """Debian's server; skips the test where it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    return program


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on and that the kernel gives to no connection by itself.

    Until this process ends no other that calls this gets them, and none gets one twice: each is
    kept by a datagram socket of the same number.
    """
    found: list[int] = []
    draw = random.Random(os.getpid() * 1000 + time.monotonic_ns() % 1000)
    while len(found) < count:
        port = LOWEST_PORT + draw.randrange(PORTS)
        keeper = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            keeper.bind(("127.0.0.1", port))
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            keeper.close()
            continue
        _KEEPERS.append(keeper)
        found.append(port)
    return found


_KEEPERS: Final[list[socket.socket]] = []


class RedisNode:
    """One server; its data and its configuration, which Sentinels rewrite, survive it.

    Args:
        directory: Its own; made if missing.
        port: To listen on.
        environment: Of the process, beside ours.
        program: The server; Debian's by default.
        before: Run in its process before it becomes the server.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        *,
        environment: Mapping[str, str] | None = None,
        program: str | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.port: Final = port
        self._program = program
        self._before = before
        self._config: Final = directory / "node.conf"
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._client = redis.Redis(port=port, decode_responses=True, socket_timeout=HANG_S)
        self.url = f"redis://127.0.0.1:{port}/0"

    def __repr__(self) -> str:
        return f"RedisNode({self.port})"

    def configure(self, *lines: str) -> Self:
        """Write its configuration."""
        self._config.write_text("\n".join([f"port {self.port}", "bind 127.0.0.1", *lines, ""]))
        if set(USERS) <= set(lines):
            self._client.connection_pool.connection_kwargs |= {
                "username": CLIENT,
                "password": CLIENT,
            }
            self.url = f"redis://{CLIENT}:{CLIENT}@127.0.0.1:{self.port}/0"
        return self

    def start(self, *options: str) -> None:
        """Start it, and wait until it answers."""
        with self._config.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program or redis_program(), str(self._config), *options],
                cwd=self._config.parent,
                env=self._environment,
                stdout=log,
                stderr=log,
                preexec_fn=self._before,  # noqa: PLW1509 - system calls that are prepared
            )
        until(self._is_ready, f"{self} does not start")

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None, "not started"
        return self._process.pid

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self} has ended: see {self._config}'s log"
        return self.answers()

    def answers(self) -> bool:
        """Whether it is there and has loaded its data."""
        try:
            return bool(self._client.ping())
        except (redis.ConnectionError, redis.BusyLoadingError):
            return False

    def command(self, *words: str | int) -> Any:  # noqa: ANN401 - whatever it says
        """Say something to it."""
        return self._client.execute_command(*words)  # type: ignore[no-untyped-call] # redis-py types it in part

    def info(self) -> dict[str, Any]:
        """Its side of the replication."""
        said: dict[str, Any] = self._client.info("replication")
        return said

    def signal(self, number: int) -> None:
        """SIGSTOP or SIGCONT."""
        assert self._process is not None, "not started"
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone. Harmless when repeated."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(HANG_S)
            self._process = None
        self._client.close()


@contextlib.contextmanager
def replicated(
    directory: Path,
    *,
    replicas: int = 2,
    environments: dict[int, dict[str, str]] | None = None,
    program: str | None = None,
) -> Iterator[list[RedisNode]]:
    """A master, first, and its replicas, each in step with it."""
    ports = free_ports(1 + replicas)
    nodes: list[RedisNode] = []
    try:
        for index, port in enumerate(ports):
            environment = (environments or {}).get(index, {})
            home = directory / f"node-{index}"
            node = RedisNode(home, port, environment=environment, program=program)
            nodes.append(node)
            lines = ["save ''", "appendonly yes", "appendfsync no", "repl-diskless-sync-delay 0"]
            lines += USERS
            if index:
                lines.append(f"replicaof 127.0.0.1 {ports[0]}")
            node.configure(*lines).start()
        for node in nodes[1:]:
            until(lambda: node.info()["master_link_status"] == "up", f"{node} is not in step")  # noqa: B023 - at once
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def skewed(directory: Path, skews_s: Sequence[int]) -> dict[int, dict[str, str]]:
    """Environments in which the nodes' clocks are wrong by so much; skips without a compiler."""
    library = str(preloaded("skewed_clock", directory))
    return {
        index: {"LD_PRELOAD": library, "CLOCK_SKEW_S": str(skew_s)}
        for index, skew_s in enumerate(skews_s)
    }


class Sentinels:
    """Three Sentinels that agree by two on which node is the master."""

    def __init__(self, directory: Path, master: RedisNode) -> None:
        self.nodes: Final = [
            RedisNode(directory / f"sentinel-{port}", port).configure(
                f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 2",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {SERVICE} 3000",
                f"sentinel parallel-syncs {SERVICE} 2",
                f"sentinel auth-user {SERVICE} {PEER}",
                f"sentinel auth-pass {SERVICE} {PEER}",
            )
            for port in free_ports(3)
        ]

    def __enter__(self) -> Self:
        words = [word for period in PERIODS_MS.items() for word in period]
        try:
            for node in self.nodes:
                node.start("--sentinel")
                node.command("SENTINEL", "DEBUG", *words)
            until(lambda: all(self._knows_all(node) for node in self.nodes), "Sentinels are alone")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()

    @property
    def url(self) -> str:
        """What AQUA_REDIS_URL is set to."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+sentinel://{CLIENT}:{CLIENT}@{hosts}/{SERVICE}/0"

    def master_port(self) -> int | None:
        """The master's port, None while Sentinels disagree."""
        words = "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE
        ports = {int(node.command(*words)[1]) for node in self.nodes}
        return ports.pop() if len(ports) == 1 else None

    def hand_over(self) -> None:
        """Let a replica become the master although nothing is wrong."""
        with contextlib.suppress(
            redis.ResponseError
        ):  # One is under way, or no replica is known yet.
            self.nodes[0].command("SENTINEL", "FAILOVER", SERVICE)

    def _knows_all(self, node: RedisNode) -> bool:
        said = node.command("SENTINEL", "MASTER", SERVICE)
        state = dict(zip(said[::2], said[1::2], strict=True)) if isinstance(said, list) else said
        return int(state["num-other-sentinels"]) == 2 and int(state["num-slaves"]) == 2


def isolate(node: RedisNode) -> None:
    """Cut it off from the other nodes and the Sentinels, while clients still reach it."""
    node.command("ACL", "SETUSER", PEER, "off")
    node.command("CLIENT", "KILL", "USER", PEER)


def rejoin(node: RedisNode) -> None:
    """Let the others reach it again."""
    node.command("ACL", "SETUSER", PEER, "on")


def stop(node: RedisNode) -> None:
    """Let it stand still, as a machine does that swaps, or a virtual one that moves."""
    node.signal(signal.SIGSTOP)


def resume(node: RedisNode) -> None:
    """Let it go on where it was."""
    node.signal(signal.SIGCONT)
