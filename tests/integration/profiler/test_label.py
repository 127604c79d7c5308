"""`aqua-profile label` writes what a profile says into the metadata of one Kubernetes object."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import kmock
import pytest
import trustme
from kmock import ResourceInfo
from typer.testing import CliRunner

from aqua_cli import ExitCode
from aqua_profiler.cli import app
from aqua_profiler.report.files import write_profile
from aqua_profiler.report.kubernetes_api import KubernetesApi
from aqua_protocol import AquaError, ConfigError, UnavailableError
from aqua_protocol.errors import ForbiddenError, UnauthenticatedError, UnknownResourceError
from aqua_protocol.profile import ModelProfile

pytest_plugins = ("kmock._internal.pytest",)

DEPLOYMENTS: Final = kmock.resource("apps/v1/deployments")
NAME: Final = "llama"
PRODUCER: Final = ModelProfile.model_validate(
    {
        "model": "org/llama",
        "kind": "llm",
        "label": "producer",
        "spare_bytes": 38 * 10**9,
        "stable_rate_per_s": 2.5,
    }
)
CONSUMER: Final = ModelProfile.model_validate(
    {"model": "org/llama", "kind": "llm", "label": "consumer", "needed_bytes": 10**9}
)
OBJECT: Final[dict[str, Any]] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {
        "name": NAME,
        "namespace": "gpu",
        "labels": {"app": "llama", "aqua.dev/role": "unknown"},
        "annotations": {"deployment.kubernetes.io/revision": "3"},
    },
    "spec": {"template": {"metadata": {"labels": {"app": "llama"}}}},
}


@pytest.fixture
def api(kmock: kmock.KubernetesEmulator) -> KubernetesApi:
    kmock.resources[DEPLOYMENTS] = ResourceInfo(namespaced=True, verbs={"patch"})
    kmock.objects[DEPLOYMENTS, "gpu", NAME] = OBJECT
    return KubernetesApi(str(kmock.url), "gpu", "the-token")


def _metadata(server: kmock.KubernetesEmulator) -> dict[str, Any]:
    found: dict[str, Any] = dict(server.objects[DEPLOYMENTS, "gpu", NAME].raw)
    assert found["spec"] == OBJECT["spec"]  # A change there would restart the engine.
    metadata: dict[str, Any] = found["metadata"]
    return metadata


async def test_a_profile_becomes_labels_and_annotations_beside_those_of_others(
    api: KubernetesApi, kmock: kmock.KubernetesEmulator
) -> None:
    await asyncio.to_thread(api.label, PRODUCER, f"deployment/{NAME}")
    metadata = _metadata(kmock)
    assert metadata["labels"] == {
        "app": "llama",
        "aqua.dev/role": "producer",
        "aqua.dev/model": "llama",
    }
    assert metadata["annotations"]["aqua.dev/spare-bytes"] == "38000000000"
    assert metadata["annotations"]["deployment.kubernetes.io/revision"] == "3"
    (request,) = kmock["patch"]
    assert request.headers["Authorization"] == "Bearer the-token"
    assert request.headers["Content-Type"] == "application/merge-patch+json"
    assert request.params["fieldManager"] == "aqua-profiler"
    assert len(kmock) == 1  # One call, of the one verb that the role allows.


async def test_what_an_earlier_profile_said_and_the_next_does_not_is_taken_out(
    api: KubernetesApi, kmock: kmock.KubernetesEmulator
) -> None:
    await asyncio.to_thread(api.label, PRODUCER, f"deployment/{NAME}")
    await asyncio.to_thread(api.label, CONSUMER, f"deployment/{NAME}")
    metadata = _metadata(kmock)
    assert metadata["labels"]["aqua.dev/role"] == "consumer"
    assert metadata["annotations"]["aqua.dev/needed-bytes"] == "1000000000"
    assert "aqua.dev/stable-rate-per-s" not in metadata["annotations"]


async def test_an_object_that_is_not_there_is_said_by_name(api: KubernetesApi) -> None:
    with pytest.raises(UnknownResourceError, match="deployment/other in gpu"):
        await asyncio.to_thread(api.label, PRODUCER, "deployment/other")


@pytest.mark.parametrize(
    ("status", "expected", "remedy"),
    [
        (401, UnauthenticatedError, "token"),
        (403, ForbiddenError, r"Grant `patch` on deployments of apps, resourceNames \[llama\]"),
        (429, UnavailableError, "again"),
        (503, UnavailableError, "again"),
        (422, ConfigError, "says"),
    ],
)
async def test_refusals_are_typed_and_say_the_next_step(
    status: int,
    expected: type[AquaError],
    remedy: str,
    api: KubernetesApi,
    kmock: kmock.KubernetesEmulator,
) -> None:
    body = {"kind": "Status", "message": "not for you"}
    kmock["patch"] << status << body
    with pytest.raises(expected, match="not for you") as raised:
        await asyncio.to_thread(api.label, PRODUCER, f"deployment/{NAME}")
    assert re.search(remedy, raised.value.remedy)


def test_nothing_but_kinds_that_are_known_is_labelled() -> None:
    for target in ("llama", "pod/llama", "deployment/", "deployment/a/b", "deployment/../x/y"):
        with pytest.raises(ConfigError, match="nothing to label"):
            KubernetesApi("http://127.0.0.1:9", "gpu").label(PRODUCER, target)


def test_no_api_server_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match=r"no answer from http://127\.0\.0\.1:9"):
        KubernetesApi("http://127.0.0.1:9", "gpu").label(PRODUCER, "deployment/llama")


@pytest.fixture
def service_account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("of-the-pod\n")
    (tmp_path / "namespace").write_text("gpu")
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    return tmp_path


@pytest.mark.parametrize(
    ("host", "url"), [("10.0.0.1", "https://10.0.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")]
)
def test_a_pod_finds_its_api_server_where_the_kubelet_says(
    host: str, url: str, service_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    api = KubernetesApi.from_pod(service_account)
    assert (api.url, api.namespace) == (url, "gpu")


def test_outside_of_a_pod_the_way_in_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        KubernetesApi.from_pod(tmp_path)
    assert "kubectl proxy" in raised.value.remedy


async def test_the_command_labels_and_says_so(
    api: KubernetesApi, kmock: kmock.KubernetesEmulator, tmp_path: Path
) -> None:
    write_profile(PRODUCER, tmp_path / "profile.json")
    arguments = ["label", str(tmp_path / "profile.json"), f"deployment/{NAME}", "--json"]
    arguments += ["--namespace", "gpu", "--api-url", api.url]
    invoke: Callable[..., Any] = CliRunner().invoke
    result = await asyncio.to_thread(invoke, app, arguments)
    assert result.exit_code == ExitCode.DONE, result.output
    assert json.loads(result.stdout)["metadata"]["labels"]["aqua.dev/role"] == "producer"
    assert _metadata(kmock)["labels"]["aqua.dev/role"] == "producer"
