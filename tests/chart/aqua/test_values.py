"""Values that are wrong are refused by their name, with what to write instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from harness.chart import CHART, EXAMPLES, Manifest, merged, refusal, render

SCHEMA: Final[Manifest] = json.loads((CHART / "values.schema.json").read_text())
RENAMED: Final[dict[str, str]] = yaml.safe_load((CHART / "files" / "renamed.yaml").read_text())
TYPO: Final = "replicaz"
_ENGINE: Final[Manifest] = {"role": "producer", "image": "i", "resources": {}, "port": 8000}


def _nested(path: list[str], value: object) -> Manifest:
    for name in reversed(path):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _objects(node: Manifest, path: list[str]) -> Iterator[list[str]]:
    """Paths of all objects whose members the schema lists; maps get a member called `some`."""
    if "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    if node.get("additionalProperties") is False:
        yield path
        for name, member in node["properties"].items():
            yield from _objects(member, [*path, name])
    elif isinstance(node.get("additionalProperties"), dict):
        yield from _objects(node["additionalProperties"], [*path, "some"])


@pytest.mark.parametrize("path", [*_objects(SCHEMA, [])], ids=".".join)
def test_a_typo_is_refused_by_its_name_and_place(path: list[str]) -> None:
    said = refusal(_nested([*path, TYPO], 3))
    assert TYPO in said
    assert "/".join(path) in said


def test_every_value_is_in_the_schema_and_only_maps_of_names_are_open() -> None:
    def missing(values: Manifest, node: Manifest, path: str) -> Iterator[str]:
        for name, value in values.items():
            if name not in node.get("properties", {name: {}}):
                yield f"{path}{name}"
            elif isinstance(value, dict) and "properties" in node:
                yield from missing(value, node["properties"][name], f"{path}{name}.")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert [*missing(values, SCHEMA, "")] == []


@pytest.mark.parametrize(("old", "new"), [*RENAMED.items()], ids=[*RENAMED])
def test_a_renamed_value_is_refused_with_its_new_name(old: str, new: str) -> None:
    for value in (1, "x", {"a": 1}, False):
        assert f"{old} is now {new}" in refusal(_nested(old.split("."), value))


def test_new_names_are_values_that_exist() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for new in RENAMED.values():
        node: Any = values
        for name in new.split(" and ")[-1].split(",")[0].split("."):
            if name == "NAME":
                break
            assert name in node, new
            node = node[name]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image": {"registry": ""}}, "image.registry is required"),
        ({"production": True}, "production: true needs redis.external"),
        ({"redis": {"external": {"host": "r"}}}, "set it to false"),
        ({"redis": {"bundled": {"enabled": False}}}, "no Redis: set redis.external.host"),
        ({"redis": {"external": {"host": "r:6380"}}}, "/redis/external/host"),
        ({"redis": {"external": {"host": "fd00::1"}}}, "/redis/external/host"),
        ({"redis": {"external": {"username": "a@b"}}}, "/redis/external/username"),
        (
            merged(EXAMPLES["production"], {"redis": {"external": {"urlSecret": {"name": "r"}}}}),
            "urlSecret, which is the whole URL, and a host or Sentinels",
        ),
        (
            merged(EXAMPLES["production"], {"redis": {"external": {"tls": {"enabled": False}}}}),
            "redis.external.tls.enabled is false",
        ),
        ({"commonLabels": {"app.kubernetes.io/component": "x"}}, "app.kubernetes.io/component"),
        ({"commonLabels": {"team": "no spaces"}}, "/commonLabels/team"),
        ({"tls": {"enabled": True}}, "needs tls.existingSecret or tls.certManager.enabled"),
        ({"tls": {"clientAuth": True}}, "tls.enabled is false"),
        (
            {"tls": {"enabled": True, "clientAuth": True, "existingSecret": "s"}},
            "needs tls.existingClientSecret",
        ),
        ({"auth": {"existingSecret": "s"}}, "belong together"),
        ({"auth": {"generate": False}}, "name auth.existingSecret"),
        (
            merged(EXAMPLES["production"], {"redis": {"external": {"sentinel": {"service": ""}}}}),
            "redis.external.sentinel.service is required",
        ),
        (
            merged(EXAMPLES["production"], {"redis": {"external": {"host": "r"}}}),
            "a host and Sentinels",
        ),
        (
            merged(EXAMPLES["dra"], {"ipc": {"mode": "hostNamespaces"}}),
            "servers.pair-0.engines.image.visibleDevices is required in mode hostNamespaces",
        ),
        (merged(EXAMPLES["dra"], {"ipc": {"mode": "Dra"}}), "'dra', 'hostNamespaces', 'sidecar'"),
        (
            {"servers": {"a": {"engines": {"b-c": _ENGINE}}, "a-b": {"engines": {"c": _ENGINE}}}},
            "servers.a.engines.b-c and servers.a-b.engines.c would both be called a-b-c",
        ),
        (
            {"servers": {"placer": {"mode": "sidecar", "engines": {"c": _ENGINE}}}},
            "placer and servers.placer would both be called placer",
        ),
        (
            {
                "servers": {
                    "a": {
                        "mode": "sidecar",
                        "engines": {"e": {**_ENGINE, "metricsPort": 9000}, "e-m": _ENGINE},
                    }
                }
            },
            "the port for metrics of e is called e-m",
        ),
        (
            {"coordinator": {"autoscaling": {"enabled": True, "minReplicas": 7}}},
            "coordinator.autoscaling: minReplicas is 7 and maxReplicas 6",
        ),
        ({"coordinator": {"replicas": 0}}, "minimum"),
        ({"coordinator": {"replicas": "3"}}, "want integer"),
        ({"coordinator": {"settings": {"heartbeat_s": 900}}}, "heartbeat_s"),
        ({"coordinator": {"settings": {"listen_port": 80}}}, "listen_port"),
        ({"servers": {"Pair_0": {"engines": {}}}}, "Pair_0"),
        ({"batch": {"enabled": True}}, "batch.engines is required"),
        ({"batch": {"engines": ["node-1:8000"]}}, "/batch/engines/0"),
        ({"batch": {"settings": {"database_url": "sqlite://"}}}, "database_url"),
        ({"batch": {"settings": {"lease_s": 0}}}, "lease_s"),
        (
            merged(EXAMPLES["batch"], {"batch": {"database": {"urlSecret": {"name": ""}}}}),
            "batch.replicas is 3, and SQLite is for one: set batch.database.urlSecret",
        ),
        (
            merged(EXAMPLES["batch"], {"batch": {"persistence": {"accessMode": "ReadWriteOnce"}}}),
            "set batch.files.url, or batch.persistence.accessMode to ReadWriteMany",
        ),
        (
            merged(EXAMPLES["batch"], {"batch": {"files": {"url": "file:///data"}}}),
            "batch.files.url is a folder of the container",
        ),
        (
            merged(EXAMPLES["production"], {"batch": {"enabled": True, "engines": ["http://e"]}}),
            "auth.generate is false: name batch.keys.existingSecret",
        ),
        ({"profiler": {"jobs": {"x": {"model": "m"}}}}, "endpoint"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_the_next_step(values: Manifest, said: str) -> None:
    assert said in refusal(values)


def test_a_cluster_without_resource_claims_is_told_so() -> None:
    said = refusal(EXAMPLES["dra"], "--kube-version", "1.33.4")
    assert "mode dra needs ResourceClaims of Kubernetes 1.34; this is v1.33.4" in said
    assert render(EXAMPLES["host-namespaces"], "--kube-version", "1.33.4")
