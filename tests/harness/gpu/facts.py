"""What machine this is: everything a reader of the figures would ask first."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from aqua_protocol import TransportError, format_bytes
from aqualib import topology
from aqualib.transports.cuda_abi import (
    ACCESS_READ,
    ATTRIBUTE_POSIX_FD_HANDLES,
    ATTRIBUTE_RDMA,
    ATTRIBUTE_VIRTUAL_MEMORY,
)
from harness.gpu.outcome import Outcome

if TYPE_CHECKING:
    from harness.gpu.device import GpuAtHand

QUERY: Final = (
    *("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max"),
    *("ecc.mode.current", "mig.mode.current", "compute_mode", "clocks.max.sm", "clocks.max.mem"),
    *("power.limit", "persistence_mode"),
)
"""What `nvidia-smi` is asked."""

ATTRIBUTES: Final = {
    "maps memory by hand": ATTRIBUTE_VIRTUAL_MEMORY,
    "exports descriptors": ATTRIBUTE_POSIX_FD_HANDLES,
    "memory for network cards": ATTRIBUTE_RDMA,
    "fabric handles": 128,
    "multiprocessors": 16,
    "asynchronous copy engines": 40,
    "L2 cache (bytes)": 38,
}
"""Attributes of a device, by cuda.h."""


def machine(gpu: GpuAtHand) -> Outcome:
    """Hardware, driver, libraries, and which transports work at all."""
    outcome = Outcome()
    if gpu.is_stand_in:
        outcome.notes.append("This is the stand-in: no GPU, and no figure here means anything.")
    device, driver = gpu.driver, gpu.driver.driver
    facts = outcome.table("Machine", "what", "found")
    facts.add("GPU", f"{driver.name_of(0)}, {device.uuid}")
    facts.add("CUDA of the driver", driver.version)
    facts.add("driver", kernel_driver())
    facts.add("visible GPUs", driver.device_count)
    facts.add("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "not set"))
    facts.add("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    facts.add("Python", sys.version.split()[0])
    facts.add("kernel", platform.release())
    facts.add("processor", f"{processor()}, {os.cpu_count()} cores")
    facts.add("host memory", format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    facts.add("memory on the GPU", f"{gpu.free_bytes() / 1e9:.1f} GB free")
    facts.add("granularity", format_bytes(device.granularity))
    facts.add("batched copies", "one submission" if driver.batch_copy else "one call a run")
    for what, attribute in ATTRIBUTES.items():
        number = driver.read_int("cuDeviceGetAttribute", attribute, 0)
        facts.add(what, number)
        outcome.figures[what] = number
    facts.add("read-only mappings", read_only_mapping(gpu))
    for name, value in smi(device.uuid).items():
        facts.add(name, value)
    identity = topology.place(gpu.device)
    outcome.check(
        "NVML and the driver name the GPU alike",
        gpu.is_stand_in or identity.gpu_uuid == device.uuid,
        f"{identity.gpu_uuid} and {device.uuid}",
    )
    outcome.check("granules of 2 MiB", device.granularity == 2 << 20, device.granularity)
    ways = outcome.table("Transports", "transport", "works")
    for transport in gpu.transports():
        ways.add(transport.kind.value, "yes")
    for kind, reason in gpu.refusals.items():
        ways.add(kind.value, f"no: {reason}")
    outcome.check("some transport of GPUs works", any(row[1] == "yes" for row in ways.rows), "")
    return outcome


def read_only_mapping(gpu: GpuAtHand) -> str:
    """Whether one piece of memory can be shown at several addresses, for reading only."""
    device = gpu.driver
    unit = device.granularity
    handle = device.allocate(unit)
    at = device.reserve(2 * unit)
    try:
        device.map_run(at, [handle, handle], unit, is_writable=False)
        device.unmap_at(at, 2 * unit)
    except TransportError as error:
        return f"refused: {error} (rights {ACCESS_READ})"
    finally:
        device.free_reserved(at, 2 * unit)
        device.release(handle)
    return "granted, of one granule at two addresses"


def kernel_driver() -> str:
    """Version of the kernel's module."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found.group() if found else text.splitlines()[0]


def processor() -> str:
    """Its model, as the kernel tells it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found.group(1) if found else platform.machine()


def smi(uuid: str) -> dict[str, str]:
    """What `nvidia-smi` knows of a GPU; nothing where it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", f"--id={uuid}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    values = done.stdout.strip().split(", ")
    return dict(zip(QUERY, values, strict=True)) if len(values) == len(QUERY) else {}


assert ctypes.sizeof(ctypes.c_void_p) == 8, "addresses are 64 bits wide"
