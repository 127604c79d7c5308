"""Where copies change their route, for each kind of GPU: measured once, read by every process.

The file beside this module has one entry for each kind of GPU on which `make gpu` has run its
sweeps, with what was measured, where and when. A kind that has none takes the defaults, which are
from other people's figures. The file is part of the package and read strictly: one that cannot be
read is a broken installation, and no reason to go on by guesswork.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from aqua_protocol import GIB, KIB

FILE: Final = Path(__file__).with_name("gpu_thresholds.json")

Bytes = Annotated[int, Field(ge=1, le=GIB)]
Lanes = Annotated[int, Field(ge=1, le=8)]
"""Streams; GPUs have two to ten copy engines."""


class ThresholdOrigin(BaseModel):
    """Where thresholds come from.

    Attributes:
        gpu: As its driver calls it.
        driver: Version of the driver.
        torch: Version of torch.
        commit: What was measured.
        measured_at: ISO date and time, UTC.
        evidence: For each figure, what the sweep showed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str
    driver: str
    torch: str
    commit: str
    measured_at: str
    evidence: dict[str, str]


class CopyThresholds(BaseModel):
    """How copies go: packed first or not, and over how many streams.

    Attributes:
        device_run_bytes: Mean bytes of a run whose other side is a slab on a GPU. The default is
            what NVLink's copy engines are said to need to be as fast on pieces as on the whole.
            Doubled, runs of up to twice the length take the detour through the staging buffer.
        host_run_bytes: The same where the other side is pinned host memory.
        device_lanes: Streams that a large copy to or from slabs on GPUs is spread over, and lenders
            that its blocks are. The default is today's one: an engine is said to carry 371 to 380
            of NVLink 4's 450 GB/s. Doubled, two engines work on a copy, over two links where two
            lenders have one each; where they share one, it takes two submissions more for nothing.
        host_lanes: Streams where the other side is pinned host memory. The default is one, which
            fills PCIe 5 by what others measured; doubled, likewise.
        provenance: Where the figures come from; None for the defaults.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device_run_bytes: Bytes = 256 * KIB
    host_run_bytes: Bytes = 256 * KIB
    device_lanes: Lanes = 1
    host_lanes: Lanes = 1
    provenance: ThresholdOrigin | None = None


MEASURED: Final = TypeAdapter(dict[str, CopyThresholds])
"""The content of the file, by the names of GPUs."""


@cache
def read_thresholds(path: Path = FILE) -> dict[str, CopyThresholds]:
    """What has been measured, by the names of GPUs.

    Raises:
        ValidationError: The file is not what `make gpu` writes.
    """
    return MEASURED.validate_json(path.read_bytes())


def thresholds_of(gpu_name: str) -> CopyThresholds:
    """Those measured on this kind of GPU, or the defaults."""
    return read_thresholds().get(gpu_name, CopyThresholds())
