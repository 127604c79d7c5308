"""The compose file, carried out by podman in a network and a tree of mounts of its own.

So ports are those that the file names and are taken from no one, and podman finds the one kind of
control groups that it knows, on machines that have both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from harness.chart import ROOT

COMPOSE: Final = ROOT / "deploy" / "compose" / "compose.yaml"
PROJECT: Final = "aqua-test"
# A machine's own limits may be below those that podman would raise them to.
CONTAINERS_CONF: Final = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
_MACHINE: Final = """
set -eu
ip link set lo up
mountpoint --quiet /sys/fs/cgroup/unified && umount /sys/fs/cgroup/unified
echo made
exec cat
"""


class Compose:
    """One machine with podman; a context manager that leaves no container and no volume."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        settings = folder / "containers.conf"
        settings.write_text(CONTAINERS_CONF)
        self._environment: Final = {
            **os.environ,
            "CONTAINERS_CONF": str(settings),
            **environment,
        }
        self._machine: Final = subprocess.Popen(
            ["unshare", "--mount", "--net", "bash", "-c", _MACHINE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._machine.stdout is not None
        assert self._machine.stdout.readline() == "made\n"

    def run(self, *command: str | Path, is_fine: bool = True, timeout_s: float = 300) -> str:
        """Run a command of that machine; what it prints."""
        enter = ["nsenter", "--target", str(self._machine.pid), "--mount", "--net", "--"]
        done = subprocess.run(
            [*enter, *command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0 or not is_fine, done.stdout + done.stderr
        return done.stdout if is_fine else str(done.returncode)

    def compose(self, *words: str) -> str:
        """`docker compose` with these words; profiles that docker finds by itself are named."""
        program = Path(sys.prefix) / "bin" / "podman-compose"
        profiles = ("--profile", "setup", "--profile", "batch")
        return self.run(program, "--project-name", PROJECT, *profiles, "--file", COMPOSE, *words)

    def is_healthy(self, service: str) -> bool:
        """What the healthcheck of a service's container says, as it is in the file."""
        check = ("podman", "healthcheck", "run", f"{PROJECT}_{service}_1")
        return self.run(*check, is_fine=False) == "0"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.compose("down", "--volumes")
        finally:
            self._machine.communicate()
