"""A stand-in for NVIDIA's dcgm-exporter: its names, labels and units, for GPUs that none has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from harness.scripted_server import Answer, ScriptedServer

GAUGES: Final = {
    "DCGM_FI_DEV_GPU_UTIL": ("GPU utilization (in %).", 37),
    "DCGM_FI_DEV_FB_FREE": ("Framebuffer memory free (in MiB).", 61_000),
    "DCGM_FI_DEV_FB_USED": ("Framebuffer memory used (in MiB).", 20_000),
    "DCGM_FI_PROF_DRAM_ACTIVE": (
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        0.21,
    ),
}
"""Name, help and value, as its default list of counters has them."""


def exposition(gpu_count: int) -> str:
    """Its page. Where there is no Kubernetes, it names no pod."""
    lines = []
    for name, (text, value) in GAUGES.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        for index in range(gpu_count):
            labels = {
                "gpu": str(index),
                "UUID": f"GPU-{index}",
                "pci_bus_id": f"00000000:{index + 1:02X}:00.0",
                "device": f"nvidia{index}",
                "modelName": "NVIDIA H100 80GB HBM3",
                "Hostname": "node",
                "DCGM_FI_DRIVER_VERSION": "570.86.15",
            }
            inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
            lines.append(f"{name}{{{inside}}} {value}")
    return "\n".join(lines) + "\n"


@contextmanager
def dcgm_exporter(gpu_count: int) -> Iterator[int]:
    """Serve the page; gives the port."""
    page = Answer(
        body=exposition(gpu_count).encode(), content_type="text/plain; version=0.0.4; charset=utf-8"
    )
    with ScriptedServer(lambda _: page) as server:
        yield server.port
