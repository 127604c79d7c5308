"""A plan as values of the chart `helm/aqua`, and the ResourceClaims that its servers need.

Each server of the plan is one of the chart's `servers`, each group an engine there. A server's
claim covers all of its GPUs, and each engine sees all of them, its own first: so the claim and the
other engines stay as they are when one comes or goes, and a step of a re-placement restarts only
what moves. A claim cannot be changed once it is made; its name carries what it asks for, so another
request is another claim. Engines report under their group's name (`AQUA_MEMBER`), which is what the
plan's matches and drift go by.

Nothing is written here about the plan's matches: `aqua place push` sends those.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from aqua_cli import write_text
from aqua_placer.errors import DomainTooLargeError, MappingInvalidError, PlanInvalidError
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.rollout.mapping import ClusterMapping
from aqua_placer.rollout.positions import Position, positions_after
from aqua_protocol.plan import Plan

MAX_CLAIM_DEVICES: Final = 32
"""Fixed by Kubernetes: `AllocationResultsMaxSize` of a ResourceClaim."""

# Characters; fixed by the chart, whose objects are called by both.
SERVER_NAME_LENGTH: Final = 20
ENGINE_NAME_LENGTH: Final = 11

DIGEST_LENGTH: Final = 5
"""Characters by which shortened names differ: a million values. Doubled, less of a name is left."""

DEVICE_CLASS: Final = "gpu.nvidia.com"


@dataclass(frozen=True)
class RenderedPlan:
    """What Kubernetes is told: values of the chart, and claims as objects of their own."""

    values: dict[str, Any]
    claims: list[dict[str, Any]]
    title: str

    def write(self, folder: Path) -> list[Path]:
        """Write `values.yaml` and `resourceclaims.yaml`; returns both paths.

        Raises:
            ConfigError: The folder cannot be written to.
        """
        folder.mkdir(parents=True, exist_ok=True)
        values, claims = folder / "values.yaml", folder / "resourceclaims.yaml"
        head = f"# {self.title}\n# Made by `aqua place render`; do not edit.\n"
        write_text(claims, head + yaml.safe_dump_all(self.claims, sort_keys=False, width=100))
        write_text(values, head + yaml.safe_dump(self.values, sort_keys=False, width=100))
        return [values, claims]


def render_plan(
    instance: Instance, plan: Plan, mapping: ClusterMapping, step_count: int | None = None
) -> RenderedPlan:
    """Values and claims of a plan, or of the state after its first `step_count` moves.

    Raises:
        MappingIncompleteError: Names all that the mapping does not say.
        PlanInvalidError: There are no such steps, or the plan is for another cluster.
        DomainTooLargeError: A server has more GPUs than one claim can have.
    """
    positions = positions_after(plan, step_count)
    numbers = {instance.servers.name(at): at for at in range(instance.servers.count)}
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for group, position in sorted(positions.items()):
        if position.server not in numbers:
            raise PlanInvalidError(
                f"the plan puts {group!r} on {position.server}, which this problem does not have",
                remedy="Give the problem that it was solved from.",
            )
        groups[position.server].append(group)
    used = sorted(groups, key=numbers.__getitem__)
    capacity: list[int] = instance.servers.capacity.tolist()
    mapping.require(sorted(positions), ((name, capacity[numbers[name]]) for name in used))
    names = _short_names(used, SERVER_NAME_LENGTH)
    values: dict[str, Any] = {}
    claims: list[dict[str, Any]] = []
    for server in used:
        number = numbers[server]
        told = mapping.server(server)
        engines = _short_names(groups[server], ENGINE_NAME_LENGTH)
        entry: dict[str, Any] = (
            {"visibleDevices": told.gpus} if told.gpus else {"gpus": capacity[number]}
        )
        if mapping.mode != "hostNamespaces":
            claim = _claim(server, names[server], capacity[number], mapping)
            claims.append(claim)
            entry["resourceClaim"] = claim["metadata"]["name"]
        spec = told.model_dump(by_alias=True, exclude_none=True, exclude={"node", "gpus"})
        for key in ("deviceClassName", "constraints"):  # They are in the claim.
            spec.pop(key, None)
        if told.node is not None:
            hostname = {"kubernetes.io/hostname": told.node}
            spec["nodeSelector"] = spec.get("nodeSelector", {}) | hostname
        sizes = _sizes(instance, number, groups[server])
        entry |= spec
        entry["engines"] = {
            engines[group]: _engine(group, positions[group], sizes.get(group), mapping)
            for group in groups[server]
        }
        values[names[server]] = entry
    steps = len(plan.moves) if step_count is None else step_count
    at = f", after step {steps} of {len(plan.moves)}" if plan.moves else ""
    title = f"Plan {plan.plan_hash[:12]} of {plan.problem or plan.problem_hash[:12]}{at}."
    return RenderedPlan({"ipc": {"mode": mapping.mode}, "servers": values}, claims, title)


def _engine(
    group: str, position: Position, size_gb: float | None, mapping: ClusterMapping
) -> dict[str, Any]:
    """One engine of the chart; `size_gb` is spare (> 0) or need, None for a group that leaves."""
    told = mapping.engine(group).model_dump(by_alias=True, exclude_none=True)
    plan_env = {"AQUA_MEMBER": group}
    role = "none"
    if size_gb is not None and abs(size_gb) > GRAIN_GB / 2:
        role = "producer" if size_gb > 0 else "consumer"
    if size_gb is not None and role == "consumer":
        plan_env["AQUA_WANTED_BYTES"] = str(round(-size_gb * 1e9))
    own = told.pop("env", [])
    given = {entry.get("name") for entry in own}
    env = [{"name": name, "value": value} for name, value in plan_env.items() if name not in given]
    engine = {"role": role, "gpuIndices": list(position.gpus), **told, "env": [*env, *own]}
    engine.setdefault("resources", {})
    return engine


def _sizes(instance: Instance, server: int, groups: Iterable[str]) -> Mapping[str, float]:
    """Spare or need per shard of the groups that the problem has, on this server's GPUs."""
    numbers = {name: number for number, name in enumerate(instance.names)}
    kind = int(instance.servers.class_of[server])
    return {
        group: float(instance.r_gb[numbers[group], kind]) for group in groups if group in numbers
    }


