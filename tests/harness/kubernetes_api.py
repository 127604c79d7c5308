"""As much of a Kubernetes API as a real helm needs to install, upgrade, roll back and uninstall.

Objects are kept as they are sent; nothing schedules or runs them. What a cluster would refuse is
refused: a second object of a name, a change of a field that cannot change. Server-side apply
replaces what was applied before, which is what it does for a field manager that is the only one.
"""

from __future__ import annotations

import re
import threading
import uuid
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

import yaml

from harness.scripted_server import Answer, Request, ScriptedServer

Object = dict[str, Any]

KUBERNETES: Final = "v1.34.0"
KINDS: Final[dict[str, dict[str, str]]] = {
    "v1": {
        "configmaps": "ConfigMap",
        "namespaces": "Namespace",
        "pods": "Pod",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "rbac.authorization.k8s.io/v1": {"rolebindings": "RoleBinding", "roles": "Role"},
    "resource.k8s.io/v1": {"resourceclaims": "ResourceClaim"},
}
"""Kinds by API and plural name: those of a release."""

IMMUTABLE: Final[dict[str, tuple[str, ...]]] = {
    "Deployment": ("spec.selector",),
    "StatefulSet": ("spec.selector", "spec.serviceName", "spec.volumeClaimTemplates"),
    "ResourceClaim": ("spec",),
    "Job": ("spec.template", "spec.selector"),
    "RoleBinding": ("roleRef",),
    "PersistentVolumeClaim": ("spec",),
}
"""Fixed once an object is made: the API refuses another value."""

PROTOBUF: Final = b"k8s\0"
"""Fixed by Kubernetes: how a body in protobuf begins."""

_PATH: Final = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?"
)


def at(manifest: Object, path: str) -> Any:  # noqa: ANN401 - whatever is there
    """What an object has at a path of names; None where it has nothing."""
    node: Any = manifest
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


