"""Where this process is: the node, its GPUs, and which of them can lend to each other.

Owns discovery by NVML and its stand-in, a JSON file named by `AQUA_TOPOLOGY_FILE` for machines
without a GPU and for tests. Says what the hardware claims; `cuDeviceCanAccessPeer` when a slab is
opened and the bandwidth probe have the last word.

A *domain* is a set of GPUs whose owners may lend to each other. It never spans hosts, because
lease channels are Unix sockets: on a rack-scale NVLink fabric it is the part of the fabric that
one operating system sees. GPUs are named by UUID: indexes change with CUDA_VISIBLE_DEVICES.

A machine without a GPU has one emulated GPU per process, all in one domain, so that the memfd
transport lends between processes as a GPU's transport lends between GPUs.

Source: NVML API, "Device Queries" (P2P status) and "Fabric Manager" (fabric information).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
from ctypes import byref
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self
from uuid import UUID

from pydantic import Field, ValidationError, model_validator

from aqua_protocol import ConfigError
from aqua_protocol.ids import Name
from aqua_protocol.wire import ByteCount, Wire
from aqualib.host_memory import host_memory_bytes
from aqualib.reporter import Identity

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from aqualib.settings import Settings

_log: Final = logging.getLogger("aqualib")

TOPOLOGY_FILE_VARIABLE: Final = "AQUA_TOPOLOGY_FILE"
MAX_GPUS: Final = 256
"""GPUs of one host at most: three times a 72-GPU rack seen as one. Doubled, a topology file may be
four times as long."""

P2P_READ: Final = 0
"""Fixed by NVML as NVML_P2P_CAPS_INDEX_READ; nvidia-ml-py 13.615 defines it as the tuple `(0,)`."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_FABRIC: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.\d+")
"""What the fabric manager calls a clique: cluster and number, alike on all its hosts."""

EMULATED_FABRIC: Final = "host-memory"
"""Joins the emulated GPUs of one host, and keeps them apart from real ones."""


class LinkKind(StrEnum):
    """What joins two GPUs."""

    NVLINK = "nvlink"
    PCIE = "pcie"


class Gpu(Wire):
    """One GPU, real or emulated."""

    uuid: Name
    model: Annotated[str, Field(min_length=1, max_length=128)]
    memory_bytes: ByteCount
    fabric: Name | None = Field(
        default=None, description="NVLink fabric and clique; GPUs of one reach each other."
    )


class Link(Wire):
    """Two GPUs that read and write each other's memory."""

    a: Name
    b: Name
    kind: LinkKind

    @model_validator(mode="after")
    def _joins_two(self) -> Self:
        if self.a == self.b:
            raise ValueError(f"a link joins two GPUs, not {self.a} with itself")
        return self


class Topology(Wire):
    """The GPUs of one host and the links between them."""

    node: Name
    boot_id: Name = Field(description="Life of the host's kernel; containers on it share it.")
    gpus: list[Gpu] = Field(min_length=1, max_length=MAX_GPUS)
    links: list[Link] = Field(default_factory=list, max_length=MAX_GPUS * MAX_GPUS)

    @model_validator(mode="after")
    def _links_join_known_gpus(self) -> Self:
        known = {gpu.uuid for gpu in self.gpus}
        if len(known) != len(self.gpus):
            raise ValueError("a GPU may appear only once")
        unknown = {end for link in self.links for end in (link.a, link.b)} - known
        if unknown:
            raise ValueError(f"links name GPUs that are not listed: {', '.join(sorted(unknown))}")
        return self

    def gpu(self, uuid: str) -> Gpu:
        """The GPU with this UUID.

        Raises:
            ConfigError: There is none.
        """
        known = {gpu.uuid: gpu for gpu in self.gpus}
        if uuid not in known:
            remedy = f"Name one of {', '.join(known)}."
            raise ConfigError(f"{self.node} has no GPU {uuid}", remedy=remedy)
        return known[uuid]

    def domain_of(self, uuid: str, visible: Collection[str] | None = None) -> str:
        """Key of the set of GPUs that may lend to this one; equal for all of them.

        The fabric's own name where there is one, otherwise the connected component of links, named
        by its first GPU. In a component of a mesh that is not complete, some pairs do not reach
        each other; opening a slab then fails by name.

        A process maps memory of no GPU that it cannot see. One that sees a part of the set is
        alone with those that see the same part: a grant between others would never be mapped.

        Args:
            visible: GPUs that the process may use; all if None.

        Raises:
            ConfigError: There is no such GPU.
        """
        fabric = self.gpu(uuid).fabric
        reach = self._reach(uuid) if fabric is None else self._clique(fabric)
        name = f"{self.boot_id}.{min(reach) if fabric is None else fabric}"
        # A container's NVML may list a part of a fabric, which has its name nevertheless.
        if visible is None or (fabric is None and reach <= set(visible)):
            return name
        part = sorted(reach & set(visible))
        return f"{name}.part-{hashlib.sha256(' '.join(part).encode()).hexdigest()[:12]}"

    def _clique(self, fabric: str) -> set[str]:
        return {gpu.uuid for gpu in self.gpus if gpu.fabric == fabric}

    def _reach(self, uuid: str) -> set[str]:
        reached, frontier = {uuid}, [uuid]
        while frontier:
            here = frontier.pop()
            for link in self.links:
                there = {link.a: link.b, link.b: link.a}.get(here)
                if there is not None and there not in reached:
                    reached.add(there)
                    frontier.append(there)
        return reached


def discover() -> Topology:
    """The topology of this host: the file if one is named, else NVML, else one emulated GPU.

    Raises:
        ConfigError: The named file cannot be read, or is not a topology.
    """
    named = os.environ.get(TOPOLOGY_FILE_VARIABLE)
    if named:
        return load(Path(named))
    return _from_nvml() or emulated()


