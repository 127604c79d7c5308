"""A PostgreSQL of its own for a test, where Debian's `postgresql` or another is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.bounds import HANG_S
from harness.store_servers import short_directory


def postgres_programs() -> Path:
    """The folder of its programs; skips the test where there is none."""
    debians = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = shutil.which("initdb") or (str(debians[-1]) if debians else None)
    if found is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    return Path(found).resolve().parent


@contextmanager
def postgres() -> Iterator[str]:
    """A server of an empty database, on a Unix socket; its URL for SQLAlchemy."""
    programs = postgres_programs()
    # It refuses to run as root.
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    who = user.pw_uid if user else None

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [programs / program, *arguments],
            check=True,
            user=who,
            cwd="/",
            timeout=HANG_S,
            stdout=subprocess.DEVNULL,
        )

    with short_directory() as folder:
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = str(folder / "data")
        run("initdb", "--pgdata", data, "--username", "aqua", "--auth", "trust", "--no-sync")
        options = f"-c listen_addresses= -c unix_socket_directories={folder}"
        log = str(folder / "log")
        run("pg_ctl", "--pgdata", data, "--log", log, "--wait", "-o", options, "start")
        try:
            yield f"postgresql+psycopg://aqua@/postgres?host={folder}"
        finally:
            run("pg_ctl", "--pgdata", data, "--wait", "--mode", "immediate", "stop")
