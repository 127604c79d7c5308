"""A rendered coordinator is one that the real coordinator takes: settings, tokens, URLs, Jobs."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from aqua_coordinator.access.tokens import Role, digest, read_tokens
from aqua_coordinator.settings import load_settings
from aqua_coordinator.store.connection import open_pool
from harness.chart import AXES, CHART, EXAMPLES, Manifest, helm, merged, named, pods, render

SECRETS: Final = {
    "capability-secret": "0" * 43,
    "adoption-key": "1" * 43,
    "password": "p%40ss",
    "url": "rediss://redis.internal:6380/2",
}


def _environment(manifests: list[Manifest]) -> dict[str, str]:
    """What the kubelet would give a coordinator."""
    spec = named(manifests, "Deployment", "aqua-coordinator")["spec"]["template"]["spec"]
    made: dict[str, str] = {}
    for variable in spec["containers"][0]["env"]:
        if source := variable.get("valueFrom", {}).get("secretKeyRef"):
            if source["key"] in SECRETS:
                made[variable["name"]] = SECRETS[source["key"]]
            else:
                assert source["optional"], source
            continue
        value = variable["value"]
        assert isinstance(value, str), variable
        for name, known in made.items():
            value = value.replace(f"$({name})", known)
        made[variable["name"]] = value
    return made


@pytest.mark.parametrize("tls", [*AXES["tls"]])
@pytest.mark.parametrize("redis", [*AXES["redis"]])
async def test_a_coordinator_takes_its_environment(
    redis: str, tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = merged(
        AXES["redis"][redis],
        AXES["tls"][tls],
        {"coordinator": {"settings": {"max_grants_per_s": 1000000, "allowed_hosts": "a,b"}}},
    )
    for name in [name for name in os.environ if name.startswith("AQUA_")]:
        monkeypatch.delenv(name)
    for name, value in _environment(render(values)).items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    settings.require_safe_address()
    assert settings.max_grants_per_s == 1_000_000
    assert settings.allowed_hosts == {"a", "b"}
    assert (settings.tls_cert is not None) == (tls != "off")
    assert (settings.tls_client_ca is not None) == (tls == "mutual")
    assert settings.production == (redis == "sentinel")
    assert settings.redis_url is not None
    pool = open_pool(settings.redis_url.get_secret_value(), connect_timeout_s=1, max_connections=1)
    known = pool.connection_kwargs
    if redis != "url":
        assert known["password"] == "p@ss"
    if redis == "sentinel":
        assert settings.min_replicas == 2
        assert known["username"] == "aqua"
        assert known["ssl_ca_certs"] == "/etc/aqua/redis-tls/ca.crt"
    await pool.aclose()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"drain_s": None, "log_level": "debug"}, {"AQUA_LOG_LEVEL": "debug"}),
        ({"metrics_need_token": False}, {"AQUA_METRICS_NEED_TOKEN": "false"}),
        ({"silent_member_s": 12.5}, {"AQUA_SILENT_MEMBER_S": "12.5"}),
        ({"max_connections_per_peer": 1048576}, {"AQUA_MAX_CONNECTIONS_PER_PEER": "1048576"}),
    ],
)
def test_settings_become_variables_as_they_were_written(
    given: Manifest, expected: dict[str, str]
) -> None:
    settings = {name: value for name, value in given.items() if value is not None}
    environment = _environment(render({"coordinator": {"settings": settings}}))
    assert expected.items() <= environment.items()


def _data(manifests: list[Manifest], name: str) -> dict[str, str]:
    data = named(manifests, "Secret", name)["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def test_tokens_that_the_chart_makes_are_good_and_bear_their_roles(tmp_path: Path) -> None:
    manifests = render()
    path = tmp_path / "tokens.json"
    path.write_text(_data(manifests, "aqua-tokens")["tokens.json"])
    path.chmod(0o440)  # As a Secret is mounted.
    entries = {entry.sha256: entry for entry in read_tokens(path).tokens}
    credentials = _data(manifests, "aqua-credentials")
    roles = {
        name: set(entries[digest(credentials[name])].roles)
        for name in ("operator", "reader", "member")
    }
    assert roles == {
        "operator": {Role.OPERATOR},
        "reader": {Role.READER},
        "member": {Role.PRODUCER, Role.CONSUMER},
    }
    assert len(entries) == 3
    assert len({*credentials.values(), *_data(manifests, "aqua-keys").values()}) == 6


def test_no_secret_stands_in_a_pod_or_the_notes() -> None:
    manifests = render(EXAMPLES["dra"])
    secrets = [
        value
        for manifest in manifests
        if manifest["kind"] == "Secret"
        for name, value in _data(manifests, manifest["metadata"]["name"]).items()
        if name != "tokens.json"
    ]
    assert len(secrets) == 8
    shown = json.dumps([manifest for manifest in manifests if manifest["kind"] != "Secret"])
    assert not [secret for secret in secrets if secret in shown]


def test_arguments_of_jobs_are_options_of_the_commands(tmp_path: Path) -> None:
    """What a Job passes, its program takes: a usage error is exit code 2, before anything else."""
    programs = {"place": "aqua-place", "profile": "aqua-profile"}
    seen: set[str] = set()
    for _, meta, spec in pods(render(EXAMPLES["production"])):
        component = meta["labels"]["app.kubernetes.io/component"]
        for one in [*spec.get("initContainers", []), *spec["containers"]]:
            if component not in programs:
                continue
            seen.add(f"{component} {one['args'][0]}")
            done = subprocess.run(
                [Path(sys.prefix) / "bin" / programs[component], *one["args"], "--no-such-option"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            # The only fault is the one that was put in.
            assert done.returncode == 2
            assert "--no-such-option" in done.stderr
            assert "Missing" not in done.stderr
    assert seen == {
        *("place solve", "place check", "place push"),
        *("profile run", "profile push", "profile label"),
    }


def test_the_notes_say_how_to_go_on() -> None:
    done = helm("install", "aqua", str(CHART), "--dry-run=client", values=EXAMPLES["dra"])
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    for part in (
        "helm test aqua",
        "port-forward service/aqua-coordinator",
        "AQUA_TOKEN=",
        "pair-0",
    ):
        assert part in notes


@pytest.mark.parametrize("tls", ["secret", "mutual"])
def test_the_notes_call_a_server_with_tls_by_a_name_of_its_certificate(tls: str) -> None:
    done = helm("install", "aqua", str(CHART), "--dry-run=client", values=AXES["tls"][tls])
    notes = done.stdout.partition("NOTES:")[2]
    assert "://localhost" not in notes
    assert "--resolve aqua-coordinator.default.svc:7700:127.0.0.1" in notes
    assert ("--key tls.key" in notes) == (tls == "mutual")


def test_the_notes_name_the_value_that_admits_a_prometheus_until_something_is_in_it() -> None:
    watched = {"monitoring": {"mode": "always"}}
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    for more, is_said in (
        ({}, True),
        ({"networkPolicy": {"allowFrom": [peer]}}, False),
        ({"networkPolicy": {"enabled": False}}, False),
        ({"monitoring": {"mode": "never"}}, False),
    ):
        values = merged(watched, more)
        done = helm("install", "aqua", str(CHART), "--dry-run=client", values=values)
        assert ("networkPolicy.allowFrom" in done.stdout.partition("NOTES:")[2]) is is_said, more


def test_the_pod_of_helm_test_has_the_seconds_that_are_said() -> None:
    manifests = render({"tests": {"timeoutSeconds": 45}})
    assert named(manifests, "Pod", "aqua-test")["spec"]["activeDeadlineSeconds"] == 45