def load(path: Path) -> Topology:
    """Read a topology from JSON.

    Raises:
        ConfigError: The file cannot be read, or is not a topology; names the field.
    """
    try:
        return Topology.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{TOPOLOGY_FILE_VARIABLE}={path} is not a topology: {error}",
            remedy="Correct the file, or unset the variable to ask the hardware.",
        ) from error


def emulated() -> Topology:
    """A host without GPUs: one emulated GPU that is this process's own."""
    boot_id = _boot_id()
    gpu = Gpu(
        uuid=f"CPU-{boot_id}-{os.getpid()}",
        model="emulated in host memory",
        memory_bytes=host_memory_bytes(),
        fabric=EMULATED_FABRIC,
    )
    return Topology(node=_node(), boot_id=boot_id, gpus=[gpu])


def find_identity(settings: Settings, device: torch.device, model: str | None = None) -> Identity:
    """The identity of this process; settings win over what is found out.

    Args:
        settings: May name the node, the domain and the GPU.
        device: Where the member's slabs are.
        model: What runs here, for people.

    Raises:
        ConfigError: The topology file is wrong, does not list the GPU, or the domain is the name of
            a fabric over hosts.
    """
    node, domain, gpu_uuid = settings.node, settings.domain, settings.gpu_uuid
    if domain and _FABRIC.fullmatch(domain):
        raise ConfigError(
            f"{domain} is an NVLink fabric, which may span hosts; slabs are lent within one",
            remedy="Leave AQUA_DOMAIN out: each host's part of the fabric is then a domain.",
        )
    if node and domain and gpu_uuid:
        return Identity(node, domain, gpu_uuid, model)
    # Without a topology file an emulated GPU has the name that the settings give it.
    here = place(device, gpu_uuid=gpu_uuid if os.environ.get(TOPOLOGY_FILE_VARIABLE) else None)
    return Identity(node or here.node, domain or here.domain, gpu_uuid or here.gpu_uuid, model)


def place(device: torch.device, *, gpu_uuid: str | None = None) -> Identity:
    """Where this process is when its slabs are on `device`; what a member reports about itself.

    A GPU that is not listed (NVML absent, a MIG slice) is a domain of its own.

    Args:
        gpu_uuid: Which GPU of a topology file an emulated process plays; the first if None.

    Raises:
        ConfigError: The topology file is wrong, or does not list `gpu_uuid`.
        TransportError: The driver cannot name the GPU.
    """
    if device.type == "cpu":
        topology = discover() if os.environ.get(TOPOLOGY_FILE_VARIABLE) else emulated()
        uuid = topology.gpu(gpu_uuid or topology.gpus[0].uuid).uuid
        return Identity(topology.node, topology.domain_of(uuid), uuid)
    from aqualib.transports.cuda_driver import load_driver

    topology, driver = discover(), load_driver()
    visible = [driver.uuid_of(ordinal) for ordinal in range(driver.device_count)]
    uuid = visible[device.index or 0]
    if any(gpu.uuid == uuid for gpu in topology.gpus):
        return Identity(topology.node, topology.domain_of(uuid, visible), uuid)
    _log.warning(
        "%s is not among the GPUs that NVML lists, as a MIG slice is not: it lends to processes on "
        "itself only",
        uuid,
    )
    return Identity(topology.node, f"{topology.boot_id}.{uuid}", uuid)


def _node() -> str:
    """The host name, with what no name may contain replaced."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname()).strip("._:-") or "localhost"


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def _from_nvml() -> Topology | None:
    """Ask the driver; None where there is no NVML or no GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None  # No driver, or none that this container may talk to.
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        if not handles:
            return None
        gpus = [_read_gpu(pynvml, handle) for handle in handles]
        links = [
            Link(a=a.uuid, b=b.uuid, kind=kind)
            for (a, a_handle), (b, b_handle) in combinations(zip(gpus, handles, strict=True), 2)
            if (kind := _read_link(pynvml, a_handle, b_handle)) is not None
        ]
    except pynvml.NVMLError as error:
        _log.warning("NVML does not describe this host's GPUs: %s", error)
        return None
    finally:
        pynvml.nvmlShutdown()
    return Topology(node=_node(), boot_id=_boot_id(), gpus=gpus, links=links)


def _read_gpu(nvml: Any, handle: Any) -> Gpu:  # noqa: ANN401 - pynvml has no types
    return Gpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        model=nvml.nvmlDeviceGetName(handle),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        fabric=_read_fabric(nvml, handle),
    )


def _read_fabric(nvml: Any, handle: Any) -> str | None:  # noqa: ANN401 - as above
    """Fabric and clique, where the fabric manager has finished and names the fabric."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    except nvml.NVMLError:
        return None  # Older drivers, and GPUs without NVSwitch.
    cluster = bytes(info.clusterUuid)
    if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or not any(cluster):
        return None  # A single NVSwitch host reports a completed fabric without a name.
    return f"{UUID(bytes=cluster)}.{info.cliqueId}"


def _read_link(nvml: Any, a: Any, b: Any) -> LinkKind | None:  # noqa: ANN401 - as above
    def capable(capability: int) -> bool:
        try:
            status = nvml.nvmlDeviceGetP2PStatus(a, b, capability)
        except nvml.NVMLError:
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    if not (capable(P2P_READ) and capable(nvml.NVML_P2P_CAPS_INDEX_WRITE)):
        return None
    return LinkKind.NVLINK if capable(nvml.NVML_P2P_CAPS_INDEX_NVLINK) else LinkKind.PCIE
