"""The chart's README on Secrets of one's own: with what it makes, a release lacks none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from generators.page_commands import Block, blocks
from harness.bounds import HANG_S
from harness.chart import CHART, EXAMPLES, Manifest, containers, merged, pods, render

PAGE: Final = CHART / "README.md"


def made_by(found: list[Block], folder: Path) -> dict[str, set[str]]:
    """The Secrets of the page's commands, with their keys: kubectl makes them, for no cluster."""
    lines = [
        command.text
        for block in found
        if block.is_shell and "helm install" not in block.text
        for command in block.commands()
        if "create namespace" not in command.text
    ]
    dry = "--dry-run=client --output yaml; echo ---"
    script = "\n".join(re.sub("^kubectl .*", rf"\g<0> {dry}", line) for line in lines)
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    secrets = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    assert {one["metadata"]["namespace"] for one in secrets} == {"aqua"}
    return {one["metadata"]["name"]: {*one["data"]} for one in secrets}


def read_by(manifests: list[Manifest]) -> Iterator[tuple[str, str | None]]:
    """Secrets that pods of a release cannot start without, and the key where one is named."""
    for _, _, spec in pods(manifests):
        for secret in (volume["secret"] for volume in spec["volumes"] if "secret" in volume):
            for item in secret.get("items", [{"key": None}]):
                yield secret["secretName"], item["key"]
        for container in containers(spec):
            for variable in container.get("env", []):
                source = variable.get("valueFrom", {}).get("secretKeyRef")
                if source and not source.get("optional"):
                    yield source["name"], source["key"]


def test_a_release_has_all_secrets_by_the_commands_of_the_page(tmp_path: Path) -> None:
    found = blocks(PAGE)
    (given,) = [yaml.safe_load(block.text) for block in found if block.file == "secrets.yaml"]
    manifests = render(merged(EXAMPLES["co-serving"], given))
    assert not [one for one in manifests if one["kind"] == "Secret"]
    made = made_by(found, tmp_path)
    read = {*read_by(manifests)}
    assert {name for name, _ in read} == made.keys()
    assert [(name, key) for name, key in read if key and key not in made[name]] == []
    conf = (tmp_path / "valkey.conf").read_text()
    assert conf == f"requirepass {(tmp_path / 'password').read_text()}\n"
