"""The producer: an image service that lends what it does not need, and takes it back under load.

Run by the demo as `python -m aqua_demo.programs.producer <parent pid> <settings>`. One thread
denoises; the informer watches its queue and its rate of requests and decides about the memory. The
service itself knows nothing of lending: it asks its allowance before it takes up an image, and
waits when the answer is no.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import torch

from aqua_client import CoordinatorClient
from aqua_demo.child import Parent, run_program
from aqua_demo.messages import (
    PRODUCER_ID,
    SAMPLE_INTERVAL_S,
    ProducerSample,
    ProducerSettings,
    ReclaimMeasure,
)
from aqua_demo.programs.images import Arrivals, ImageService
from aqualib.engines.torch_loop import CountedMemoryLimit, TorchLoop
from aqualib.producer.device import EmulatedMemory
from aqualib.producer.informer import Informer
from aqualib.producer.producer import Producer
from aqualib.producer.profile import Profile
from aqualib.producer.reclaims import ReclaimTicket
from aqualib.topology import place
from aqualib.transports import select

IDLE_WAIT_S: Final = 0.02
"""Seconds until the clock is looked at again. Doubled, a request waits that much longer for its
start, and samples are less even."""

STEADY_MARGIN: Final = 1.35
"""What counts as steady, in terms of the mean rate: random arrivals stay below it nearly always,
and twice the mean is far above it, and above what the informer takes for pressure. Doubled, the
burst itself counts as steady."""

STEADY_QUEUE_S: Final = 1.0
"""Waiting requests that are steady, as the time in which so many arrive. Doubled, memory is offered
while a second more of requests waits."""

QUEUE_MARGIN_S: Final = 2.0
"""Waiting requests beyond the steady ones before memory is taken back, as time: a machine that is
busy for a moment is not a burst. Doubled, the reclaim comes two seconds later."""

LONGEST_QUEUE_S: Final = 6.0
"""Waiting requests beyond which more are turned away, as time: twice of what takes memory back. A
machine that others have made slower works off no more than that when the burst is over. Doubled,
memory is offered again that much later there."""

CALM_S: Final = 2.0
"""Seconds without pressure before memory is offered again. Doubled, the story is as much longer."""


class RecordingProducer(Producer):
    """A producer that keeps the tickets of its reclaims, for the report."""

    tickets: list[ReclaimTicket]

    def reclaim(self, nbytes: int, deadline_s: float | None = None) -> ReclaimTicket:
        """Take memory back, and remember it."""
        ticket = super().reclaim(nbytes, deadline_s)
        self.tickets.append(ticket)
        return ticket

    def measures(self) -> list[ReclaimMeasure]:
        """Say what the finished reclaims took."""
        return [
            ReclaimMeasure(bytes=t.returned_bytes, first_slab_ms=first_ms, total_ms=t.total_ms)
            for t in self.tickets
            if (first_ms := t.first_slab_ms) is not None and t.total_ms is not None
        ]


def run(settings: ProducerSettings, parent: Parent) -> None:
    """Serve images and lend memory until told to finish."""
    scale = settings.scale
    torch.set_num_threads(settings.threads)
    transport = select(settings.transport, settings.device)
    memory = EmulatedMemory(scale.memory_bytes)
    allowance = CountedMemoryLimit(memory, least_bytes=scale.memory_bytes - scale.offer_bytes)
    service = ImageService(scale, allowance, transport.device, seed=settings.seed)
    capacity_per_s = service.images_per_s(scale.spare_images)
    base_per_s = scale.quiet_load * capacity_per_s
    service.most_waiting = round(LONGEST_QUEUE_S * base_per_s)
    parent.news(
        f"a U-Net serves {capacity_per_s:.0f} images/s, {scale.spare_images} at a time, and"
        f" {service.images_per_s(8):.0f} images/s, 8 at a time; {base_per_s:.0f}/s are asked"
    )
    arrivals = Arrivals(base_per_s, seed=settings.seed, now_s=time.monotonic())
    loop = TorchLoop(
        allowance,
        queue_length=lambda: service.queue_length,
        requests_per_s=lambda: arrivals.seen_per_s,
    )
    profile = Profile(
        slab_bytes=scale.slab_bytes,
        spare_bytes=scale.offer_bytes,
        steady_requests_per_s=STEADY_MARGIN * base_per_s,
        steady_queue_length=round(STEADY_QUEUE_S * base_per_s),
        queue_margin=round(QUEUE_MARGIN_S * base_per_s),
        least_offer_bytes=scale.slab_bytes,
        calm_s=CALM_S,
    )
    with (
        CoordinatorClient(settings.coordinator_url, settings.token) as link,
        RecordingProducer(
            PRODUCER_ID,
            transport=transport,
            link=link,
            endpoint=settings.socket,
            identity=replace(place(transport.device), model="unet"),
            slab_bytes=scale.slab_bytes,
            device=memory,
        ) as producer,
    ):
        producer.tickets = []
        with Informer(producer, loop, profile, poll_s=0.1):
            next_sample_s = 0.0
            while not parent.finished.is_set():
                now_s = time.monotonic()
                arrivals.per_s = parent.wants.load_factor * base_per_s
                service.request(arrivals.due(now_s))
                if now_s >= next_sample_s:
                    next_sample_s = now_s + SAMPLE_INTERVAL_S
                    parent.tell(
                        ProducerSample(
                            at_s=now_s,
                            arrivals_per_s=arrivals.per_s,
                            queue_length=service.queue_length,
                            batch=service.batch,
                            images=service.images,
                            memory_total_bytes=allowance.total_bytes,
                            memory_used_bytes=allowance.own_bytes,
                            offered_bytes=producer.offered_bytes,
                            leased_bytes=producer.leased_bytes,
                            reclaims=producer.measures(),
                        )
                    )
                if service.is_idle:
                    parent.finished.wait(IDLE_WAIT_S)
                else:
                    service.step()
                    loop.step_ended()


if __name__ == "__main__":
    run_program(run, ProducerSettings)
