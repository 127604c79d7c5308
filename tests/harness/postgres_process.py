"""A PostgreSQL of its own for a test, where Debian's `postgresql` or another is installed."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from harness.bounds import HANG_S, stopwatch
from harness.store_servers import short_directory


def postgres_programs() -> Path:
    """The folder of its programs; skips the test where there is none."""
    debians = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = shutil.which("initdb") or (str(debians[-1]) if debians else None)
    if found is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    return Path(found).resolve().parent


class PostgresProcess:
    """A server of an empty database, on a Unix socket.

    Attributes:
        url: For SQLAlchemy.
    """

    def __init__(self, folder: Path) -> None:
        self._programs: Final = postgres_programs()
        # It refuses to run as root.
        self._user: Final = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None
        self._folder: Final = folder
        self._data: Final = folder / "data"
        if self._user is not None:
            os.chown(folder, self._user, -1)
        self._run("initdb", "--username", "aqua", "--auth", "trust", "--no-sync")
        self.url: Final = f"postgresql+psycopg://aqua@/postgres?host={folder}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = f"--unix_socket_directories={self._folder}", "--listen_addresses="
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *options],
                user=self._user,
                cwd="/",
                stderr=log,
            )
        waited = stopwatch()
        asking = [str(self._programs / "pg_isready"), "--quiet", "--host", str(self._folder)]
        while subprocess.run(asking, check=False, timeout=HANG_S).returncode:
            said = (self._folder / "log").read_text()
            assert self._process.poll() is None, said
            assert waited() < HANG_S, said

    def stop(self) -> None:
        """Stop it without regard to what it does."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(HANG_S)

    def kill(self) -> None:
        """SIGKILL all its processes at once, and wait until they are gone."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        handles = [os.pidfd_open(pid)]
        for child in map(int, children):
            with contextlib.suppress(ProcessLookupError):
                handles.append(os.pidfd_open(child))
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for handle in handles:
            assert select.select([handle], [], [], HANG_S)[0], "it does not die"
            os.close(handle)
        self._process.wait(HANG_S)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, "--pgdata", self._data, *arguments],
            check=True,
            user=self._user,
            cwd="/",
            timeout=HANG_S,
            stdout=subprocess.DEVNULL,
        )


@contextlib.contextmanager
def postgres() -> Iterator[PostgresProcess]:
    """A server that runs and answers."""
    with short_directory() as folder:
        process = PostgresProcess(folder)
        process.start()
        try:
            yield process
        finally:
            process.stop()
