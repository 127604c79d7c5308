"""Every combination of values renders to what a cluster takes, and to what Aqua means by it."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from harness.chart import (
    AXES,
    CHART,
    EXAMPLES,
    HELM,
    ROOT,
    Manifest,
    containers,
    helm,
    matrix,
    named,
    pods,
    render,
    the_one,
)
from harness.manifest_rules import (
    Schemas,
    name_faults,
    reference_faults,
    restricted_faults,
    role_of,
)

SCHEMAS: Final = Schemas()
COMBINATIONS: Final = dict(matrix())


def _given(values: object) -> set[str]:
    """Every text of the values: names of Secrets and ConfigMaps are among them."""
    if isinstance(values, dict):
        return set().union(*(_given(value) for value in values.values()))
    if isinstance(values, list):
        return set().union(*(_given(value) for value in values))
    return {values} if isinstance(values, str) else set()


@pytest.mark.parametrize("name", [*COMBINATIONS])
def test_every_combination_of_values_is_one_that_a_cluster_takes(name: str) -> None:
    manifests = render(COMBINATIONS[name])
    faults = [fault for manifest in manifests for fault in SCHEMAS.faults(manifest)]
    faults += name_faults(manifests)
    faults += reference_faults(manifests, _given(COMBINATIONS[name]))
    for who, meta, spec in pods(manifests):
        if meta["labels"]["app.kubernetes.io/component"] != "engine" or "sidecar" in name:
            faults += restricted_faults(who, spec)
    assert faults == []


@pytest.mark.parametrize("example", ["default", *EXAMPLES])
def test_lint_is_strict_and_finds_nothing(example: str) -> None:
    done = helm("lint", str(CHART), "--strict", values=EXAMPLES.get(example))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


def test_a_release_named_y_or_like_a_number_has_labels_of_text() -> None:
    for release in ("y", "1e3", "null", "0x1f", "1.5", "gpu.pool", "1.aqua"):
        manifests = render(EXAMPLES["dra"], release=release)
        assert [*name_faults(manifests)] == []
        for _, meta, _ in pods(manifests):
            assert meta["labels"]["app.kubernetes.io/instance"] == release


def test_the_longest_names_stay_within_what_kubernetes_takes() -> None:
    engines = {"engine-long": EXAMPLES["dra"]["servers"]["pair-0"]["engines"]["llm"]}
    jobs = {"sixteen-letters0": EXAMPLES["production"]["profiler"]["jobs"]["llama"]}
    values = {
        "servers": {"a-server-of-20-chars": {"engines": engines}},
        "profiler": {"jobs": jobs},
    }
    manifests = render(values, release="a-release-of-fifty-three-characters-the-most-of-helm0")
    assert [*name_faults(manifests)] == []
    assert [*reference_faults(manifests, _given(values))] == []


def _egress_ports(manifests: list[Manifest], component: str) -> set[int]:
    policy = named(manifests, "NetworkPolicy", f"aqua-{component}")
    return {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}


@pytest.mark.parametrize(
    ("external", "ports"),
    [
        ({"host": "redis.internal", "port": 16379}, {16379}),
        ({"host": "[fd00::1]", "port": 6379}, {6379}),
        (
            {"sentinel": {"hosts": ["one:5000", "two", "[fd00::1]:5001"], "service": "m"}},
            {5000, 26379, 5001},
        ),
    ],
)
def test_a_coordinator_may_reach_the_redis_that_its_values_name(
    external: Manifest, ports: set[int]
) -> None:
    values = {
        "redis": {"bundled": {"enabled": False}, "external": external},
        "networkPolicy": {"redisPorts": [7000]},
    }
    assert _egress_ports(render(values), "coordinator") == {53, 7000, *ports}


def test_on_openshift_names_are_asked_for_at_the_port_of_its_dns_pods() -> None:
    batch = {"batch": {"enabled": True, "engines": ["http://llm:8000/v1"]}}
    for mode, expected in (("always", True), ("never", False)):
        manifests = render({**batch, "openshift": {"mode": mode}})
        for component in ("coordinator", "batch"):
            assert (5353 in _egress_ports(manifests, component)) is expected


def test_openshift_draws_users_and_groups_itself() -> None:
    for manifests in (
        render({}, "--api-versions", "security.openshift.io/v1"),
        render({"openshift": {"mode": "always"}}),
    ):
        for who, _, spec in pods(manifests):
            assert not {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys(), who
            assert [*restricted_faults(who, spec)] == []


def test_without_the_prometheus_operator_there_are_no_monitors_and_with_it_there_are() -> None:
    kinds = {manifest["kind"] for manifest in render(EXAMPLES["dra"])}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    kinds = {
        manifest["kind"]
        for manifest in render(EXAMPLES["dra"], "--api-versions", "monitoring.coreos.com/v1")
    }
    assert {"ServiceMonitor", "PodMonitor"} <= kinds


def test_a_profiler_job_may_patch_the_one_object_that_it_labels_and_nothing_else() -> None:
    manifests = render(EXAMPLES["production"])
    (job,) = [
        (who, spec)
        for who, meta, spec in pods(manifests)
        if meta["labels"]["app.kubernetes.io/component"] == "profile"
    ]
    assert role_of(manifests, job[1]["serviceAccountName"]) == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments"],
            "resourceNames": ["aqua-pair-0-llm"],
            "verbs": ["patch"],
        }
    ]
    # The load generator, which parses what an engine answers, has no token of the API.
    holders = [
        one["name"]
        for one in containers(job[1])
        if any("serviceaccount" in mount["mountPath"] for mount in one["volumeMounts"])
    ]
    assert holders == ["label"]


def test_no_other_pod_has_a_token_of_the_kubernetes_api() -> None:
    manifests = render(EXAMPLES["production"] | EXAMPLES["dra"])
    for who, _, spec in pods(manifests):
        assert spec["automountServiceAccountToken"] is False, who
    roles = [manifest for manifest in manifests if "Role" in manifest["kind"]]
    assert not [role for role in roles if role["kind"].startswith("Cluster")]


def test_a_job_is_another_one_when_what_it_does_has_changed() -> None:
    def name_with(arguments: list[str], tag: str = "1") -> str:
        job = {"problem": {"configMap": "p", "key": "p.yaml"}, "arguments": arguments}
        values = {"placer": {"jobs": {"nightly": job}}, "image": {"tag": tag}}
        (name,) = [m["metadata"]["name"] for m in render(values) if m["kind"] == "Job"]
        return str(name)

    assert name_with([]) == name_with([])
    assert len({name_with([]), name_with(["--seed", "1"]), name_with([], tag="2")}) == 3


def _visible(manifests: list[Manifest]) -> dict[str, str]:
    return {
        one["name"]: variable["value"]
        for _, meta, spec in pods(manifests)
        if meta["labels"]["app.kubernetes.io/component"] == "engine"
        for one in spec["containers"]
        for variable in one["env"]
        if variable["name"] == "CUDA_VISIBLE_DEVICES"
    }


def test_engines_of_one_server_see_the_same_gpus_each_its_own_first() -> None:
    engine: dict[str, Any] = {"role": "producer", "image": "i", "resources": {}}
    engines = {
        "a": {**engine, "gpus": 2},
        "b": engine,
        "c": {**engine, "gpus": 3},
    }
    manifests = render({"servers": {"s": {"engines": engines}}})
    assert _visible(manifests) == {"a": "0,1,2,3,4,5", "b": "2,0,1,3,4,5", "c": "3,4,5,0,1,2"}
    claim = the_one(manifests, "ResourceClaim")
    counts = {r["name"]: r["exactly"]["count"] for r in claim["spec"]["devices"]["requests"]}
    assert counts == {"a": 2, "b": 1, "c": 3}


def test_a_plan_that_says_which_gpus_is_kept_by_claim_and_by_cuda() -> None:
    engines = {
        name: {"role": "consumer", "image": "i", "resources": {}, "visibleDevices": [f"GPU-{name}"]}
        for name in ("a", "b")
    }
    manifests = render({"servers": {"s": {"engines": engines}}})
    assert _visible(manifests) == {"a": "GPU-a,GPU-b", "b": "GPU-b,GPU-a"}
    requests = the_one(manifests, "ResourceClaim")["spec"]["devices"]["requests"]
    assert [r["exactly"]["selectors"][0]["cel"]["expression"] for r in requests] == [
        f"device.attributes['gpu.nvidia.com'].uuid in ['GPU-{name}']" for name in ("a", "b")
    ]


def test_engines_of_one_server_meet_in_one_directory_and_those_of_others_do_not() -> None:
    pair = EXAMPLES["dra"]["servers"]["pair-0"]
    manifests = render({"servers": {"one": pair, "two": pair}})
    directories: dict[str, set[str]] = {}
    for _, meta, spec in pods(manifests):
        if server := meta["labels"].get("aqua.dev/server"):
            (path,) = [v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v]
            directories.setdefault(server, set()).add(path)
    assert directories == {"one": {"/run/aqua/gpu.aqua.one"}, "two": {"/run/aqua/gpu.aqua.two"}}


def test_a_user_other_than_root_gets_a_directory_of_its_own() -> None:
    pair = {**EXAMPLES["dra"]["servers"]["pair-0"], "runAsUser": 10001}
    manifests = render({"servers": {"pair": pair}})
    spec = named(manifests, "Deployment", "aqua-pair-llm")["spec"]["template"]["spec"]
    (prepare,) = spec["initContainers"]
    assert prepare["command"] == [
        "install", "--directory", "--mode=0700", "--owner=10001", "--group=10001", "/run/aqua",
    ]  # fmt: skip
    assert spec["securityContext"]["runAsUser"] == 10001


def test_rules_and_dashboards_are_those_of_deploy_whole() -> None:
    manifests = render(AXES["monitoring"]["on"])
    (rule,) = [manifest for manifest in manifests if manifest["kind"] == "PrometheusRule"]
    files = sorted((ROOT / "deploy" / "prometheus").glob("*.yaml"))
    groups = [g for path in files for g in yaml.safe_load(path.read_text()).get("groups", [])]
    assert sorted(group["name"] for group in groups)
    by_name = {group["name"]: group for group in rule["spec"]["groups"]}
    assert by_name == {group["name"]: group for group in groups}
    carried = {
        name: content
        for manifest in manifests
        if manifest["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, content in manifest["data"].items()
    }
    dashboards = (ROOT / "deploy" / "grafana").glob("*.json")
    assert carried == {path.name: path.read_text() for path in dashboards}
    assert carried


def test_a_package_carries_rules_and_dashboards_and_nothing_else_of_deploy(tmp_path: Path) -> None:
    subprocess.run(
        [HELM, "package", CHART, "--destination", tmp_path], check=True, capture_output=True
    )
    (package,) = tmp_path.glob("aqua-*.tgz")
    with tarfile.open(package) as tarball:
        carried = {name.removeprefix("aqua/files/deploy/") for name in tarball.getnames()}
    assert "prometheus/alert-rules.yaml" in carried
    assert "grafana/aqua-overview.json" in carried
    assert not [name for name in carried if name.endswith(".py") or "compose" in name]
