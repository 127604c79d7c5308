"""A machine that systemd has booted: this one's Debian, in a container, with units of `deploy/`.

Its root lies over this machine's, in memory, so nothing of that is written to; its network is its
own. Of its services only those that a test starts run.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Final, Self

from harness.bounds import HANG_S
from harness.chart import ROOT

UNITS: Final = ROOT / "deploy" / "systemd"
# What a page of the documentation does by hand; see "One machine" in docs/operations/install.md.
_MACHINE: Final = """
set -eu
mount -t tmpfs tmpfs "$1"
cd "$1"
mkdir upper work root
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root
truncate --size 0 root/etc/machine-id
install --mode=0644 "$2"/*.service root/etc/systemd/system/
install --mode=0644 "$2"/aqua.tmpfiles root/etc/tmpfiles.d/aqua.conf
printf '[Unit]\\nRequires=basic.target\\nAfter=basic.target\\n' \\
  >root/etc/systemd/system/tested.target
chroot root useradd --system --home-dir /var/lib/aqua aqua
install --directory --mode=0700 root/etc/aqua
chroot root chown aqua:aqua /etc/aqua
exec systemd-nspawn --quiet --directory root --machine aqua-test --boot --register=no --keep-unit \
  --private-network --link-journal=no --console=read-only -- systemd.unit=tested.target
"""


class SystemdMachine:
    """A context manager that ends with the machine."""

    def __init__(self, folder: Path) -> None:
        assert shutil.which("systemd-nspawn"), "apt-get install systemd systemd-container"
        self._log: Final = folder / "boot.log"
        self._root: Final = folder / "machine"
        self._root.mkdir()
        with self._log.open("w") as sink:
            self._nspawn: Final = subprocess.Popen(
                ["unshare", "--mount", "bash", "-c", _MACHINE, "boot", self._root, UNITS],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )

    def __enter__(self) -> Self:
        give_up_s = time.monotonic() + HANG_S
        while "Reached target" not in self._said() or "tested.target" not in self._said():
            assert self._nspawn.poll() is None, self._said()
            assert time.monotonic() < give_up_s, self._said()
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._nspawn.terminate()
        try:
            self._nspawn.wait(60)
        finally:
            self._nspawn.kill()

    def _said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def _init(self) -> str:
        """The process that is its first."""
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
        return children.read_text().split()[0]

    def run(self, command: str, *, is_fine: bool = True) -> str:
        """Run a shell command there; what it prints."""
        enter = ["nsenter", "--target", self._init, "--mount", "--uts", "--ipc", "--net", "--pid"]
        done = subprocess.run(
            [*enter, "bash", "-euc", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0 or not is_fine, done.stdout + done.stderr
        return done.stdout

    def install(self, image_root: Path) -> None:
        """Have `/opt/aqua` be that of an image."""
        self.run("rm -rf /opt/aqua")
        enter = ["nsenter", "--target", self._init, "--mount"]
        packed = subprocess.Popen(
            ["tar", "--create", "--directory", image_root / "opt", "aqua"], stdout=subprocess.PIPE
        )
        with packed:
            subprocess.run(
                [*enter, "tar", "--extract", "--directory", "/opt"], stdin=packed.stdout, check=True
            )
        assert packed.returncode == 0

    def state(self, unit: str) -> dict[str, str]:
        """What systemd says of a unit."""
        lines = self.run(f"systemctl show {unit}").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)
