"""Images built from docker/ without a daemon, and programs started in them as a cluster would.

buildah builds, on a Debian of our own (debootstrap) in the place of the base. A program runs in a
mount namespace of its own, as the image's user, with the image's environment and nothing else, on a
root that is read-only; /tmp and the coordinator's directory are memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from harness.chart import ROOT

ARCH: Final = os.environ.get("ARCH", "")
"""Of the images, where it is not this machine's: Debian's qemu-user-static runs them."""
_ARCH_OPTION: Final = ("--arch", ARCH) if ARCH else ()
_SUFFIX: Final = f"-{ARCH}" if ARCH else ""
BASE: Final = f"localhost/aqua-test-base{_SUFFIX}:bookworm"
CERTIFICATES: Final = Path("/etc/ssl/certs")

# $1 is the image's root; the rest is a command line, its environment first.
ENTER: Final = """
set -eu
root=$1; shift
mount --bind "$root" "$root"
mount -o remount,ro,bind "$root"
mount -t tmpfs tmpfs "$root/tmp"
test ! -d "$root/var/lib/aqua" || mount -t tmpfs -o mode=0700,uid=65532,gid=65532 tmpfs "$root/var/lib/aqua"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
exec chroot --userspec="$1" "$root" /usr/bin/env -i "${@:2}"
"""  # noqa: E501 - a script reads better whole


def buildah(*arguments: str | Path) -> str:
    """Run buildah; its output."""
    done = subprocess.run(
        ["buildah", *arguments], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def make_base(folder: Path) -> None:
    """The stand-in for BASE, unless it is there from an earlier run."""
    if BASE in buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        return
    root = folder / "base"
    include = "--include=python3,python3-venv,ca-certificates"
    subprocess.run(
        ["debootstrap", *_ARCH_OPTION, "--variant=minbase", include, "bookworm", root],
        check=True,
        capture_output=True,
        timeout=1500,
    )
    container = buildah("from", *_ARCH_OPTION, "scratch")
    buildah("add", "--quiet", container, root, "/")
    buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(root)


def name_of(service: str) -> str:
    """What its image is called here."""
    return f"localhost/aqua-test{_SUFFIX}/{service}"


def build(service: str, folder: Path) -> str:
    """Build a service's image, layer by layer from what has not changed; its name."""
    pip = folder / "pip.conf"
    index = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    lines = ["[global]", f"cert = {CERTIFICATES}/ca-certificates.crt"]
    pip.write_text("\n".join(lines + ([f"index-url = {index}"] if index else [])) + "\n")
    name = name_of(service)
    buildah(
        *("bud", "--quiet", "--layers", "--isolation", "chroot", "--pull-never", *_ARCH_OPTION),
        *("--volume", f"{pip}:/etc/pip.conf:ro"),
        *("--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"),
        *("--build-arg", f"BASE={BASE}"),
        *("--file", ROOT / "docker" / f"{service}.Dockerfile"),
        *("--tag", name, ROOT),
    )
    return name


def configuration(image: str) -> dict[str, Any]:
    """User, environment, entry point and command of an image."""
    found: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", image))
    config: dict[str, Any] = found["OCIv1"]["config"]
    return config


def tree_bytes(root: Path) -> int:
    """What files take, each once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            status = (Path(folder) / name).lstat()
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


@contextmanager
def mounted(image: str) -> Iterator[Path]:
    """The root of a container of this image."""
    container = buildah("from", "--pull-never", image)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("umount", container)
        buildah("rm", container)


def command_in(
    root: Path, image: str, *arguments: str, env: Sequence[str] = (), entrypoint: bool = True
) -> list[str]:
    """A command line that runs `arguments` in the image as a container runtime would."""
    config = configuration(image)
    program = [*config["Entrypoint"]] if entrypoint else []
    enter = ["unshare", "--mount", "bash", "-c", ENTER, "enter", str(root)]
    return [*enter, config["User"], *config["Env"], *env, *program, *arguments]
