"""Selects the transport that this process uses: the one asked for, or the best that works here.

A transport that was named and cannot work is an error that says what to do; nothing is silently
replaced by something slower. Modules of transports are imported when they are tried, so that a
machine without a driver loses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aqua_protocol import TransportKind, TransportUnavailableError

if TYPE_CHECKING:
    import torch

    from aqualib.transports.base import Transport

PREFERENCE: Final = (TransportKind.CUDA_VMM, TransportKind.CUDA_IPC, TransportKind.MEMFD)
"""Best first. VMM handles free memory by reference count and need no shared namespaces; legacy IPC
handles are for drivers and containers without it; host memory is for machines without a GPU."""


def select(kind: TransportKind | None = None, device: str | None = None) -> Transport:
    """The transport to use, checked.

    Args:
        kind: The only one acceptable, or None for the best that works on `device`.
        device: Where this side's tensors shall live (`cuda:1`, `cpu`), or None for the
            transport's own default: the current CUDA device, or the CPU.

    Raises:
        TransportUnavailableError: What was asked for cannot work here; says why and what to do.
    """
    refusals: list[TransportUnavailableError] = []
    for candidate in PREFERENCE if kind is None else (kind,):
        try:
            transport = _make(candidate, device)
            transport.check()
        except TransportUnavailableError as refusal:
            refusals.append(refusal)
        else:
            return transport
    if len(refusals) == 1:
        raise refusals[0]
    raise TransportUnavailableError(
        f"no transport works here for device {device or 'default'}: "
        + "; ".join(refusal.message for refusal in refusals),
        remedy=" ".join(dict.fromkeys(refusal.remedy for refusal in refusals)),
    )


def _make(kind: TransportKind, device: str | None) -> Transport:
    match kind:
        case TransportKind.MEMFD:
            if device is not None and not device.startswith("cpu"):
                raise TransportUnavailableError(
                    f"memfd slabs are CPU tensors, not tensors on {device}",
                    remedy="Use device cpu with memfd, or a CUDA transport with a GPU.",
                )
            from aqualib.transports.memfd import MemfdTransport

            return MemfdTransport()
        case TransportKind.CUDA_VMM:
            from aqualib.transports.cuda_vmm import CudaVmmTransport

            return CudaVmmTransport(_gpu(kind, device))
        case TransportKind.CUDA_IPC:
            from aqualib.transports.cuda_ipc import CudaIpcTransport

            return CudaIpcTransport(_gpu(kind, device))


def _gpu(kind: TransportKind, device: str | None) -> torch.device:
    """The GPU that `device` names, with its number; None is torch's current one."""
    import torch

    if device is not None and not device.startswith("cuda"):
        raise TransportUnavailableError(
            f"{kind.value} slabs are on a GPU, not on {device}", remedy="Name a device like cuda:0."
        )
    if torch.version.cuda is None:
        raise TransportUnavailableError(
            f"{kind.value} needs torch with CUDA, this is torch {torch.__version__}",
            remedy="Install a CUDA build of torch, or use the memfd transport.",
        )
    if not torch.cuda.is_available():
        raise TransportUnavailableError(
            f"{kind.value} needs a GPU, and torch sees none",
            remedy="Check `nvidia-smi`, CUDA_VISIBLE_DEVICES and the container's GPU access, or "
            "use the memfd transport.",
        )
    if device is None or device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise TransportUnavailableError(
            f"{device!r} is not a device", remedy="Name one like cuda:0."
        ) from error