def _claim(server: str, name: str, gpu_count: int, mapping: ClusterMapping) -> dict[str, Any]:
    """All GPUs of a server as one claim, named by what it asks for."""
    if gpu_count > MAX_CLAIM_DEVICES:
        raise DomainTooLargeError(
            f"server {server} has {gpu_count} GPUs, a ResourceClaim holds {MAX_CLAIM_DEVICES}",
            remedy="Memory is lent within one node: make each node a server of the problem, and "
            "solve again.",
        )
    told = mapping.server(server)
    exactly: dict[str, Any] = {
        "deviceClassName": told.device_class_name or DEVICE_CLASS,
        "allocationMode": "ExactCount",
        "count": gpu_count,
    }
    if told.gpus:
        listed = ", ".join(f"'{uuid}'" for uuid in told.gpus)
        expression = f"device.attributes['gpu.nvidia.com'].uuid in [{listed}]"
        exactly["selectors"] = [{"cel": {"expression": expression}}]
    devices: dict[str, Any] = {"requests": [{"name": "gpus", "exactly": exactly}]}
    if told.constraints:
        devices["constraints"] = told.constraints
    metadata: dict[str, Any] = {"name": f"aqua-{name}-{_digest(devices)}"}
    if mapping.namespace is not None:
        metadata["namespace"] = mapping.namespace
    metadata["labels"] = {"app.kubernetes.io/part-of": "aqua", "aqua.dev/server": name}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": metadata,
        "spec": {"devices": devices},
    }


def _short_names(names: Iterable[str], length: int) -> dict[str, str]:
    """Names as the chart takes them, readable where they fit; the same in every plan.

    Raises:
        MappingInvalidError: Two of them come out alike.
    """
    short: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        if not plain[:1].isalpha():
            plain = f"x{plain}"
        if plain != name.replace("/", "-").replace(".", "-") or len(plain) > length:
            plain = f"{plain[: length - DIGEST_LENGTH - 1].rstrip('-')}-{_digest(name)}"
        if plain in short.values():
            rival = next(other for other, taken in short.items() if taken == plain)
            raise MappingInvalidError(
                f"{rival!r} and {name!r} would both be called {plain!r}",
                remedy="Rename one of them in the problem.",
            )
        short[name] = plain
    return short


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
