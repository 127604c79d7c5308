"""The binding, compared with cuda.h where it is installed and run over the stand-in elsewhere."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aqua_protocol import MIB, TransportError, TransportUnavailableError
from aqualib.transports import cuda_abi
from aqualib.transports.cuda_driver import CudaDriver, CudaError, load_library
from harness.cuda.machine import GLOBAL
from harness.cuda.stand_in import StandIn, stand_in
from harness.cuda.violations import Kind

GRANULE = 2 * MIB

HEADERS = [
    Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include" / "cuda.h",
    Path("/usr/include/cuda.h"),
]

LAYOUTS = {
    "CUmemLocation": (cuda_abi.MemLocation, {"type": "type", "id": "id"}),
    "CUmemAllocationProp": (
        cuda_abi.MemAllocationProp,
        {
            "type": "type",
            "requested_handle_types": "requestedHandleTypes",
            "location": "location",
            "win32_handle_meta_data": "win32HandleMetaData",
            "alloc_flags": "allocFlags",
        },
    ),
    "CUmemAccessDesc": (cuda_abi.MemAccessDesc, {"location": "location", "flags": "flags"}),
    "CUmemcpyAttributes": (
        cuda_abi.MemcpyAttributes,
        {
            "src_access_order": "srcAccessOrder",
            "src_loc_hint": "srcLocHint",
            "dst_loc_hint": "dstLocHint",
            "flags": "flags",
        },
    ),
    "CUuuid": (cuda_abi.Uuid, {"bytes": "bytes"}),
}

CONSTANTS = {
    "CUDA_SUCCESS": cuda_abi.SUCCESS,
    "CU_MEM_ALLOCATION_TYPE_PINNED": cuda_abi.ALLOCATION_TYPE_PINNED,
    "CU_MEM_LOCATION_TYPE_DEVICE": cuda_abi.LOCATION_TYPE_DEVICE,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": cuda_abi.HANDLE_TYPE_POSIX_FD,
    "CU_MEM_ACCESS_FLAGS_PROT_READ": cuda_abi.ACCESS_READ,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda_abi.ACCESS_READ_WRITE,
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM": cuda_abi.GRANULARITY_MINIMUM,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": cuda_abi.ATTRIBUTE_VIRTUAL_MEMORY,
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": (
        cuda_abi.ATTRIBUTE_POSIX_FD_HANDLES
    ),
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": cuda_abi.ATTRIBUTE_RDMA,
    "CU_STREAM_NON_BLOCKING": cuda_abi.STREAM_NON_BLOCKING,
    "CU_EVENT_DISABLE_TIMING": cuda_abi.EVENT_DISABLE_TIMING,
    "CU_STREAM_CAPTURE_MODE_RELAXED": cuda_abi.CAPTURE_MODE_RELAXED,
    "CU_MEMHOSTREGISTER_PORTABLE": cuda_abi.HOST_REGISTER_PORTABLE,
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": cuda_abi.COPY_IN_STREAM_ORDER,
}


@pytest.fixture(scope="module")
def header() -> Path:
    found = next((path for path in HEADERS if path.exists()), None)
    if found is None:
        pytest.skip("cuda.h is not installed")
    return found


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("c++") or shutil.which("g++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def test_structures_constants_and_prototypes_are_those_of_cuda_h(
    header: Path, compiler: str, tmp_path: Path
) -> None:
    lines = [
        # The names as the library exports them, without the header's renaming to versions.
        "#define __CUDA_API_VERSION_INTERNAL",
        "#include <cuda.h>",
        "#include <cstddef>",
        "#include <cstdio>",
        "template <class... A> void print(const char *name, CUresult (*)(A...)) {",
        '    std::printf("P %s", name);',
        '    ((std::printf(" %zu", sizeof(A))), ...);',
        '    std::printf("\\n");',
        "}",
        "int main() {",
    ]
    for name, (_, fields) in LAYOUTS.items():
        lines.append(f'std::printf("S {name} %zu\\n", sizeof({name}));')
        lines += [
            f'std::printf("F {name} {ours} %zu\\n", offsetof({name}, {theirs}));'
            for ours, theirs in fields.items()
        ]
    lines += [f'std::printf("C {name} %lld\\n", (long long){name});' for name in CONSTANTS]
    lines += [f'print("{name}", {name});' for name in cuda_abi.PROTOTYPES]
    lines.append("}")
    source = tmp_path / "facts.cpp"
    source.write_text("\n".join(lines))
    # No linking against the driver: the addresses are only looked at by the compiler.
    program = tmp_path / "facts"
    subprocess.run(
        [
            compiler,
            *("-std=c++17", "-O1", "-w", "-Wl,--unresolved-symbols=ignore-all"),
            f"-I{header.parent}",
            *(str(source), "-o", str(program)),
        ],
        check=True,
    )
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    facts = [line.split() for line in output.splitlines()]

    for kind, name, *rest in facts:
        match kind:
            case "S":
                assert ctypes.sizeof(LAYOUTS[name][0]) == int(rest[0]), name
            case "F":
                field, offset = rest
                assert getattr(LAYOUTS[name][0], field).offset == int(offset), (name, field)
            case "C":
                assert CONSTANTS[name] == int(rest[0]), name
            case "P":
                ours = [ctypes.sizeof(argument) for argument in cuda_abi.PROTOTYPES[name]]  # type: ignore[arg-type] # ctypes classes
                assert ours == [int(size) for size in rest], name
    assert len([fact for fact in facts if fact[0] == "P"]) == len(cuda_abi.PROTOTYPES)


@pytest.fixture
def standing() -> Iterator[StandIn]:
    with stand_in() as standing:
        yield standing


@pytest.fixture
def driver(standing: StandIn) -> CudaDriver:
    return standing.driver


def test_a_machine_without_the_driver_is_told_what_to_install() -> None:
    with pytest.raises(TransportUnavailableError, match="cannot be loaded") as refusal:
        load_library("libno-such-cuda.so.1")
    assert "NVIDIA driver" in refusal.value.remedy


def test_a_library_that_lacks_a_call_is_too_old() -> None:
    with pytest.raises(TransportUnavailableError, match="too old") as refusal:
        load_library("libc.so.6")
    assert "driver 525" in refusal.value.remedy


def test_a_driver_without_a_device_is_unavailable_by_the_drivers_own_word(
    standing: StandIn,
) -> None:
    standing.machine.visible.clear()
    with pytest.raises(TransportUnavailableError, match="CUDA_ERROR_NO_DEVICE") as refusal:
        CudaDriver(standing.library)
    assert "CUDA_VISIBLE_DEVICES" in refusal.value.remedy


def test_a_device_that_is_not_visible_is_refused(driver: CudaDriver) -> None:
    assert driver.device(0) is driver.device(0)
    for ordinal in (1, -1):
        with pytest.raises(TransportUnavailableError, match="visible"):
            driver.device(ordinal)


def test_errors_carry_the_call_and_the_drivers_word(driver: CudaDriver) -> None:
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE") as failure:
        driver.device(0).allocate(GRANULE + 1)
    assert failure.value.details == {
        "call": "cuMemCreate",
        "result": "CUDA_ERROR_INVALID_VALUE",
        "result_code": 1,
    }
    with pytest.raises(CudaError, match="CUresult 12345"):
        driver.require("cuAnything", 12345)


def test_a_device_is_named_as_nvml_names_it(driver: CudaDriver) -> None:
    assert driver.device(0).uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_a_mapping_that_cannot_be_made_leaves_nothing_behind(
    driver: CudaDriver, standing: StandIn
) -> None:
    gpu = driver.device(0)
    before = standing.counts()
    memory = gpu.allocate(GRANULE)
    with pytest.raises(CudaError):
        gpu.map(memory, 2 * GRANULE)
    gpu.release(memory)
    assert standing.counts() == before


def test_any_thread_may_call_and_keeps_its_context_and_its_mind_of_captures(
    driver: CudaDriver, standing: StandIn
) -> None:
    gpu = driver.device(0)
    seen: list[object] = []

    def work() -> None:
        memory = gpu.allocate(GRANULE)
        address = gpu.map(memory, GRANULE)
        gpu.zero(address, GRANULE)
        seen.append(ctypes.string_at(address, 4))
        gpu.unmap(address, GRANULE)
        gpu.release(memory)
        with pytest.raises(CudaError):
            gpu.release(memory)
        assert standing.machine.take_violations() == [Kind.REFCOUNT]
        seen.append((standing.counts()["contexts"], standing.machine.thread.capture_mode))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [bytes(4), (0, GLOBAL)]


def test_memory_that_cannot_be_pinned_names_the_limit(
    driver: CudaDriver, standing: StandIn
) -> None:
    gpu = driver.device(0)
    unpin = gpu.pin(1 << 30, GRANULE)
    assert standing.counts()["pinned"] == 1
    unpin()
    assert standing.counts()["pinned"] == 0
    standing.machine.memory_bytes = 1
    with pytest.raises(TransportError, match="cannot pin 2 MiB") as refusal:
        gpu.pin(1 << 30, GRANULE)
    assert "ulimit -l" in refusal.value.remedy


@pytest.mark.parametrize("has_batch", [True, False])
def test_many_copies_work_with_and_without_the_drivers_batch(
    standing: StandIn, has_batch: bool
) -> None:
    standing.machine.has_batch = has_batch
    gpu = standing.driver.device(0)
    assert (standing.driver.batch_copy is None) == (not has_batch)
    stream = gpu.make_stream()
    src = np.arange(64, dtype=np.uint8)
    dst = np.zeros(64, dtype=np.uint8)
    offsets, sizes = np.array([0, 32, 48]), np.array([8, 16, 4])
    gpu.copy_batch(
        (dst.ctypes.data + offsets).astype(np.uint64),
        (src.ctypes.data + offsets).astype(np.uint64),
        sizes.astype(np.uint64),
        stream=stream.handle,
    )
    stream.synchronize()
    expected = np.zeros(64, dtype=np.uint8)
    for offset, size in zip(offsets, sizes, strict=True):
        expected[offset : offset + size] = src[offset : offset + size]
    assert (dst == expected).all()
    if has_batch:
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            gpu.copy_batch(*(np.zeros(1, dtype=np.uint64),) * 3, stream=0)
