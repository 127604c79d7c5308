"""The compose file's services of ours run as it says, in real containers; engines need GPUs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from harness.bounds import until
from harness.compose import COMPOSE, Compose
from harness.image import ARCH, mounted

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(ARCH), reason="a machine of this kind has its own images"),
]

TEXT: Final = COMPOSE.read_text(encoding="utf-8")
OURS: Final = ("coordinator", "batch")


@pytest.fixture(scope="module")
def machine(
    built: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compose]:
    registry = {built(service).rpartition("/")[0] for service in OURS}
    environment = {
        "AQUA_REGISTRY": registry.pop(),
        "AQUA_TAG": "latest",
        "AQUA_ENGINE_IMAGE": "localhost/no-such-engine",
    }
    with Compose(tmp_path_factory.mktemp("compose"), environment) as machine:
        yield machine


def told(what: str) -> list[str]:
    """The words of the one command in the file's first lines that has `what` in it."""
    (line,) = re.findall(rf"^#   docker compose (.*{what}.*?)(?:   .*)?$", TEXT, re.MULTILINE)
    return shlex.split(line)


def await_health(machine: Compose, service: str) -> None:
    until(lambda: machine.is_healthy(service), lambda: machine.compose("logs", service))


def asked(machine: Compose, url: str, token: str | None = None) -> tuple[int, str]:
    header = () if token is None else ("--header", f"Authorization: Bearer {token}")
    said = machine.run("curl", "--silent", "--write-out", "\n%{http_code}", *header, url)
    body, _, code = said.rpartition("\n")
    return int(code), body


def test_its_first_lines_lead_to_a_coordinator_and_a_batch_service(machine: Compose) -> None:
    machine.compose(*told("rm tokens"))
    machine.compose("up", "--detach", "coordinator")
    await_health(machine, "coordinator")
    assert "Producers" in machine.compose(*told("status --once"))
    assert asked(machine, "http://127.0.0.1:7700/v1/status")[0] == 401
    files = machine.compose("exec", "coordinator", "ls", "/etc/aqua/tokens").split()
    assert {"member", "operator", "tokens.json"} <= set(files)

    (key,) = re.findall(r"sk-aqua-[\w-]+", machine.compose(*told("key add")))
    machine.compose("up", "--detach", "--no-deps", "batch")
    await_health(machine, "batch")
    assert asked(machine, "http://127.0.0.1:7720/v1/batches")[0] == 401
    code, body = asked(machine, "http://127.0.0.1:7720/v1/batches", key)
    assert (code, json.loads(body)["data"]) == (200, [])


def test_what_is_written_to_by_the_images_user_is_theirs_in_the_image(
    built: Callable[[str], str],
) -> None:
    """Docker gives a new volume the owner of the folder that it finds there; podman, the user."""
    found = set()
    for service in yaml.safe_load(TEXT)["services"].values():
        name = re.search(r"/(coordinator|batch):", service["image"])
        for volume in service["volumes"] if name else ():
            found.add((name[1] if name else "", volume.split(":")[1]))
    assert len(found) == 3
    for service, folder in found:
        with mounted(built(service)) as root:
            where = root / Path(folder).relative_to("/")
            assert (where.stat().st_uid, where.stat().st_mode & 0o777) == (65532, 0o700)
