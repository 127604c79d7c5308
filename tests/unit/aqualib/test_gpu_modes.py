"""GPUs that are shared in ways that lending must know of: said, and refused where it would harm."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aqua_protocol import ConfigError
from aqua_protocol.findings import FindingLevel
from aqualib import doctor, gpu_modes
from aqualib.producer.escalation import Escalation
from aqualib.topology import TOPOLOGY_FILE_VARIABLE
from harness.cuda.stand_in import stand_in
from harness.gpu_scenarios import SLAB
from harness.producers import lending


class NvmlError(Exception):
    pass


def nvml(modes: dict[str, int | None]) -> SimpleNamespace:
    """As much of pynvml as is asked; None is a GPU without the mode."""

    def mode(uuid: str) -> tuple[int, int]:
        found = modes[uuid]
        if found is None:
            raise NvmlError
        return found, 0

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580",
        nvmlDeviceGetCount=lambda: len(modes),
        nvmlDeviceGetHandleByIndex=lambda index: list(modes)[index],
        nvmlDeviceGetUUID=lambda uuid: uuid,
        nvmlDeviceGetMigMode=mode,
    )


def test_slices_are_found_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOPOLOGY_FILE_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml({"GPU-a": 0, "GPU-b": 1, "GPU-c": None}))
    assert gpu_modes.gpus_in_slices() == ["GPU-b"]
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    found = {each.check: each for each in doctor.probe_machine()}
    assert found["MIG"].level is FindingLevel.WARN
    assert "GPU-b" in found["MIG"].message


@pytest.mark.parametrize("module", [None, nvml({})])
def test_a_machine_without_nvml_or_gpus_has_no_slices(
    monkeypatch: pytest.MonkeyPatch, module: object
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert gpu_modes.gpus_in_slices() == []


def test_kills_are_refused_where_they_would_end_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(gpu_modes.MPS_DIRECTORY_VARIABLE, str(tmp_path))
    assert not gpu_modes.is_under_mps()
    (tmp_path / "control").touch()
    assert gpu_modes.is_under_mps()
    assert "MPS" in {each.check for each in doctor.probe_machine()}
    with stand_in() as standing:
        options = {"transport": standing.transport(), "slab_bytes": SLAB}
        with (
            pytest.raises(ConfigError, match="under MPS") as refusal,
            lending(None, 1, policy=Escalation.KILL, **options),
        ):
            pass
        assert "wait" in refusal.value.remedy
        with lending(None, 1, **options) as producer:
            assert producer.slab_bytes == SLAB
    with lending(None, 1, policy=Escalation.KILL) as producer:
        assert producer.slab_bytes, "host memory has no contexts to share"
