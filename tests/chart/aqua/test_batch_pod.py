"""A rendered batch service is one that the real one takes: settings, keys, its init container."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from aqua_batch.service.rows.keys import read_key_folder
from aqua_batch.service.settings import SHORTEST_TOKEN, load_batch_settings
from harness.chart import BATCHES, CHART, Manifest, helm, merged, named, render, the_one

SECRETS: Final = {
    "uri": "postgresql+psycopg://u:p@db/batch",
    "url": "postgresql+psycopg://u:p@db/batch",
    "token": "engine-key-and-token-of-an-operator",
}


def _with(**batch: object) -> Manifest:
    return {"batch": {"enabled": True, "engines": ["http://llm:8000/v1", "https://b"], **batch}}


def _pod(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = named(manifests, "Deployment", "aqua-batch")["spec"]["template"]["spec"]
    return spec


def _environment(container: Manifest) -> dict[str, str]:
    """What the kubelet would give it."""
    made = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {}).get("secretKeyRef")
        made[variable["name"]] = SECRETS[source["key"]] if source else variable["value"]
    return made


@pytest.mark.parametrize("name", [*BATCHES])
def test_both_containers_take_their_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_file_bytes": 1_000_000_000, "order": "fcfs"}
    pod = _pod(render(merged(_with(settings=settings), {"batch": BATCHES[name]})))
    (prepare,), (batch,) = pod["initContainers"], pod["containers"]
    assert prepare["env"] == batch["env"]
    assert prepare.get("envFrom") == batch.get("envFrom")
    for known in [known for known in os.environ if known.startswith("AQUA_")]:
        monkeypatch.delenv(known)
    for variable, value in _environment(batch).items():
        monkeypatch.setenv(variable, value)
    taken = load_batch_settings()
    assert len(taken.engines) == 2
    assert (taken.listen_host, taken.listen_port) == ("0.0.0.0", 7720)  # noqa: S104 - within a pod
    assert taken.max_file_bytes == 1_000_000_000
    assert taken.database.startswith(
        "postgresql" if "urlSecret" in str(BATCHES[name]) else "sqlite"
    )
    assert taken.files.startswith("s3" if "s3:" in str(BATCHES[name]) else "file:///var/lib/aqua/")
    has_volume = "data" in {mount["name"] for mount in batch["volumeMounts"]}
    assert has_volume == ("/var/lib/aqua" in taken.database + taken.files)


def test_a_key_that_the_chart_makes_is_taken_by_the_init_container(tmp_path: Path) -> None:
    manifests = render(_with(keys={"tenant": "research"}))
    data = named(manifests, "Secret", "aqua-batch-keys")["data"]
    folder = tmp_path / "keys"
    folder.mkdir()
    for name, value in data.items():
        (folder / name).write_bytes(base64.b64decode(value))
    ((key, tenant),) = read_key_folder(folder).items()
    assert tenant == "research"
    (prepare,) = _pod(manifests)["initContainers"]
    assert [mount["mountPath"] for mount in prepare["volumeMounts"] if mount["name"] == "keys"] == [
        prepare["args"][-1]
    ]
    done = subprocess.run(
        [Path(sys.prefix) / "bin" / "aqua-batch", *prepare["args"][:-1], folder],
        env={**os.environ, "AQUA_BATCH_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert key not in done.stdout + done.stderr
    assert (tmp_path / "batch.db").exists()


def test_the_keys_are_not_where_requests_are_parsed() -> None:
    (batch,) = _pod(render(_with()))["containers"]
    assert "keys" not in {mount["name"] for mount in batch["volumeMounts"]}


def test_one_lets_go_of_its_volume_before_the_next_and_several_never_leave_a_gap() -> None:
    def strategy(batch: Manifest) -> Manifest:
        found: Manifest = named(render(_with(**batch)), "Deployment", "aqua-batch")["spec"]
        return dict(found["strategy"])

    assert strategy({}) == {"type": "Recreate"}
    assert strategy(BATCHES["postgres-shared"])["rollingUpdate"]["maxUnavailable"] == 0


def test_the_network_is_open_to_engines_by_their_urls_and_to_nothing_else() -> None:
    engines = ["http://llm:8000/v1", "https://b", "http://c/", "http://[fd00::1]:9000"]
    manifests = render(_with(engines=engines))
    egress = named(manifests, "NetworkPolicy", "aqua-batch")["spec"]["egress"]
    ports = {port["port"] for rule in egress for port in rule["ports"]}
    assert ports == {53, 5432, 443, 80, 8000, 9000}


def test_the_coordinator_asks_it_as_operator_and_their_network_lets_it() -> None:
    for batch, secret in (
        ({}, {"name": "aqua-batch-operator", "key": "token"}),
        ({"operatorSecret": {"name": "given", "key": "k"}}, {"name": "given", "key": "k"}),
    ):
        manifests = render(_with(**batch))
        found = []
        for name in ("aqua-batch", "aqua-coordinator"):
            (container,) = named(manifests, "Deployment", name)["spec"]["template"]["spec"][
                "containers"
            ]
            found.append({one["name"]: one for one in container["env"]})
            assert found[-1]["AQUA_BATCH_OPERATOR_TOKEN"]["valueFrom"]["secretKeyRef"] == secret
        assert found[1]["AQUA_BATCH_URL"]["value"] == "http://aqua-batch.gpu.svc:7720"
        made = [one for one in manifests if one["metadata"]["name"] == "aqua-batch-operator"]
        assert len(made) == ("operatorSecret" not in batch)
        for one in made:
            assert len(base64.b64decode(one["data"]["token"])) >= SHORTEST_TOKEN
        egress = named(manifests, "NetworkPolicy", "aqua-coordinator")["spec"]["egress"]
        (rule,) = [rule for rule in egress if {"protocol": "TCP", "port": 7720} in rule["ports"]]
        (peer,) = rule["to"]
        labels = named(manifests, "Deployment", "aqua-batch")["spec"]["template"]["metadata"][
            "labels"
        ]
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_without_a_batch_service_or_its_token_the_coordinator_knows_of_none() -> None:
    given = merged(
        _with(keys={"existingSecret": "keys"}),
        {"auth": {"existingSecret": "t", "existingCredentials": "c", "existingKeys": "k"}},
        {"auth": {"generate": False}, "redis": {"bundled": {"existingSecret": "v"}}},
    )
    for values in ({}, given):
        manifests = render(values)
        assert "AQUA_BATCH_URL" not in str(named(manifests, "Deployment", "aqua-coordinator"))
        assert "OPERATOR_TOKEN" not in str(manifests)
        egress = named(manifests, "NetworkPolicy", "aqua-coordinator")["spec"]["egress"]
        assert "7720" not in str(egress)


def test_helm_test_shows_the_tenants_key_and_without_a_service_asks_none(tmp_path: Path) -> None:
    pod = the_one(render(_with()), "Pod")["spec"]
    (container,) = [one for one in pod["containers"] if one["name"] == "batches"]
    (tmp_path / "key").write_text("first\nsecond")
    program = tmp_path / "aqua-batch"
    program.write_text('#!/bin/sh\necho "$AQUA_BATCH_API_KEY $*"\n')
    program.chmod(0o755)
    *shell, script = container["command"]
    script = script.replace("/etc/aqua/batch-keys", str(tmp_path))
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for content in ("first\nsecond", "first"):
        (tmp_path / "key").write_text(content)
        said = subprocess.run([*shell, script], env=path, capture_output=True, check=True)
        assert said.stdout == b"first status --json\n"
    assert len(the_one(render(), "Pod")["spec"]["containers"]) == 1


def test_the_notes_say_the_address_and_where_the_key_is() -> None:
    done = helm("install", "aqua", str(CHART), "--dry-run=client", values=_with())
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    for part in ("http://aqua-batch.default.svc:7720/v1", "aqua-batch-keys", "existingClaim"):
        assert part in notes
