"""What the doctor says of a machine: GPUs, transports, engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aqua_protocol import TransportKind, TransportUnavailableError
from aqua_protocol.findings import Finding, FindingLevel
from aqualib import doctor
from aqualib.topology import TOPOLOGY_FILE_VARIABLE
from aqualib.transports import selection


def findings() -> dict[str, Finding]:
    return {finding.check: finding for finding in doctor.probe_machine()}


def test_gpus_are_listed_with_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "topology.json"
    gpu = {"uuid": "GPU-1", "model": "H100", "memory_bytes": 80 << 30}
    path.write_text(json.dumps({"node": "n", "boot_id": "b", "gpus": [gpu]}))
    monkeypatch.setenv(TOPOLOGY_FILE_VARIABLE, str(path))
    found = findings()["GPUs"]
    assert found.level is FindingLevel.OK
    assert "H100" in found.message
    path.write_text("{}")
    assert findings()["GPUs"].level is FindingLevel.FAIL


def test_each_transport_says_whether_it_works_or_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def select(kind: TransportKind) -> None:
        if kind is not TransportKind.MEMFD:
            raise TransportUnavailableError("no GPU", remedy="Plug one in.")

    monkeypatch.setattr(selection, "select", select)
    found = findings()
    assert found["memfd"].level is FindingLevel.OK
    assert found["cuda_vmm"].level is FindingLevel.WARN
    assert found["cuda_ipc"].remedy == "Plug one in."


def test_without_torch_no_transport_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    assert "aqualib[torch]" in findings()["transports"].remedy


@pytest.mark.parametrize(
    ("installed", "level"), [("0.32.1", FindingLevel.OK), ("0.1.0", FindingLevel.FAIL)]
)
def test_the_engine_is_supported_or_not(
    monkeypatch: pytest.MonkeyPatch, installed: str, level: FindingLevel
) -> None:
    monkeypatch.setattr(doctor, "version", lambda _: installed)
    assert findings()["vLLM"].level is level
