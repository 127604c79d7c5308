"""The machine that the demo finds itself on: its GPUs, its cores, and how to call it."""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

import torch

from aqua_protocol import TransportKind
from aqualib.topology import place
from aqualib.transports import select


class Devices(NamedTuple):
    """Where the two programs run; None is the transport's own default."""

    producer: str | None
    consumer: str | None


def choose_devices(kind: TransportKind | None) -> Devices:
    """Two GPUs that can lend to each other where there are such, otherwise one for both.

    Raises:
        TransportUnavailableError: The transport cannot work here; says why and what to do.
    """
    first = select(kind).device
    if first.type == "cpu":
        return Devices(None, None)
    domain = place(first).domain
    for index in range(torch.cuda.device_count()):
        other = torch.device("cuda", index)
        if other != first and place(other).domain == domain:
            return Devices(str(first), str(other))
    return Devices(str(first), str(first))


def compute_threads() -> int:
    """Threads for each model: the two run side by side, and sums depend on how they are split."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def describe_machine() -> str:
    """Hardware, for the reader of the figures."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{platform.system()} {platform.release()}, {device}, {cores} cores"
