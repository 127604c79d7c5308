"""Images are small, run as nobody in particular on a read-only root, and answer their probes.

`KEEP=1 make test-images` takes the images that the last run has built.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import httpx
import pytest

from aqua_coordinator.access.tokens import Role, create_token
from harness.chart import ROOT
from harness.image import BASE, command_in, configuration, mounted, tree_bytes

MAX_COORDINATOR_BYTES: Final = 120 * 10**6
ARM64: Final = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
"""What Debian's C library on arm64 (GB200 hosts) takes."""
BY_PATCH_RELEASE: Final = {"async-timeout"}
"""What redis-py requires of Python below 3.11.3, which the base may have and this machine not."""
DEMO: Final = str(ROOT / ".venv" / "bin" / "aqua-demo")
"""Its torch is in no environment of the chart, nor in an image."""
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="session", params=["coordinator", "placer", "profiler", "batch"])
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def image(service: str, built: Callable[[str], str]) -> str:
    return built(service)


@pytest.fixture(scope="session")
def bills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a release says that its images install."""
    folder = tmp_path_factory.mktemp("bills")
    cyclonedx = Path(sys.prefix) / "bin" / "cyclonedx-py"
    script = ROOT / "deploy" / "release.py"
    subprocess.run([sys.executable, script, "bills", folder, "--with", cyclonedx], check=True)
    return folder


@pytest.fixture(scope="session")
def root(image: str) -> Iterator[Path]:
    with mounted(image) as path:
        yield path


def _run(root: Path, image: str, *arguments: str, entrypoint: bool = True) -> str:
    done = subprocess.run(
        command_in(root, image, *arguments, entrypoint=entrypoint),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def _serving(command: list[str]) -> Iterator[str]:
    """A server until the block ends; yields the address that it has said."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if found := re.search(r"(http://[0-9.]+:[0-9]+)", line):
                    break
            else:
                pytest.fail("".join(lines))
            # A full pipe would stop it.
            rest = threading.Thread(target=process.stdout.read)
            rest.start()
            yield found[1]
            process.send_signal(signal.SIGTERM)
            rest.join()
            assert process.wait(60) in {0, -signal.SIGTERM}
        finally:
            process.kill()


def test_it_runs_as_a_user_that_is_not_root_on_a_root_that_is_read_only(
    root: Path, image: str
) -> None:
    user = configuration(image)["User"]  # By number, as `runAsNonRoot` wants it.
    assert re.fullmatch(r"[1-9][0-9]{4,}:[1-9][0-9]{4,}", user)
    script = "id -u; touch /opt/aqua/x /etc/x 2>&1 || echo refused; touch /tmp/x && echo tmp"
    said = _run(root, image, "sh", "-c", script, entrypoint=False).splitlines()
    assert said[0] == user.partition(":")[0]
    assert said[-2:] == ["refused", "tmp"]
    assert "Read-only file system" in said[1]


def test_it_carries_its_program_and_no_installer_and_no_torch(
    root: Path, image: str, service: str
) -> None:
    assert "0." in _run(root, image, "--version")
    packages = {
        path.name.partition("-")[0].lower()
        for path in root.glob("opt/aqua/lib/*/site-packages/*.dist-info")
    }
    assert f"aqua_{service}" in packages
    assert not packages & {"pip", "setuptools", "wheel", "torch", "pytest"}


def test_all_that_it_installs_has_a_wheel_for_arm64(service: str, tmp_path: Path) -> None:
    """So nothing is compiled there; `ARCH=arm64` builds and runs it by emulation."""
    dockerfile = (ROOT / "docker" / f"{service}.Dockerfile").read_text()
    _, _, line = dockerfile.partition("--constraint constraints.txt")
    what = shlex.split(line.partition("&&")[0].partition("\n\n")[0].replace("\\\n", ""))
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-cache-dir"),
            *("--ignore-installed", "--target", tmp_path / "arm64", "--report", report),
            *("--only-binary", ":all:", "--python-version", "3.12"),
            *(word for each in ARM64 for word in ("--platform", each)),
            *("--constraint", "constraints.txt", *what),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())["install"]
    assert f"aqua-{service}" in {each["metadata"]["name"] for each in found}
    # Compiled ones are among them, so the platform that was asked for did count.
    assert [each for each in found if "aarch64" in each["download_info"]["url"]]


