"""What `aqua place render` makes of plans is what the chart and Kubernetes take, for any plan."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from aqua_placer.budget import Budget
from aqua_placer.problem.families import generate
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.relocate.relocation import Relocation, relocate
from aqua_placer.rollout.kubernetes import RenderedPlan, render_plan
from aqua_placer.rollout.mapping import ClusterMapping
from aqua_placer.rollout.positions import positions_after
from aqua_placer.solve.placement import place
from aqua_protocol.plan import Plan
from harness.bounds import HANG_S
from harness.changed_problems import churned
from harness.chart import (
    EXAMPLES,
    HELM,
    REGISTRY,
    ROOT,
    Manifest,
    containers,
    merged,
    pods,
    refusal,
    render,
    the_one,
)
from harness.kubernetes_api import KubernetesApi
from harness.manifest_rules import Schemas, name_faults, reference_faults

SCHEMAS: Final = Schemas()
GPUS: Final = 8
PORT: Final = 8000


@functools.cache
def planned(family: str) -> tuple[Instance, Plan]:
    """A problem of 24 GPUs that has changed, and the plan that follows, with its moves."""
    problem = generate(family, 3 * GPUS, 1, server_gpus=GPUS)
    today = place(instance_from(problem), Request(), Budget(30))
    servers = [entry.server_index for entry in today.assignments]
    instance = instance_from(churned(problem, servers, 0.2, 3))
    plan, _ = relocate(instance, today, Request(), Relocation(), Budget(30))
    assert plan.moves
    return instance, plan


def mapping(instance: Instance, mode: str, *, exact: bool) -> ClusterMapping:
    names = [instance.servers.name(at) for at in range(instance.servers.count)]
    servers = {
        name: {"node": f"node-{at}", "gpus": [f"GPU-{at:02}{gpu:02}" for gpu in range(GPUS)]}
        for at, name in enumerate(names)
    }
    return ClusterMapping.model_validate(
        {
            "mode": mode,
            "namespace": "gpu",
            "defaults": {
                "image": "registry.example/vllm:1",
                "args": ["--port=8000", "--served-model-name=$(AQUA_MEMBER)"],
                "port": PORT,
                "healthPath": "/health",
                "resources": {"requests": {"cpu": "1"}},
            },
            "servers": servers if exact else {},
        }
    )


def rendered(family: str, mode: str, *, exact: bool, step: int | None = None) -> RenderedPlan:
    instance, plan = planned(family)
    return render_plan(instance, plan, mapping(instance, mode, exact=exact), step)


def faults(manifests: list[Manifest]) -> list[str]:
    found = [fault for manifest in manifests for fault in SCHEMAS.faults(manifest)]
    return [*found, *name_faults(manifests), *reference_faults(manifests, set())]


@pytest.mark.parametrize("family", ["tpmix", "tpscarce"])
@pytest.mark.parametrize(
    ("mode", "exact"),
    [("dra", False), ("dra", True), ("hostNamespaces", True), ("sidecar", False)],
)
def test_a_plan_becomes_objects_that_a_cluster_takes(family: str, mode: str, exact: bool) -> None:
    made = rendered(family, mode, exact=exact)
    manifests = render(made.values) + made.claims
    assert faults(manifests) == []
    _, plan = planned(family)
    seen: dict[str, tuple[str, list[str]]] = {}
    for who, meta, spec in pods(manifests):
        if meta["labels"]["app.kubernetes.io/component"] == "engine":
            for one in containers(spec):
                env = {entry["name"]: entry.get("value") for entry in one["env"]}
                devices = str(env["CUDA_VISIBLE_DEVICES"]).split(",")
                assert len(devices) == len(set(devices)) == GPUS, who
                seen[str(env["AQUA_MEMBER"])] = (meta["labels"]["aqua.dev/server"], devices)
    assert seen.keys() == {entry.group for entry in plan.assignments}
    for entry in plan.assignments:
        server, devices = seen[entry.group]
        assert server == entry.server.replace("/", "-")
        own = [f"GPU-{entry.server_index:02}{gpu:02}" if exact else str(gpu) for gpu in entry.gpus]
        assert devices[: len(own)] == own


def test_each_step_restarts_what_moves_and_nothing_else() -> None:
    _, plan = planned("tpmix")
    before: dict[str, Any] = {}
    claims = rendered("tpmix", "dra", exact=False, step=0).claims
    for step in range(len(plan.moves) + 1):
        made = rendered("tpmix", "dra", exact=False, step=step)
        now = {
            manifest["metadata"]["name"]: manifest["spec"]["template"]
            for manifest in render(made.values)
            if manifest["kind"] == "Deployment"
            and manifest["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"
        }
        if step:
            changed = {name for name in {*before, *now} if before.get(name) != now.get(name)}
            of = {
                entry["value"]
                for name in changed
                for template in (before.get(name), now.get(name))
                if template is not None
                for entry in template["spec"]["containers"][0]["env"]
                if entry["name"] == "AQUA_MEMBER"
            }
            assert of == {plan.moves[step - 1].group}
        before = now
        assert made.claims == claims, "a claim cannot be changed"


def test_the_upgrade_of_the_page_leaves_no_engine_in_its_place_of_before(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations" / "plans.md").read_text()
    printed = re.findall(r"^(?:\$ )?(helm upgrade .*)", page, re.MULTILINE)
    assert len(printed) == 2
    # This API runs no pods that one could wait for, and has no schemas.
    (line,) = {line.removesuffix(" --wait") for line in printed}
    command = f"{line} --install --disable-openapi-validation"
    (tmp_path / "helm").symlink_to(ROOT / "helm")
    (tmp_path / "release.yaml").write_text(yaml.safe_dump({"image": {"registry": REGISTRY}}))
    _, plan = planned("tpmix")
    with KubernetesApi() as api:
        environment = {
            **os.environ,
            "PATH": f"{HELM.parent}:{os.environ['PATH']}",
            "KUBECONFIG": str(api.write_kubeconfig(tmp_path / "kubeconfig", "aqua")),
            **{f"HELM_{name}_HOME": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")},
        }
        for step in (0, 1, len(plan.moves)):
            rendered("tpmix", "dra", exact=False, step=step).write(tmp_path / "rendered")
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=HANG_S,
                check=False,
            )
            assert done.returncode == 0, (step, done.stderr)
            places = sorted(
                (env["AQUA_MEMBER"], meta["labels"]["aqua.dev/server"])
                for _, meta, spec in pods([*api.released().values()])
                if meta["labels"]["app.kubernetes.io/component"] == "engine"
                for env in [{one["name"]: one.get("value") for one in spec["containers"][0]["env"]}]
            )
            assert places == sorted(
                (group, position.server.replace("/", "-"))
                for group, position in positions_after(plan, step).items()
            )


def test_nodes_of_a_mapping_are_kept_and_its_gpus_claimed() -> None:
    made = rendered("tpmix", "dra", exact=True)
    for server, claim in zip(made.values["servers"].values(), made.claims, strict=True):
        hostname = server["nodeSelector"]["kubernetes.io/hostname"]
        expression = claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"][0]["cel"]
        assert f"GPU-{int(hostname.removeprefix('node-')):02}00" in expression["expression"]
        assert server["resourceClaim"] == claim["metadata"]["name"]


def test_a_server_that_says_its_gpus_has_them_in_one_claim_of_the_chart() -> None:
    engine = {"role": "consumer", "image": "i", "resources": {}}
    engines = {"a": {**engine, "gpuIndices": [2]}, "b": {**engine, "gpuIndices": [0, 3]}}
    manifests = render({"servers": {"s": {"gpus": 4, "engines": engines}}})
    assert faults(manifests) == []
    (request,) = the_one(manifests, "ResourceClaim")["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 4
    visible = {
        one["name"]: {entry["name"]: entry.get("value") for entry in one["env"]}
        for _, meta, spec in pods(manifests)
        if meta["labels"]["app.kubernetes.io/component"] == "engine"
        for one in containers(spec)
    }
    told = {name: env["CUDA_VISIBLE_DEVICES"] for name, env in visible.items()}
    assert told == {"a": "2,0,1,3", "b": "0,3,1,2"}


ENGINE: Final = EXAMPLES["dra"]["servers"]["pair-0"]["engines"]["llm"]
OWN: Final = {key: value for key, value in ENGINE.items() if key != "gpus"}


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"gpus": 2, "engines": {"a": OWN}}, "servers.s.engines.a.gpuIndices is required"),
        ({"gpus": 2, "engines": {"a": {**OWN, "gpuIndices": [2]}}}, "2 is not among its 2 GPUs"),
        (
            {"gpus": 2, "engines": {n: {**OWN, "gpuIndices": [1]} for n in "ab"}},
            "engines a and b have GPU 1",
        ),
        ({"gpus": 2, "engines": {"a": {**ENGINE, "gpuIndices": [1]}}}, "leave gpus"),
        ({"engines": {"a": {**OWN, "gpuIndices": [1]}}}, "needs servers.s.gpus"),
        (
            {"gpus": 1, "visibleDevices": ["GPU-1"], "engines": {"a": OWN}},
            "servers.s has gpus and visibleDevices",
        ),
        (
            {"mode": "hostNamespaces", "gpus": 1, "engines": {"a": {**OWN, "gpuIndices": [0]}}},
            "visibleDevices is required in mode hostNamespaces",
        ),
    ],
)
def test_gpus_of_a_server_that_do_not_fit_are_refused(server: Manifest, said: str) -> None:
    assert said in refusal(merged({"servers": {"s": server}}))
