"""What holds for the objects of every release: schemas, references, Pod Security, names.

Each rule returns its faults as sentences, so that a test shows all of them at once.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from harness.chart import KUBERNETES, Manifest, containers, named, pods

MAX_NAME: Final = 63
_SERVICE_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
RESTRICTED_VOLUMES: Final = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
_KINDS: Final = {"Secret", "ConfigMap", "PersistentVolumeClaim"}
# Made by others in the cluster: Kubernetes itself, cert-manager, the operator by hand.
FOREIGN: Final = {"kube-root-ca.crt"}


class Schemas:
    """Validates objects, each content once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._models: dict[tuple[str, str], Any] = {}

    def faults(self, manifest: Manifest) -> Iterator[str]:
        """What Kubernetes, or the owner of a custom resource, would refuse or drop."""
        text = json.dumps(manifest, sort_keys=True)
        if text in self._seen:
            return
        self._seen.add(text)
        what = f"{manifest['kind']}/{manifest['metadata']['name']}"
        group = manifest["apiVersion"].partition("/")[0]
        if group in {"monitoring.coreos.com", "cert-manager.io"}:
            yield from (f"{what}: {fault}" for fault in self._custom_faults(manifest))
            return
        import kubernetes_validate

        for version in KUBERNETES:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{what} in {version}: {error.message}"

    def _custom_faults(self, manifest: Manifest) -> list[str]:
        from cloudcoil.models.cert_manager import v1 as certificates
        from cloudcoil.models.prometheus_operator import v1 as monitors
        from pydantic import ValidationError

        module = certificates if manifest["apiVersion"].startswith("cert-") else monitors
        try:
            model = getattr(module, manifest["kind"]).model_validate(manifest)
        except ValidationError as error:
            return [f"{fault['loc']}: {fault['msg']}" for fault in error.errors()]
        # What the schema does not know is not in the model.
        known = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return [f"{path} is unknown" for path in sorted(_paths(manifest) - _paths(known))]


def _paths(node: object, prefix: str = "") -> set[str]:
    if isinstance(node, dict):
        return {prefix}.union(*(_paths(value, f"{prefix}.{key}") for key, value in node.items()))
    if isinstance(node, list):
        return {prefix}.union(*(_paths(item, f"{prefix}[{at}]") for at, item in enumerate(node)))
    return {prefix}


def name_faults(manifests: list[Manifest]) -> Iterator[str]:
    """Names that are taken, or too long; labels that are no text."""
    keys = Counter((m["apiVersion"], m["kind"], m["metadata"]["name"]) for m in manifests)
    yield from (f"{key} twice" for key, count in keys.items() if count > 1)
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if len(name) > MAX_NAME:
            yield f"{name} has {len(name)} characters"
        if manifest["kind"] == "Service" and not _SERVICE_NAME.fullmatch(name):
            yield f"{name} is no name of a Service"
        if manifest["metadata"].get("namespace") is None:
            yield f"{name} has no namespace"
        for key, value in manifest["metadata"]["labels"].items():
            if not isinstance(value, str) or len(value) > MAX_NAME:
                yield f"{name}: label {key} is {value!r}"


def reference_faults(manifests: list[Manifest], given: set[str]) -> Iterator[str]:
    """What names a Secret, ConfigMap, volume claim, account, volume or pod that there is not.

    Args:
        manifests: Of a release.
        given: Names of Secrets, ConfigMaps and volume claims that its values speak of.
    """
    present = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    made = {
        m["spec"]["secretName"] for m in manifests if m["kind"] == "Certificate"
    } | {name for kind, name in present if kind in _KINDS}  # fmt: skip
    for who, _, spec in pods(manifests):
        account = spec.get("serviceAccountName")
        if account is not None and ("ServiceAccount", account) not in present:
            yield f"{who} runs as {account}, which is not there"
        for claim in spec.get("resourceClaims", []):
            if ("ResourceClaim", claim["resourceClaimName"]) not in present:
                yield f"{who} claims {claim['resourceClaimName']}, which is not there"
        for name in _sources(spec):
            if name not in made | given | FOREIGN:
                yield f"{who} reads {name}, which nobody makes"
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        claimed = {"data"} if who.startswith("StatefulSet/") else set()
        mounted = {
            mount["name"] for one in containers(spec) for mount in one.get("volumeMounts", [])
        }
        if mounted - volumes - claimed or volumes - mounted:
            yield f"{who} mounts {sorted(mounted)} of {sorted(volumes | claimed)}"
    for manifest in manifests:
        if manifest["kind"] == "Service":
            yield from _service_faults(manifest, manifests)


def _sources(spec: Manifest) -> Iterator[str]:
    for volume in spec.get("volumes", []):
        if "secret" in volume:
            yield volume["secret"]["secretName"]
        if "configMap" in volume:
            yield volume["configMap"]["name"]
        if "persistentVolumeClaim" in volume:
            yield volume["persistentVolumeClaim"]["claimName"]
    for container in containers(spec):
        for source in container.get("envFrom", []):
            yield source["secretRef"]["name"]
        for variable in container.get("env", []):
            if source := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield source["name"]


def _service_faults(service: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    name = service["metadata"]["name"]
    selector = service["spec"]["selector"].items()
    behind = [spec for _, meta, spec in pods(manifests) if selector <= meta["labels"].items()]
    if len(behind) != 1:
        yield f"Service/{name} selects {len(behind)} kinds of pods"
    for spec in behind:
        ports = {port["name"] for one in containers(spec) for port in one.get("ports", [])}
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in ports:
                yield f"Service/{name} leads to {port['targetPort']}, not among {sorted(ports)}"


def restricted_faults(who: str, spec: Manifest) -> Iterator[str]:
    """What Pod Security `restricted` refuses.

    Source: Kubernetes, "Pod Security Standards".
    """
    pod = spec.get("securityContext", {})
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{who}: {field}"
    if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield f"{who}: seccompProfile"
    for volume in spec.get("volumes", []):
        if not set(volume) - {"name"} <= RESTRICTED_VOLUMES:
            yield f"{who}: volume {volume}"
    for one in containers(spec):
        faults = _container_faults({**pod, **one.get("securityContext", {})})
        yield from (f"{who}/{one['name']}: {fault}" for fault in faults)


def _container_faults(context: Manifest) -> Iterator[str]:
    if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
        yield "may run as root"
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "privileges"
    capabilities = context.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
        yield "capabilities"


def role_of(manifests: list[Manifest], account: str) -> list[Manifest]:
    """All that a service account may do."""
    rules: list[Manifest] = []
    for manifest in manifests:
        if manifest["kind"] in {"RoleBinding", "ClusterRoleBinding"} and any(
            subject["name"] == account for subject in manifest["subjects"]
        ):
            rules += named(manifests, manifest["roleRef"]["kind"], manifest["roleRef"]["name"])[
                "rules"
            ]
    return rules
