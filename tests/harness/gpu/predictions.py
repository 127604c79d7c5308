"""What is expected of a GPU before one was seen, so that a reader can hold us to it.

`docs/gpu.md` has the table; a run says of each whether it came true. A figure is what the step of
that name writes down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from harness.gpu.sampling import digits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.gpu.records import Record


@dataclass(frozen=True)
class Prediction:
    """One expected value, of an H100 with PCIe 5 unless it says otherwise.

    Attributes:
        step: Whose figure.
        figure: Its name.
        low: The least that is expected; None for no bound.
        high: The most.
        because: Where the expectation comes from.
    """

    what: str
    step: str
    figure: str
    low: float | None
    high: float | None
    unit: str
    because: str

    @property
    def expected(self) -> str:
        """The bounds in words."""
        unit = f" {self.unit}".rstrip()
        if self.low is not None and self.high is not None:
            return f"{digits(self.low)} to {digits(self.high)}{unit}"
        if self.low is not None:
            return f"at least {digits(self.low)}{unit}"
        assert self.high is not None, "a prediction has a bound"
        return f"at most {digits(self.high)}{unit}"

    def verdict(self, found: float | None) -> str:
        """What became of it."""
        if found is None:
            return "not measured"
        is_low = self.low is not None and found < self.low
        is_high = self.high is not None and found > self.high
        word = "below" if is_low else "above" if is_high else "as expected"
        return f"{digits(found)}{f' {self.unit}'.rstrip()}: {word}"


PREDICTIONS: Final = (
    Prediction("a gather behind a busy stream is queued", "order", "gather behind a kernel ms",
        None, 1, "ms", "its index goes by pinned memory, and nothing waits"),
    Prediction("a drain beside a busy default stream", "order", "drain beside a kernel ms",
        None, 10, "ms", "64 MiB on a stream of its own"),
    Prediction("pinned memory, device to host, by torch", "plain", "plain to pinned GB/s",
        45, 58, "GB/s", "PCIe 5 x16: 63 nominal, 54 measured by others"),
    Prediction("a copy inside the device, by torch", "plain", "plain device GB/s",
        1000, 1700, "GB/s", "3.35 TB/s of HBM3, read and written"),
    Prediction("into a slab of another process, to a copy inside the device", "plain",
        "cuda_vmm into a borrowed slab ratio", 0.95, 1.05, "",
        "the same memory, mapped twice: sharing adds nothing"),
    Prediction("out of one", "plain", "cuda_vmm out of a borrowed slab ratio", 0.95, 1.05, "",
        "the same"),
    Prediction("into a pinned slab, to torch's pinned memory", "plain",
        "cuda_vmm into a pinned slab ratio", 0.95, 1.05, "",
        "registered memory is as good as allocated"),
    Prediction("10 GB back, slabs of 64 MiB, copied to pinned memory", "reclaim",
        "reclaim 64 MiB all ms", None, 230, "ms", "10 GB / 54 GB/s = 185 ms, and 160 fences"),
    Prediction("its first slab", "reclaim", "reclaim 64 MiB first ms", None, 3, "ms",
        "64 MiB / 54 GB/s = 1.2 ms"),
    Prediction("10 GB back, unmapped only", "reclaim", "reclaim 64 MiB unmap ms", None, 30, "ms",
        "160 slabs, 26 us an unmap of 2 MiB on an A100, more of 64 MiB"),
    Prediction("10 GB back through producer and consumer", "product", "product reclaim GB/s",
        35, 58, "GB/s", "the copies fill the link; the protocol is microseconds a slab"),
    Prediction("10 GB back, copied ahead by write-behind", "product",
        "product reclaim written behind ms", None, 60, "ms",
        "160 slabs unmapped by the consumer, closed by the producer; nothing is copied"),
    Prediction("paging out, 32 layers, to torch's copies", "paging", "paging 32 layers out ratio",
        0.5, 1.05, "", "a kernel and a copy for each part of 32 MiB"),
    Prediction("paging out, 80 layers", "paging", "paging 80 layers out ratio",
        0.5, 1.05, "", "the same, at any number of layers"),
    Prediction("paging in, 80 layers", "paging", "paging 80 layers in ratio",
        0.5, 1.05, "", "the same"),
    Prediction("80 layers paged in by layers, to the same of whole blocks", "paging",
        "paging 80 layers by layers ratio", 0.8, 1.05, "",
        "as many copies and kernels; runs of 256 KiB, and a wait of the host for each kernel"),
    Prediction("of that time, until the first layer may run", "paging",
        "paging 80 layers first share", None, 0.1, "",
        "256 blocks of 5 MiB come in 15 columns"),
    Prediction("tensor cores beside whole slabs to host memory", "interference",
        "interference of tensor cores host, whole", None, 0.05, "",
        "copy engines hold no processor"),
    Prediction("memory-bound kernels beside whole slabs to host memory", "interference",
        "interference of memory host, whole", None, 0.1, "", "54 of 3,350 GB/s"),
    Prediction("giving up a granule of a KV cache", "kv-memory", "granule release us",
        None, 60, "us", "26 us an unmap by kvcached on an A100; then zeros are mapped, one by one"),
    Prediction("taking one back", "kv-memory", "granule restore us", 100, 400, "us",
        "193 us a create by kvcached on an A100; rights and clearing once for all"),
    Prediction("a slab of 64 MiB made, cleared", "slabs", "cuda_vmm create 64 MiB ms",
        None, 5, "ms",
        "one create, one map, one memset at more than 1 TB/s"),
    Prediction("opened by a borrower", "slabs", "cuda_vmm open 64 MiB ms", None, 1, "ms",
        "import, map, rights; nothing is touched"),
    Prediction("two lanes out, to one", "lanes", "2 lanes out GB/s", 45, 58, "GB/s",
        "one link: a second lane adds nothing"),
    Prediction("both ways at once", "lanes", "2 lanes both GB/s", 75, 110, "GB/s",
        "PCIe is full duplex; host memory is not"),
    Prediction("a copy out over two lanes, to one", "lanes", "two lanes of a copy out ratio",
        0.97, 1.03, "", "the same link"),
    Prediction("host memory made ready", "pinning", "pinning GB/s", 1, 6, "GB/s",
        "one thread faults in and registers: 8 GiB in 1.55 s with four threads by others"),
    Prediction("rows stored by a kernel of 16 processors, slab", "processors",
        "kernel slab 16 processors GB/s", 150, 700, "GB/s",
        "some tens of GB/s a processor; on one GPU it is HBM, not a link"),
    Prediction("rows stored by a kernel of 16 processors, host", "processors",
        "kernel host 16 processors GB/s", 30, 58, "GB/s",
        "52.8 GB/s by kernels over PCIe 5, by others"),
)  # fmt: skip


def as_table(records: Mapping[str, Record] | None = None) -> list[str]:
    """Lines of Markdown; with what became of each where records are given."""
    head = ["what", "expected", "because", "figure"]
    head += [] if records is None else ["found"]
    lines = [_row(head), _row(["---"] * len(head))]
    for each in PREDICTIONS:
        cells = [each.what, each.expected, each.because, f"`{each.step}`: {each.figure}"]
        if records is not None:
            record = records.get(each.step)
            found = record.outcome.figures.get(each.figure) if record else None
            cells.append(each.verdict(found))
        lines.append(_row(cells))
    return lines


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