class KubernetesApi:
    """Serves on loopback while entered.

    Attributes:
        objects: By kind and name; Secrets of helm's own among them.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self._lock = threading.Lock()
        self._version = 0
        self._server = ScriptedServer(self._respond)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def write_kubeconfig(self, path: Path, namespace: str) -> Path:
        """Write what lets helm and kubectl find this."""
        cluster = {"server": self._server.url}
        context = {"cluster": "here", "user": "me", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "here", "context": context}],
            "current-context": "here",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def released(self) -> dict[tuple[str, str], Object]:
        """The objects of releases, without what helm keeps for itself."""
        return {
            key: one
            for key, one in self.objects.items()
            if one.get("type") != "helm.sh/release.v1" and key[0] != "Namespace"
        }

    # --- What a request does --------------------------------------------------------------

    def _respond(self, request: Request) -> Answer:
        body = _read(request.content) if request.method != "DELETE" else None
        return Answer(*self._answer(request.method, request.path, body))

    def _answer(self, method: str, target: str, body: Object | None) -> tuple[int, Object]:
        url = urlsplit(target)
        if method == "GET" and (found := _discovery(url.path)) is not None:
            return 200, found
        parts = _PATH.fullmatch(url.path)
        api = parts and (parts["core"] or parts["group"])
        if parts is None or parts["plural"] not in KINDS.get(str(api), {}):
            return _refusal(404, "NotFound", f"the server has no {url.path}")
        kind = KINDS[str(api)][parts["plural"]]
        name = parts["name"] or (body or {}).get("metadata", {}).get("name")
        with self._lock:
            if method == "GET" and parts["name"] is None:
                selector = parse_qs(url.query).get("labelSelector", [""])[0]
                items = [*self._selected(kind, selector)]
                return 200, {"apiVersion": api, "kind": f"{kind}List", "items": items}
            return self._change(method, (kind, str(name)), body, str(api), parts["namespace"])

    def _selected(self, kind: str, selector: str) -> Iterator[Object]:
        wanted = [pair.split("=", 1) for pair in selector.split(",") if "=" in pair]
        for (of, _), one in self.objects.items():
            labels = one["metadata"].get("labels", {})
            if of == kind and all(labels.get(name) == value for name, value in wanted):
                yield one

    def _change(
        self,
        method: str,
        key: tuple[str, str],
        body: Object | None,
        api: str,
        namespace: str | None,
    ) -> tuple[int, Object]:
        known = self.objects.get(key)
        if method == "POST" and known is not None:
            return _refusal(409, "AlreadyExists", f"{key} already exists")
        if method in {"GET", "PUT", "DELETE"} and known is None:
            return _refusal(404, "NotFound", f"{key} not found")
        if method == "DELETE":
            del self.objects[key]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        if method == "GET":
            assert known is not None
            return 200, known
        assert body is not None, f"{method} {key} has no body"
        if known is not None and (fixed := _fixed(known, body)):
            return _refusal(422, "Invalid", f"{key}: {', '.join(fixed)}: field is immutable")
        self._version += 1
        about = {
            **body["metadata"],
            "uid": known["metadata"]["uid"] if known else str(uuid.uuid4()),
            "resourceVersion": str(self._version),
        }
        if namespace is not None:
            about["namespace"] = namespace
        self.objects[key] = {**body, "apiVersion": api, "kind": key[0], "metadata": about}
        return 201 if known is None else 200, self.objects[key]


def _read(raw: bytes) -> Object | None:
    """What was sent: YAML, of which JSON is a part, or helm's own Secrets as protobuf."""
    if not raw.startswith(PROTOBUF):
        body: Object | None = yaml.safe_load(raw) if raw else None
        return body
    # Numbers of fields: k8s.io/apimachinery runtime `Unknown`, k8s.io/api/core/v1 `Secret`.
    envelope = _fields(raw.removeprefix(PROTOBUF))
    secret = _fields(envelope[2][0])
    about = _fields(secret[1][0])
    return {
        "metadata": {
            "name": about[1][0].decode(),
            "labels": {key: value.decode() for key, value in _map(about[11]).items()},
        },
        "type": secret[3][0].decode(),
        "data": {key: b64encode(value).decode() for key, value in _map(secret[2]).items()},
    }


def _map(entries: list[bytes]) -> dict[str, bytes]:
    pairs = [_fields(entry) for entry in entries]
    return {pair[1][0].decode(): pair[2][0] for pair in pairs}


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """The fields of a protobuf message that are bytes, text or messages; numbers are left out."""
    found: defaultdict[int, list[bytes]] = defaultdict(list)
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = number()
        assert key & 7 in {0, 2}, f"field {key >> 3} is of a kind that no Secret has"
        size = number()
        if key & 7:
            found[key >> 3].append(message[place : place + size])
            place += size
    return found


def _fixed(known: Object, body: Object) -> list[str]:
    paths = IMMUTABLE.get(known["kind"], ())
    return [path for path in paths if at(known, path) != at(body, path)]


def _refusal(code: int, reason: str, message: str) -> tuple[int, Object]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
    return code, {**status, "code": code, "reason": reason, "message": message}


def _discovery(path: str) -> Object | None:
    """What the server has, as clients ask first."""
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": KUBERNETES}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    groups = [api for api in KINDS if "/" in api]
    if path == "/apis":
        listed = []
        for api in groups:
            version = {"groupVersion": api, "version": api.partition("/")[2]}
            listed.append(
                {
                    "name": api.partition("/")[0],
                    "versions": [version],
                    "preferredVersion": version,
                }
            )
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    api = path.removeprefix("/apis/").removeprefix("/api/")
    if api not in KINDS:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "kind": kind,
            "namespaced": kind != "Namespace",
            "verbs": verbs,
        }
        for plural, kind in KINDS[api].items()
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": api,
        "resources": resources,
    }
