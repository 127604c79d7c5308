"""The steps of `make gpu`, most valuable first, and which of them a run takes.

A record counts as long as the step and the sources that it depends on are the same and it was taken
on the same hardware; so a repeat runs what failed, what changed and what there was no time for. A
run has a budget: a step begins only if its usual time is left, and ends at its limit or the
budget's, whichever comes first. A later step that still fits is taken although an earlier one did
not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from harness.gpu.outcome import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from harness.gpu.records import Record

BUDGET_MINUTES: Final = 18.0
"""Minutes of a run: what a borrowed GPU can be counted on for. Doubled, nothing is left over on the
slowest of machines."""

LIMIT_S: Final = 480.0
"""Seconds after which any step is ended."""

TRANSPORTS: Final = "aqualib/src/aqualib/transports/*.py"
MEMORY: Final = "aqualib/src/aqualib/**/*.py"
SHARED: Final = (
    *("tests/harness/gpu/device.py", "tests/harness/gpu/sampling.py"),
    *("tests/harness/transport_peer.py", TRANSPORTS),
)
"""What every step depends on."""


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: For records and `--only`.
        what: A line for people.
        runs: `module:function` of `harness.gpu`, or arguments of pytest after `pytest `.
        usual_s: What it takes on a GPU, about; a step begins only if so much is left.
        sources: Globs of what it depends on besides `SHARED`.
        limit_s: Seconds after which it is ended.
    """

    name: str
    what: str
    runs: str
    usual_s: float
    sources: tuple[str, ...] = ()
    limit_s: float = LIMIT_S


STEPS: Final = (
    Step("machine", "what machine this is, and which transports work", "facts:machine", 15,
         ("tests/harness/gpu/facts.py",), limit_s=120),
    Step("order", "what waits for what: streams, captures, contexts", "order:order", 20,
         ("tests/harness/gpu/order.py", "aqualib/src/aqualib/probe.py"), limit_s=180),
    Step("contract", "every promise of a transport, between two processes",
         "pytest tests/contract/aqualib", 150, ("tests/contract/aqualib/*.py",)),
    Step("deaths", "SIGKILL of lender and borrower while they copy", "deaths:deaths", 40,
         ("tests/harness/gpu/deaths.py",), limit_s=240),
    Step("races", "random walks with kernels beside them, every byte compared", "races:races", 75,
         ("tests/harness/gpu/races.py", "tests/harness/gpu_walk*.py", MEMORY), limit_s=240),
    Step("plain", "slabs of another process against plain copies", "copies:plain", 25,
         ("tests/harness/gpu/copies.py",), limit_s=180),
    Step("rows", "rows by size and run, both routes: thresholds come from these", "copies:rows", 45,
         ("tests/harness/gpu/copies.py",)),
    Step("reclaim", "10 GB back, by slab size", "reclaims:reclaim", 60,
         ("tests/harness/gpu/reclaims.py",)),
    Step("product", "10 GB lent, filled and reclaimed by the product", "reclaims:product", 45,
         ("tests/harness/gpu/reclaims.py", MEMORY)),
    Step("paging", "blocks of a KV cache out and in, 32 and 80 layers", "loads:paging", 40,
         ("tests/harness/gpu/loads.py", MEMORY), limit_s=240),
    Step("interference", "kernels beside copies", "loads:interference", 40,
         ("tests/harness/gpu/loads.py",), limit_s=240),
    Step("kv-memory", "a KV cache given up and taken back by the granule", "reclaims:kv_memory", 20,
         ("tests/harness/gpu/reclaims.py", MEMORY), limit_s=180),
    Step("slabs", "a slab's life by its size", "copies:slabs", 30,
         ("tests/harness/gpu/copies.py",), limit_s=240),
    Step("lanes", "copiers side by side, and copies over several lanes", "copies:lanes", 35,
         ("tests/harness/gpu/copies.py",), limit_s=180),
    Step("tests", "the gpu tests of the library", "pytest tests/gpu", 120,
         ("tests/gpu/aqualib/*.py", MEMORY)),
    Step("processors", "rows stored by a kernel of few processors", "kernels:processors", 30,
         ("tests/harness/gpu/kernels.py", "tests/harness/gpu/storing_kernel.py"), limit_s=180),
    Step("pinning", "host memory made ready", "loads:pinning", 15,
         ("tests/harness/gpu/loads.py",), limit_s=120),
    Step("sanitizer", "a walk under compute-sanitizer", "races:sanitizer", 90,
         ("tests/harness/gpu/races.py", "tests/harness/gpu_walk*.py", MEMORY), limit_s=240),
    Step("second-gpu", "two GPUs: contexts, slabs between them", "order:second_gpu", 15,
         ("tests/harness/gpu/order.py",), limit_s=120),
)  # fmt: skip

NEVER_HERE: Final = {
    "NVLink between hosts, fabric handles": "needs a rack with a domain over several hosts",
    "network cards that register lent memory": "needs a card and GPUDirect RDMA",
    "MIG slices and MPS clients": "need a GPU that is set up so, which is not for a test to change",
    "vLLM on a GPU": "needs vLLM's CUDA build and a model: `make test-engine` runs it on CPUs",
}
"""What no step tries, and why."""


def fingerprint(step: Step, root: Path, hardware: str) -> str:
    """Changes with the step, the sources that it depends on, and the hardware."""
    digest = hashlib.sha256(repr((step.name, step.runs, hardware)).encode())
    paths = {path for glob in (*SHARED, *step.sources) for path in root.glob(glob)}
    for path in sorted(paths):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def still_to_run(
    steps: Iterable[Step], records: Mapping[str, Record], fingerprints: Mapping[str, str]
) -> list[Step]:
    """Steps without a record of this fingerprint that passed, in order."""
    found = []
    for step in steps:
        record = records.get(step.name)
        is_good = (
            record is not None
            and record.fingerprint == fingerprints[step.name]
            and record.outcome.state is State.PASSED
        )
        if not is_good:
            found.append(step)
    return found


@dataclass
class Budget:
    """Seconds of a run, and what of them is spent."""

    total_s: float
    spent_s: float = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self.total_s - self.spent_s)

    def allows(self, step: Step) -> bool:
        """Whether a step may begin."""
        return step.usual_s <= self.left_s

    def limit_s(self, step: Step) -> float:
        """Seconds after which it is ended."""
        return min(step.limit_s, LIMIT_S, self.left_s)


def unknown(names: Sequence[str]) -> list[str]:
    """Those that are no step's."""
    return [name for name in names if name not in {step.name for step in STEPS}]
