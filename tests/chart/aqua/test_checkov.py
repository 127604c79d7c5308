"""What checkov finds in a production release; each exception has its reason here."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest
import yaml

from harness.chart import EXAMPLES, ROOT, merged, render

CHECKOV: Final = ROOT / ".venv-checkov" / "bin" / "checkov"
SERVICES: Final = ("coordinator", "placer", "profiler", "batch")
DIGEST: Final = "sha256:" + "0" * 64

EVERYWHERE: Final = ("",)
ENGINES: Final = ("aqua-pair-0",)
# Check: whose failure is meant, and why.
EXCEPTIONS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "CKV_K8S_11": (EVERYWHERE, "limits throttle what must answer in milliseconds"),
    "CKV_K8S_15": (EVERYWHERE, "images are named by digest, so a pull could bring nothing else"),
    "CKV_K8S_35": (EVERYWHERE, "programs take secrets by variable, and have no child processes"),
    "CKV_K8S_43": (ENGINES, "images of engines are the user's to name, by digest or not"),
    "CKV_K8S_22": (ENGINES, "engines write compiled kernels where their images have them"),
    "CKV_K8S_23": (ENGINES, "images of engines run as root unless `runAsUser` says otherwise"),
    "CKV_K8S_40": (ENGINES, "as above"),
    "CKV_K8S_8": (("aqua-test",), "a pod that ends within seconds has no probes"),
    "CKV_K8S_9": (("aqua-test",), "as above"),
}  # fmt: skip


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of objects by the check that they failed."""
    digests = {name: {"digest": DIGEST} for name in SERVICES}
    folder = tmp_path_factory.mktemp("release")
    manifests = render(
        merged(*(EXAMPLES[name] for name in ("production", "dra", "batch")), digests)
    )
    (folder / "release.yaml").write_text(yaml.safe_dump_all(manifests))
    arguments = ["--framework", "kubernetes", "--quiet", "--compact", "--output", "json"]
    done = subprocess.run(
        [CHECKOV, "--directory", folder, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 500  # It has looked.
    assert report["summary"]["parsing_errors"] == 0
    failed: dict[str, set[str]] = defaultdict(set)
    for check in report["results"]["failed_checks"]:
        # "Deployment.gpu.aqua-placer", for pods with their labels after it.
        failed[check["check_id"]].add(".".join(check["resource"].split(".")[2:]))
    return failed


def test_checkov_finds_nothing_but_what_is_explained(failures: dict[str, set[str]]) -> None:
    def explained(check: str, name: str) -> bool:
        return check in EXCEPTIONS and name.startswith(EXCEPTIONS[check][0])

    unexplained = {
        check: found
        for check, names in failures.items()
        if (found := sorted(name for name in names if not explained(check, name)))
    }
    assert unexplained == {}


def test_no_exception_is_left_of_what_was_mended(failures: dict[str, set[str]]) -> None:
    assert set(EXCEPTIONS) == set(failures)


def test_checkov_finds_a_fault_that_is_put_in(tmp_path: Path) -> None:
    """A control: a check that cannot fail is worth nothing."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "gpu"},
        "spec": {
            "containers": [
                {"name": "c", "image": "i:latest", "securityContext": {"privileged": True}}
            ]
        },
    }
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    done = subprocess.run(
        [CHECKOV, "--file", tmp_path / "pod.yaml", "--framework", "kubernetes", "--compact"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert "CKV_K8S_16" in done.stdout
