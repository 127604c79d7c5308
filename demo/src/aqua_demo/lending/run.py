"""Runs the story: starts the processes, drives the load, listens, and judges what happened.

The parent does no work of its own and is on no data path. It owns the order of things: the
coordinator, then the producer, then (when memory is on offer) the consumer; load doubled and halved
at the turns of the story; then an uninterrupted run of the same generation in a process of its own,
and the comparison.
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import RenderableType

from aqua_client import CoordinatorClient
from aqua_demo.lending.phases import (
    TITLES,
    DemoPhase,
    Observation,
    StallTimer,
    goals,
    next_phase,
    served_share,
)
from aqua_demo.lending.record import RunRecord
from aqua_demo.lending.report import DemoReport, make_report
from aqua_demo.lending.view import picture
from aqua_demo.messages import (
    SAMPLE_INTERVAL_S,
    Command,
    ConsumerResult,
    ConsumerSample,
    ConsumerSettings,
    Failure,
    LogLine,
    ProducerSample,
    ProducerSettings,
    Report,
)
from aqua_demo.processes import START_LIMIT_S, Child, DemoCoordinator, DemoError, ProcessGroup
from aqua_demo.scale import DemoScale, compute_threads
from aqua_demo.view import ConsoleView
from aqua_protocol import TransportKind, format_bytes
from aqua_protocol.errors import error_from_body
from aqua_protocol.leases import PlacementPlan
from aqualib.topology import place
from aqualib.transports import select

STALL_LIMIT_S: Final = 180.0
"""Seconds without progress after which a phase is stuck: on two busy cores each takes 10 to 20.
Doubled, a demo that hangs says so three minutes later."""

RELIEF_AFTER_S: Final = 30.0
"""Seconds. The service was measured at the start. When others have made the machine slower since,
its queue never empties and memory is never offered again; so after that long no more images are
asked for than half of what it has served. Doubled, such a machine waits half a minute longer."""

LEAST_LOAD_FACTOR: Final = 1 / 32
"""Share of the usual images at which relief ends: of a machine forty times slower than it was
measured the service then needs half. Doubled, it may need all of it."""

QUIET: Final = (DemoPhase.HARVEST, DemoPhase.CALM, DemoPhase.AGAIN)
"""Phases that need memory to be on offer."""

BURST_FACTOR: Final = 2.0
"""Arrivals in the burst over the usual: twice `quiet_load` of the capacity that lent memory leaves,
so that random arrivals queue. Doubled, the queue grows for as long as the burst lasts."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose: the options of the command, as `aqua-demo --help` explains them."""

    size: str
    scale: DemoScale
    transport: TransportKind | None
    seed: int
    checksum: bool
    corrupt_one_byte: bool
    logs: Path
    pairings: PlacementPlan | None = None
    coordinator: DemoCoordinator | None = None


