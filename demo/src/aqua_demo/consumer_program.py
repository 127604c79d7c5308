"""The consumer: a Llama that reads a long text within a budget its keys and values exceed.

Run by the demo as `python -m aqua_demo.consumer_program <parent pid> <settings>`. With a
coordinator in its settings it borrows memory through `AquaCache`; without one it is the reference:
the same generation with a plain `DynamicCache`, all on its own device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat

import torch
from transformers import DynamicCache

import aqualib
from aqua_demo.child import Parent, run_program
from aqua_demo.generation import Generation
from aqua_demo.messages import (
    CONSUMER_ID,
    SAMPLE_INTERVAL_S,
    ConsumerResult,
    ConsumerSample,
    ProgramSettings,
)
from aqua_protocol import format_bytes
from aqualib.engines.transformers import AquaCache
from aqualib.ranges import Range
from aqualib.transports import select


class ConsumerSettings(ProgramSettings):
    """What the consumer needs to know; the reference has lengths instead of a coordinator."""

    answer_lengths: list[int] | None = None
    coordinator_url: str | None = None
    token: str | None = None
    checksum: bool = False


def run(settings: ConsumerSettings, parent: Parent) -> None:
    """Generate until the end, or until told to finish, and report the result."""
    scale = settings.scale
    torch.set_num_threads(settings.threads)
    device = select(settings.transport, settings.device).device
    generation = Generation(scale, device, settings.seed, ending=parent.finished)
    if parent.finished.is_set():
        return
    if settings.coordinator_url is None:
        parent.tell(refer(settings, parent, generation))
        return
    with (
        aqualib.connect(
            CONSUMER_ID,
            coordinator_url=settings.coordinator_url,
            token=settings.token,
            transport=settings.transport,
            device=settings.device,
            host_bytes=scale.offer_bytes,
            wanted_bytes=scale.offer_bytes,
            slab_bytes=scale.slab_bytes,
            checksum=settings.checksum,
            model="llama",
        ) as aqua,
        AquaCache(
            generation.config,
            max_tokens=scale.max_tokens,
            budget_bytes=scale.budget_bytes,
            aqua=aqua,
        ) as cache,
    ):
        wait_for_memory(scale.offer_bytes, parent, aqua)
        parent.tell(harvest(settings, parent, generation, cache, aqua))


def wait_for_memory(wanted_bytes: int, parent: Parent, aqua: aqualib.Aqua) -> None:
    """Wait until memory is lent, so that the first page goes there; the parent gives up, not we."""
    while aqua.stats().leased_bytes < wanted_bytes:
        if parent.finished.wait(SAMPLE_INTERVAL_S):
            return
    stats = aqua.stats()
    slowest = min(stats.links, key=lambda link: link.read_bytes_per_s)
    parent.news(
        f"borrows {format_bytes(stats.leased_bytes)} over {slowest.transport.value}, measured"
        f" at {slowest.write_bytes_per_s / 1e9:.1f} GB/s out and"
        f" {slowest.read_bytes_per_s / 1e9:.1f} GB/s in"
    )


def refer(settings: ConsumerSettings, parent: Parent, generation: Generation) -> ConsumerResult:
    """Generate without interruption, everything on the own device."""

    def watch() -> None:
        parent.tell(ConsumerSample(at_s=time.monotonic(), tokens=generation.tokens))

    with watching(watch):
        cache = DynamicCache(config=generation.config)
        return generation.run(cache, settings.answer_lengths or ())


def harvest(
    settings: ConsumerSettings,
    parent: Parent,
    generation: Generation,
    cache: AquaCache,
    aqua: aqualib.Aqua,
) -> ConsumerResult:
    """Generate on borrowed memory, and report how it goes."""
    links = aqua.stats().links
    corrupted = False

    def watch() -> None:
        nonlocal corrupted
        parent.tell(sample(generation, cache, aqua))
        if parent.wants.corrupt_one_byte and not corrupted:
            corrupted = True
            corrupt_one_byte(aqua)
            parent.news("one stored byte has been changed, as asked")

    with watching(watch):
        result = generation.run(cache, repeat(settings.scale.answer_tokens))
    parent.tell(sample(generation, cache, aqua))
    return result.model_copy(
        update={
            "peak_resident_bytes": cache.statistics.peak_resident_bytes,
            "budget_bytes": settings.scale.budget_bytes,
            "transport": aqua.transport.kind.value,
            "link_bytes_per_s": min((link.read_bytes_per_s for link in links), default=None),
        }
    )


@contextmanager
def watching(look: Callable[[], None]) -> Iterator[None]:
    """Look ten times a second, on a thread of its own, until the block ends."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_INTERVAL_S):
            look()

    watcher = threading.Thread(target=watch, name="demo-watch")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def sample(generation: Generation, cache: AquaCache, aqua: aqualib.Aqua) -> ConsumerSample:
    """Sample the state of this moment."""
    stats, statistics = aqua.stats(), cache.statistics
    return ConsumerSample(
        at_s=time.monotonic(),
        tokens=generation.tokens,
        device_bytes=statistics.resident_bytes,
        peer_bytes=stats.used_bytes - stats.spilled_bytes - stats.lost_bytes,
        host_bytes=stats.spilled_bytes,
        paged_out_bytes=statistics.paged_out_bytes,
        paged_in_bytes=statistics.paged_in_bytes,
        spilled_bytes_peak=stats.spilled_bytes_peak,
        returned_bytes=stats.promoted_bytes,
    )


def corrupt_one_byte(aqua: aqualib.Aqua) -> None:
    """Give a stored float32 the opposite sign, behind the store's back.

    Another exponent could make the number infinite, and fail too loudly.
    """
    store = aqua._store  # noqa: SLF001 - a fault comes from outside every interface
    frames = store._table.frames.values()  # noqa: SLF001 - as above
    frame = next(frame for frame in frames if frame.used_bytes)
    at = frame.used_ranges()[0].start + 3  # Little-endian: the last byte begins with the sign.
    memory = store.pin(frame, Range(at, 1))
    try:
        memory.tensor[at] ^= 0x80
    finally:
        store.unpin(frame)


if __name__ == "__main__":
    run_program(run, ConsumerSettings)