def test_the_bill_of_a_release_lists_what_it_installs(
    root: Path, service: str, bills: Path
) -> None:
    (site,) = root.glob("opt/aqua/lib/*/site-packages")
    installed = {f"{one.name}=={one.version}" for one in distributions(path=[str(site)])}
    (path,) = bills.glob(f"aqua-{service}-*.cdx.json")
    bill = json.loads(path.read_text())
    described = [bill["metadata"]["component"], *bill["components"]]
    listed = {f"{one['name']}=={one['version']}" for one in described}
    assert described[0]["name"] == f"aqua-{service}"
    assert listed <= installed
    assert {one.partition("==")[0] for one in installed - listed} <= BY_PATCH_RELEASE
    assert str(ROOT) not in path.read_text()
    sums = {line.split()[1] for line in (bills / "SHA256SUMS").read_text().splitlines()}
    assert path.name in sums


def test_a_coordinator_adds_less_than_120_mb_to_its_base(
    root: Path, image: str, service: str
) -> None:
    if service != "coordinator":
        return
    with mounted(BASE) as base_root:
        added = tree_bytes(root) - tree_bytes(base_root)
    assert 0 < added < MAX_COORDINATOR_BYTES


def test_it_answers_its_probes(root: Path, image: str, service: str) -> None:
    if service == "profiler":  # Jobs have no probes.
        assert "label" in _run(root, image, "--help")
        return
    engines = ("AQUA_BATCH_ENGINES=http://127.0.0.1:9",)  # None answers; a probe asks none.
    command = command_in(root, image, "serve", "--port", "0", env=engines)
    with _serving(command) as url:
        for path in ("/healthz", "/readyz"):
            assert httpx.get(url + path, timeout=30).status_code == 200


def test_the_demo_runs_against_a_coordinator_in_its_image(
    root: Path, image: str, service: str, tmp_path: Path
) -> None:
    """It asks for tokens, as one of the chart does; the demo brings one of a member."""
    if service != "coordinator":
        return
    token, _ = create_token(tmp_path / "tokens.json", roles=[Role.PRODUCER, Role.CONSUMER])
    script = (
        'umask 077 && printf %s "$TOKENS" >/tmp/tokens.json && unset TOKENS'
        " && AQUA_TOKENS_FILE=/tmp/tokens.json exec aqua-coordinator serve --port 0"
    )
    environment = [f"TOKENS={(tmp_path / 'tokens.json').read_text()}"]
    command = command_in(root, image, "sh", "-ec", script, env=environment, entrypoint=False)
    with _serving(command) as url:
        demo = [DEMO, "--quick", "--json", "--coordinator", url]
        done = subprocess.run(
            [*demo, "--output-dir", tmp_path],
            env={**os.environ, "AQUA_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tokens_identical"] is True
        assert not (tmp_path / "demo-logs" / "coordinator.log").exists()


def test_the_bundled_valkey_is_in_the_coordinators_image(
    root: Path, image: str, service: str
) -> None:
    if service == "coordinator":
        assert "Valkey server v=" in _run(
            root, image, "valkey-server", "--version", entrypoint=False
        )


def test_a_batch_service_takes_keys_as_its_init_container_does(
    root: Path, image: str, service: str
) -> None:
    if service != "batch":
        return
    script = (
        "mkdir /tmp/keys && printf sk-aqua-0123456789ab-%032d 0 >/tmp/keys/research"
        " && aqua-batch key load /tmp/keys && aqua-batch key list --json"
    )
    said = json.loads(_run(root, image, "sh", "-ec", script, entrypoint=False))
    assert [key["tenant"] for key in said] == ["research"]


def test_a_coordinator_on_all_addresses_wants_tokens(root: Path, image: str, service: str) -> None:
    if service != "coordinator":
        return
    done = subprocess.run(
        command_in(root, image, "serve", "--host", "0.0.0.0"),  # noqa: S104 - it is refused
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "AQUA_TOKENS_FILE" in done.stderr