class DemoRun:
    """One run of the demo, shown by a view."""

    def __init__(self, options: Options, view: ConsoleView) -> None:
        self._options = options
        self._scale = options.scale
        self._view = view
        self.record: Final = RunRecord(time.monotonic())
        self._phase = DemoPhase.START
        self._seen = Observation()
        self._patience = StallTimer(time.monotonic())
        self._relief_due_s = RELIEF_AFTER_S
        self._relief_from = self._seen.producer
        self._quiet_factor = 1.0
        self._producer: Child | None = None
        self._results: dict[str, ConsumerResult] = {}

    def run(self) -> DemoReport:
        """Tell the story from beginning to end, and judge it.

        Raises:
            AquaError: A process failed, or a phase did not come to its end; the reason is in it.
        """
        # What cannot work is said before anything is started.
        producer_device, consumer_device = choose_devices(self._options.transport)
        # The same for all programs; the runs of the LLM differ in nothing but what is added.
        common: dict[str, Any] = {
            "scale": self._scale,
            "seed": self._options.seed,
            "transport": self._options.transport,
            "device": consumer_device,
            "threads": compute_threads(),
        }
        with (
            # Sockets are in a short path: a Unix address holds 107 bytes.
            tempfile.TemporaryDirectory(prefix="aqua-demo-") as scratch,
            ProcessGroup(self._options.logs) as group,
        ):
            self._enter(DemoPhase.START)
            coordinator = self._options.coordinator or DemoCoordinator.start(group, Path(scratch))
            self._note("coordinator", f"listens on {coordinator.url}")
            if self._options.pairings is not None:
                with CoordinatorClient(
                    coordinator.url, coordinator.operator_token, timeout_s=START_LIMIT_S
                ) as client:
                    client.put_placements(self._options.pairings)
                self._note("coordinator", "obeys the plan: the LLM borrows from the image service")
            producer = self._producer = group.start_program(
                "producer",
                "programs.producer",
                ProducerSettings(
                    **common | {"device": producer_device},
                    coordinator_url=coordinator.url,
                    token=coordinator.producer_token,
                    socket=Path(scratch) / "image-service.sock",
                ),
            )
            self._listen_until(group, lambda: self._phase is DemoPhase.PREFILL)
            consumer = group.start_program(
                "consumer",
                "programs.consumer",
                ConsumerSettings(
                    **common,
                    coordinator_url=coordinator.url,
                    token=coordinator.consumer_token,
                    checksum=self._options.checksum,
                ),
            )
            self._listen_until(group, lambda: self._phase is DemoPhase.BURST)
            self._set_load(BURST_FACTOR)
            if self._options.corrupt_one_byte:
                consumer.send(Command(corrupt_one_byte=True))
            self._listen_until(group, lambda: self._phase is DemoPhase.CALM)
            self._set_load(self._quiet_factor)
            self._listen_until(group, lambda: self._phase is DemoPhase.VERIFY)
            consumer.send(Command(finish=True))
            self._listen_until(group, lambda: "consumer" in self._results)
            harvested = self._results["consumer"]
            consumer.finish()
            producer.finish()
            group.start_program(
                "reference",
                "programs.consumer",
                ConsumerSettings(**common, answer_lengths=list(map(len, harvested.answers))),
            )
            self._listen_until(group, lambda: "reference" in self._results)
            self.record.close(time.monotonic())
        return make_report(
            self.record,
            harvested,
            self._results["reference"],
            kv_bytes=self._scale.kv_bytes,
            scale=self._options.size,
            seed=self._options.seed,
            checksum=self._options.checksum,
            prompt_tokens=self._scale.prompt_tokens,
        )

    def _listen_until(self, group: ProcessGroup, is_over: Callable[[], bool]) -> None:
        while not is_over():
            try:
                heard = group.heard.get(timeout=SAMPLE_INTERVAL_S)
            except queue.Empty:
                pass
            else:
                name, verifying = heard.name, self._phase is DemoPhase.VERIFY
                if heard.report is not None:
                    self._take(name, heard.report)
                elif name not in self._results and not (name == "producer" and verifying):
                    raise group.died(name)
            phase = next_phase(self._phase, self._seen, self._scale)
            if phase is not self._phase:
                self._enter(phase)
            self._view.show(self._picture)
            group.require_services()
            self._require_progress()

    def _take(self, name: str, report: Report) -> None:
        match report:
            case ProducerSample():
                before = self._seen.producer
                if report.offered_bytes >= self._scale.offer_bytes > before.offered_bytes:
                    self._note("producer", f"offers {format_bytes(report.offered_bytes)}")
                for measure in report.reclaims[len(before.reclaims) :]:
                    self._note("producer", f"took back {measure}")
                self.record.producer.append(report)
                self._seen = replace(self._seen, producer=report)
            case ConsumerSample() if name == "consumer":
                self.record.consumer.append(report)
                self._seen = replace(self._seen, consumer=report)
            case ConsumerSample():
                self._seen = replace(self._seen, compared=report.tokens)
            case LogLine(text=text):
                # Each program has a handful of these, and on a busy machine they are far apart.
                self._patience = StallTimer(time.monotonic())
                self._note(name, text)
            case ConsumerResult():
                self._results[name] = report
            case Failure(error=error):
                raise error_from_body(error)

    def _enter(self, phase: DemoPhase) -> None:
        self._phase = phase
        now_s = time.monotonic()
        self._patience = StallTimer(now_s)
        self._relief_due_s = RELIEF_AFTER_S
        self._relief_from = self._seen.producer
        self._seen = replace(
            self._seen,
            before=self._seen.consumer,
            reclaims_before=len(self._seen.producer.reclaims),
        )
        self.record.enter(phase, now_s)
        self._note(phase.value, TITLES[phase])

    def _require_progress(self) -> None:
        found = goals(self._phase, self._seen, self._scale)
        stalled_s = self._patience.stalled_s(found, time.monotonic())
        if self._phase in QUIET and stalled_s > self._relief_due_s:
            self._relief_due_s += RELIEF_AFTER_S
            if self._quiet_factor > LEAST_LOAD_FACTOR:
                share = served_share(self._relief_from, self._seen.producer)
                self._quiet_factor = max(LEAST_LOAD_FACTOR, self._quiet_factor * min(1, share) / 2)
                self._relief_from = self._seen.producer
                self._set_load(self._quiet_factor)
                self._note("busy", f"{self._quiet_factor:.0%} of the usual images are asked for")
        if stalled_s > STALL_LIMIT_S:
            missing = [goal.text for goal in found if not goal.is_met]
            raise DemoError(
                f"phase {self._phase.value} has made no progress for {STALL_LIMIT_S:.0f} s; still"
                f" missing: {', '.join(missing)}",
                remedy="Give the machine two idle cores, or try --quick; the logs in"
                f" {self._options.logs} say what each process did.",
            )

    def _set_load(self, factor: float) -> None:
        assert self._producer is not None, "the service has been started"
        self._producer.send(Command(load_factor=factor))

    def _note(self, source: str, text: str) -> None:
        self._view.tell(source, text, time.monotonic() - self.record.started_s)

    def _picture(self) -> RenderableType:
        return picture(self.record, goals(self._phase, self._seen, self._scale))


def choose_devices(kind: TransportKind | None) -> tuple[str | None, str | None]:
    """Choose devices for producer and consumer: GPUs that can lend to each other, or one for both.

    None is the transport's own default.

    Raises:
        TransportUnavailableError: The transport cannot work here; says why and what to do.
    """
    first = select(kind).device
    if first.type == "cpu":
        return None, None
    domain = place(first).domain
    for index in range(torch.cuda.device_count()):
        other = torch.device("cuda", index)
        if other != first and place(other).domain == domain:
            return str(first), str(other)
    return str(first), str(first)
