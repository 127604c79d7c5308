"""The chart as helm renders it: objects by kind and name, and what is wrong with them."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "helm" / "aqua"
HELM: Final = Path(sys.prefix) / "bin" / "helm"
REGISTRY: Final = "registry.example/aqua"
KUBERNETES: Final = ("1.34.0", "1.37.0")
PROMETHEUS_OPERATOR: Final = "monitoring.coreos.com/v1"

Manifest = dict[str, Any]

EXAMPLES: Final = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("examples/*.yaml"))
}

# One choice of each axis makes a release; every combination is rendered.
AXES: Final[dict[str, dict[str, Manifest]]] = {
    "mode": {
        "none": {},
        "dra": EXAMPLES["dra"],
        "host": EXAMPLES["host-namespaces"],
        "sidecar": EXAMPLES["sidecar"],
    },
    "redis": {
        "bundled": {},
        "host": {
            "redis": {
                "bundled": {"enabled": False},
                "external": {
                    "host": "redis.internal",
                    "passwordSecret": {"name": "redis", "key": "password"},
                    "tls": {"enabled": True, "secret": "redis-tls", "clientCertificate": True},
                },
            }
        },
        "sentinel": {"production": True, "redis": EXAMPLES["production"]["redis"]},
        "url": {
            "redis": {"bundled": {"enabled": False}, "external": {"urlSecret": {"name": "redis"}}}
        },
    },
    "tls": {
        "off": {},
        "secret": {"tls": {"enabled": True, "existingSecret": "coordinator-tls"}},
        "mutual": {
            "tls": {"enabled": True, "clientAuth": True, "certManager": {"enabled": True}},
        },
    },
    "monitoring": {
        "on": {"monitoring": {"mode": "always"}},
        "off": {"monitoring": {"mode": "never"}},
    },
    "tokens": {
        "made": {},
        "given": {"auth": {**EXAMPLES["production"]["auth"], "generate": True}},
    },
    "jobs": {
        "without": {},
        "with": {name: EXAMPLES["production"][name] for name in ("placer", "profiler")},
    },
}

_CLAIM: Final = {"existingClaim": "files"}
_SHARED: Final = {"accessMode": "ReadWriteMany", "storageClassName": "nfs", "size": "1Ti"}
_POSTGRES: Final = {"urlSecret": {"name": "postgres", "key": "uri"}}
# A batch service shares only monitoring and tokens with the rest: not every one with every other.
BATCHES: Final[dict[str, Manifest]] = {
    "sqlite": {},
    "sqlite-claim": {"persistence": _CLAIM, "keys": {"existingSecret": "keys"}},
    "sqlite-s3": {"files": {"url": "s3://b/p", "credentialsSecret": "aws"}},
    "postgres": {"database": _POSTGRES},
    "postgres-shared": {"database": _POSTGRES, "replicas": 3, "persistence": _SHARED},
    "postgres-claim": {"database": _POSTGRES, "replicas": 2, "persistence": _CLAIM},
    "postgres-s3": {"database": _POSTGRES, "replicas": 2, "files": {"url": "s3://b/p"}},
    "example": EXAMPLES["batch"]["batch"],
    "pdb-off": {"database": _POSTGRES, "files": {"url": "s3://b"}, "pdb": {"enabled": False}},
    "engine-key": {"engineKeySecret": {"name": "engines", "key": "token"}},
}


def merged(*layers: Mapping[str, Any]) -> Manifest:
    """Values of several files, as helm merges them."""
    result: Manifest = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping) and isinstance(result.get(key), dict):
                result[key] = merged(result[key], value)
            else:
                result[key] = copy.deepcopy(value)
    return result


def matrix() -> Iterator[tuple[str, Manifest]]:
    """Every combination of the axes, and every batch service, by name."""
    for choices in itertools.product(*(axis.items() for axis in AXES.values())):
        yield "-".join(name for name, _ in choices), merged(*(values for _, values in choices))
    for name, batch in BATCHES.items():
        values = {"batch": {"enabled": True, "engines": ["http://llm:8000/v1"], **batch}}
        for monitoring, watched in AXES["monitoring"].items():
            yield f"batch-{name}-{monitoring}", merged(values, watched)


def helm(
    *arguments: str, values: Mapping[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run helm; values go in by standard input, and a registry is always named."""
    given = merged({"image": {"registry": REGISTRY}}, values or {})
    return subprocess.run(
        [HELM, *arguments, "--values", "-"],
        input=yaml.safe_dump(given),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def render(
    values: Mapping[str, Any] | None = None, *options: str, release: str = "aqua"
) -> list[Manifest]:
    """The objects of a release; `AssertionError` with helm's words where it refuses."""
    done = helm("template", release, str(CHART), "--namespace", "gpu", *options, values=values)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def refusal(values: Mapping[str, Any], *options: str) -> str:
    """What helm says when it refuses to render."""
    done = helm("template", "aqua", str(CHART), *options, values=values)
    assert done.returncode != 0, "helm took it"
    return done.stderr


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one object of this kind and name."""
    (found,) = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["name"] == name
    ]
    return found


def the_one(manifests: list[Manifest], kind: str) -> Manifest:
    """The only object of this kind."""
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Every pod or template of one: whose it is, its metadata, its spec."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            yield name, manifest["metadata"], manifest["spec"]
        elif manifest["kind"] in {"Deployment", "StatefulSet", "Job"}:
            template = manifest["spec"]["template"]
            yield name, template["metadata"], template["spec"]


def containers(spec: Manifest) -> list[Manifest]:
    """All containers of a pod, those that come first too."""
    return [*spec.get("initContainers", []), *spec["containers"]]
