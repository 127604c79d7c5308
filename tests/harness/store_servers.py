"""Real servers to keep the books in: the bundled Valkey, and Debian's redis-server where it is.

Both run as the coordinator's own embedded store does, on a Unix socket in a short directory, so
that a test may kill one and start it again on its data.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from aqua_coordinator.embedded import EmbeddedValkey

KINDS: Final = ("valkey", "redis-server")


def server_program(kind: str) -> Path | None:
    """The program of this kind, None for the bundled one; skips the test where there is none."""
    if kind == "valkey":
        return None
    program = shutil.which(kind)
    if program is None:
        pytest.skip(f"{kind} is not installed")
    return Path(program)


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(
        prefix="aqua-", dir="/tmp", ignore_cleanup_errors=True
    ) as path:
        yield Path(path)


@contextlib.contextmanager
def running_store(kind: str = "valkey") -> Iterator[EmbeddedValkey]:
    """A server that lives as long as the block; skips where the program is missing."""
    program = server_program(kind)
    with short_directory() as directory:
        store = EmbeddedValkey(directory / "d", binary=program)
        store.start()
        try:
            yield store
        finally:
            store.stop()


def kill_store(store: EmbeddedValkey) -> None:
    """SIGKILL the server, and wait until it is gone; `start` brings it back with its data."""
    assert store.pid is not None, "the store is not running"
    os.kill(store.pid, signal.SIGKILL)
    store.stop()


def preloaded(name: str, directory: Path) -> Path:
    """A library that misleads a server: `slow_disk` or `skewed_clock`; skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler to build {name} with")
    source, library = Path(__file__).with_name(f"{name}.c"), directory / f"lib{name}.so"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return library
