"""Random walks of the product on the device, with kernels beside them; and under a memory checker.

The walk is the stand-in's own (`harness.gpu_walk`): tensors, blocks, leases, reclaims, captures and
a full GPU in any order, and every byte compared. Here the streams are real ones, and run while a
thread keeps the device busy.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from ctypes import byref, c_int
from typing import TYPE_CHECKING, Final

import torch

from aqua_protocol import AquaError
from aqualib.transports.cuda_abi import CAPTURE_MODE_RELAXED
from harness.gpu.outcome import NotRunError, Outcome
from harness.gpu_walk import walk_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.gpu.device import GpuAtHand

WALK_S: Final = 60.0
WALK_OPERATIONS: Final = 200
CHECKED_OPERATIONS: Final = 60
"""Of the walk under the memory checker, which is some hundred times slower."""

SANITIZER: Final = "compute-sanitizer"
ERRORS_FOUND: Final = 86
"""Exit status that the sanitizer is told to give for errors."""

SANITIZER_S: Final = 200.0


def races(gpu: GpuAtHand) -> Outcome:
    """Walks with one seed after the other, kernels beside them, for a minute."""
    outcome = Outcome()
    done: Counter[str] = Counter()
    seeds, found = 0, ""
    give_up_s = time.monotonic() + (0 if gpu.is_stand_in else WALK_S)
    # On the stand-in, whose work runs in Python, kernels would only take time.
    with contextlib.nullcontext() if gpu.is_stand_in else busy_kernels(gpu):
        while not found and (not seeds or time.monotonic() < give_up_s):
            try:
                done += walk_on(gpu, seeds, 40 if gpu.is_stand_in else WALK_OPERATIONS)
            except (AssertionError, AquaError, RuntimeError) as error:
                found = f"seed {seeds}: {type(error).__name__}: {error}"
            seeds += 1
    outcome.check(
        "every byte comes back, whatever runs beside", not found, found or f"{seeds} walks"
    )
    table = outcome.table(f"{seeds} walks, {sum(done.values())} operations", "operation", "times")
    for name, count in sorted(done.items()):
        table.add(name, count)
    outcome.figures["walk operations"] = sum(done.values())
    return outcome


@contextlib.contextmanager
def busy_kernels(gpu: GpuAtHand) -> Iterator[None]:
    """A thread that keeps the device's processors and memory busy, and minds no capture beside."""
    enough = threading.Event()

    def work() -> None:
        stream, driver = gpu.stream(), gpu.driver.driver
        # A walk captures graphs, and waiting for a stream meanwhile would end them.
        driver.call("cuThreadExchangeStreamCaptureMode", byref(c_int(CAPTURE_MODE_RELAXED)))
        with torch.cuda.stream(stream):
            big = torch.zeros(gpu.sized(1 << 28) // 4, device=gpu.device)
            while not enough.is_set():
                for _ in range(20):
                    big.add_(1)
                stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def sanitizer(gpu: GpuAtHand) -> Outcome:
    """A walk under `compute-sanitizer`: accesses out of bounds, unaligned or to nothing."""
    program = shutil.which(SANITIZER) or shutil.which(f"/usr/local/cuda/bin/{SANITIZER}")
    if program is None:
        raise NotRunError(f"{SANITIZER} is not installed (it comes with the CUDA toolkit)")
    if gpu.is_stand_in:
        raise NotRunError("the stand-in has no device code to watch")
    outcome = Outcome()
    command = [program, "--tool", "memcheck", "--error-exitcode", str(ERRORS_FOUND)]
    command += ["--target-processes", "application-only", sys.executable, "-m", "harness.gpu.races"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=SANITIZER_S,
        )
    except subprocess.TimeoutExpired:
        raise NotRunError(f"a walk under {SANITIZER} took more than {SANITIZER_S:.0f} s") from None
    said = (done.stdout + done.stderr).strip().splitlines()
    if "not supported" in done.stdout + done.stderr:
        raise NotRunError(f"{SANITIZER}: {next(line for line in said if 'not supported' in line)}")
    outcome.notes.extend(line for line in said[-3:])
    outcome.check("memcheck finds nothing", done.returncode == 0, f"exit status {done.returncode}")
    return outcome


if __name__ == "__main__":
    from harness.gpu.device import RealGpu

    walk_on(RealGpu(), seed=1, count=CHECKED_OPERATIONS)
