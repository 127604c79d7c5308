"""The machine that the demo finds itself on: its GPUs, its cores, and how to call it."""

from __future__ import annotations

import os
import platform

import torch

from aqua_protocol import TransportKind
from aqualib.topology import place
from aqualib.transports import select


def choose_devices(kind: TransportKind | None) -> tuple[str | None, str | None]:
    """Choose devices for producer and consumer: GPUs that can lend to each other, or one for both.

    None is the transport's own default.

    Raises:
        TransportUnavailableError: The transport cannot work here; says why and what to do.
    """
    first = select(kind).device
    if first.type == "cpu":
        return None, None
    domain = place(first).domain
    for index in range(torch.cuda.device_count()):
        other = torch.device("cuda", index)
        if other != first and place(other).domain == domain:
            return str(first), str(other)
    return str(first), str(first)


def compute_threads() -> int:
    """Count threads for each model: the two run side by side, and sums depend on their split."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def describe_machine() -> str:
    """Name the hardware, for the reader of the figures."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{platform.system()} {platform.release()}, {device}, {cores} cores"
