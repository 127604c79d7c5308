"""The batch demo: one file of offline requests on harvested memory and harvested time.

A producer lends memory. Two real vLLMs serve: one has people's requests in bursts, the other is for
the batch. The same file comes three times through OpenAI's client into `aqua batch serve`, while
people ask the same things:

    stock     in file order, on the engine for it: the answers to compare with
    ordered   in BlendServe's order, on that engine: what order brings, and a second run in which
              people are alone, whose difference from the first is the noise of all their figures
    ours      in that order, on both: the people's engine co-serves, checkpoints lie in the memory
              that is lent, and two services share the work

In the third run the producer's own load rises, so that it takes its memory back; then one of the
two services and the engine for the batch are killed (SIGKILL).

No step-time profile is measured: the engine keeps offline work to a fixed budget, as it does for
everyone who has not measured one.
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType

from aqua_demo.batch.client import AT_ONCE, BatchDispatcher, OfflineBatch
from aqua_demo.batch.report import (
    DRAINED,
    OUTSIDE,
    PAGED_OUT,
    BatchEvents,
    BatchReport,
    make_report,
)
from aqua_demo.batch.view import picture
from aqua_demo.engines.api_server import EXACT, MODEL_NAME, ApiServer, OnlineClient
from aqua_demo.engines.online_load import OnlineLoad, read_offline_file
from aqua_demo.engines.race import Run
from aqua_demo.engines.run import EngineDemo
from aqua_demo.engines.scale import FULL, QUICK, co_serving_options
from aqua_demo.messages import (
    CONSUMER_ID,
    Command,
    Failure,
    LogLine,
    ProducerSample,
    ProducerSettings,
    Report,
)
from aqua_demo.processes import START_LIMIT_S, Child, DemoCoordinator, DemoError, ProcessGroup
from aqua_demo.scale import QUICK as QUICK_IMAGES
from aqua_protocol import MIB, format_bytes
from aqua_protocol.errors import error_from_body

LOOK_S: Final = 0.25
"""Seconds between looks at the batch. Doubled, times of answers are half as exact."""
ONLINE_SEEDS: Final = 1 << 50
"""Of people's prompts; fixed, so that no offline prompt has one of these seeds."""
ONLINE_SHARE: Final = 0.5
"""Online requests under way on average, if each took as long as alone: on cores that all engines
share it takes longer. Doubled, they queue."""
BURST_AT: Final = 0.15
"""Share of the batch after which images are asked for. Doubled, the first kill comes before."""
BURST_FACTOR: Final = 8.0
"""Of the usual images: no chance. Doubled, the burst takes more of the processor."""
DISPATCHER_AT: Final = 0.4
"""Share of the batch after which a service is killed. Doubled, hardly anything is left to do."""
ENGINE_AT: Final = 0.6
"""Share of the batch after which an engine is killed. Doubled, it never is."""
STALL_LIMIT_S: Final = 600.0
"""Seconds without a new answer after which a batch is stuck. Doubled, a demo that hangs says so ten
minutes later."""


IMAGES: Final = replace(QUICK_IMAGES, memory_bytes=41 * MIB, image_bytes=8 * MIB, quiet_load=0.1)
"""A service that lends some 30 MiB and leaves the engines most of the processor."""

SCALES: Final = {
    "full": replace(FULL, online_count=100, offline_count=400, longest_prompt=256, topics=16),
    "quick": replace(
        QUICK, online_count=30, offline_count=200, longest_prompt=256, topics=8, blocks=FULL.blocks
    ),
}


@dataclass
class BatchDemoRun(EngineDemo):
    """One run of the demo.

    Attributes:
        done: What happened to the last pass.
        moments: How the producer stood, again and again, by seconds since the batch began.
    """

    done: BatchEvents = field(default_factory=BatchEvents, init=False)
    moments: list[ProducerSample] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._group: ProcessGroup
        self._producer: Child
        self._engines: dict[str, ApiServer] = {}
        self._dispatchers: list[BatchDispatcher] = []
        self._sample = ProducerSample(at_s=0.0)
        self._reclaims_before = 0

    def run(self) -> BatchReport:
        """Tell the story from beginning to end, and judge it.

        Raises:
            AquaError: A process failed, or a batch did not come to its end.
        """
        with (
            # Sockets are in a short path: a Unix address holds 107 bytes.
            tempfile.TemporaryDirectory(prefix="aqua-demo-") as folder,
            ProcessGroup(self.folder) as self._group,
        ):
            scratch = Path(folder)
            model = scratch / "model"
            self.write_inputs(model, {"model": MODEL_NAME, **EXACT})
            coordinator = DemoCoordinator.start(self._group, scratch)
            assert coordinator.consumer_token is not None, "one of our own asks for tokens"
            self.view.tell("coordinator", f"listens on {coordinator.url}")
            self._start_producer(coordinator, scratch)
            offline = self._start_engine("offline", model)
            alone = self.measure_alone(lambda load: OnlineClient(offline, load, ONLINE_SEEDS).run())
            online = self._start_engine(
                "online",
                model,
                co_serving_options(alone) | {"is_offline": False},
                {
                    "AQUA_COORDINATOR_URL": coordinator.url,
                    "AQUA_TOKEN": coordinator.consumer_token,
                    "AQUA_MEMBER": CONSUMER_ID,
                    "AQUA_SLAB_BYTES": str(IMAGES.slab_bytes),
                    "AQUA_WANTED_BYTES": str(IMAGES.offer_bytes),
                },
            )
            load = OnlineLoad.on_off(
                self.lengths,
                ONLINE_SHARE / alone["service_s"],
                self.seed,
                on_requests=self.scale.on_requests,
            )
            for name, engines, order, count in (
                ("stock", [offline], "fcfs", 1),
                ("ordered", [offline], "foresight", 1),
                ("ours", [offline, online], "foresight", 2),
            ):
                with self._dispatching(scratch / name, engines, order, count):
                    self.runs[name] = self._serve(name, online, load)
        names = [line["custom_id"] for line in read_offline_file(self.file)]
        return make_report(self.runs, self.done, names, **self.settings())

    # --- Processes ------------------------------------------------------------------------

    def _start_producer(self, coordinator: DemoCoordinator, scratch: Path) -> None:
        self._producer = self._group.start_program(
            "producer",
            "programs.producer",
            ProducerSettings(
                scale=IMAGES,
                seed=self.seed,
                transport=None,
                device=None,
                threads=1,
                coordinator_url=coordinator.url,
                token=coordinator.producer_token,
                socket=scratch / "image-service.sock",
            ),
        )
        until_s = time.monotonic() + START_LIMIT_S
        wanted_bytes = IMAGES.offer_bytes
        while self._sample.offered_bytes < wanted_bytes and time.monotonic() < until_s:
            self._hear(wait_s=LOOK_S)
        if not self._sample.offered_bytes:
            raise DemoError(f"no memory is on offer after {START_LIMIT_S:.0f} s")
        self.view.tell("producer", f"offers {format_bytes(self._sample.offered_bytes)}")

    def _start_engine(
        self,
        name: str,
        model: Path,
        aqua: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> ApiServer:
        self.view.tell(name, "starts; a vLLM takes its time")
        options = self.scale.engine_options(prefix_caching=aqua is None)
        server = ApiServer(self._group, f"{name}-engine", model, options, aqua, environment)
        server.await_ready(self._hear)
        self._engines[name] = server
        return server

    @contextmanager
    def _dispatching(
        self, folder: Path, engines: list[ApiServer], order: str, count: int
    ) -> Iterator[None]:
        urls = [engine.url for engine in engines]
        for number in range(count):
            self._dispatchers.append(
                BatchDispatcher(
                    self._group,
                    f"dispatcher-{folder.name}-{number + 1}",
                    folder,
                    urls,
                    order=order,
                    model=folder.with_name("model"),
                    at_once=AT_ONCE // count,
                )
            )
        yield
        for dispatcher in self._living:
            dispatcher.stop()
        self._dispatchers.clear()

    @property
    def _living(self) -> list[BatchDispatcher]:
        return [each for each in self._dispatchers if not each.is_killed]

    # --- A run ----------------------------------------------------------------------------

    def _serve(self, name: str, online: ApiServer, load: OnlineLoad) -> Run:
        """One run: people and the batch, until both have their answers."""
        self.view.tell(name, TITLES[name])
        before = online.counters()
        batch = OfflineBatch(self._living[0], self.file)
        clients = OnlineClient(online, load, ONLINE_SEEDS)
        heard_s, answered = time.monotonic(), 0

        def draw() -> RenderableType:
            return picture(
                TITLES[name],
                online=(clients.answered, len(clients.rows)),
                offline=(batch.answered, self.scale.offline_count),
                memory=(self._sample.leased_bytes, self._sample.offered_bytes),
                dead={each.name for each in self._dispatchers if each.is_killed}
                | {each.name for each in self._engines.values() if each.is_killed},
            )

        while not (batch.has_ended and clients.has_ended):
            self._hear(wait_s=LOOK_S)
            self._group.require_services()
            if not batch.has_ended:
                batch.look(self._living[0])
            if batch.answered > answered or batch.has_ended:
                heard_s, answered = time.monotonic(), batch.answered
            if time.monotonic() - heard_s > STALL_LIMIT_S:
                raise DemoError(
                    f"no offline request was answered for {STALL_LIMIT_S:.0f} s; {answered} were",
                    remedy=f"The logs in {self.folder} say what each process did.",
                )
            if name == "ours":
                self._disturb(batch, added(online.counters(), before))
            self.view.show(draw)
        if name == "ours":
            self.done.counted = added(online.counters(), before)
        found = batch.run(self._living[0]) | clients.run()
        self.view.tell(
            name,
            f"{len(found['offline'])} offline requests in {found['progress'][-1][0]:.0f} s,"
            f" {len(found['online'])} online ones in {found['seconds']:.0f} s",
        )
        return found

    def _disturb(self, batch: OfflineBatch, counted: Mapping[str, float]) -> None:
        """Do what is due: the producer's burst, and the two kills; take note of it all."""
        done, share = self.done, batch.answered / self.scale.offline_count
        now_s = batch.age_s
        sample = self._sample
        self.moments.append(sample.model_copy(update={"at_s": now_s}))
        # Each when it has something to lose: here, what offline requests outside have left.
        has_left = counted.get(PAGED_OUT, 0) > 0 and counted.get(OUTSIDE, 0) > 0
        if done.burst_s is None and share >= BURST_AT and has_left:
            done.burst_s, self._reclaims_before = now_s, len(sample.reclaims)
            self._producer.send(Command(load_factor=BURST_FACTOR))
            self.view.tell("burst", "more images are asked for: the memory is taken back")
        if done.burst_s is not None and not batch.has_ended:
            done.reclaims = sample.reclaims[self._reclaims_before :]
            if done.reclaims and done.reclaimed_s is None:
                done.reclaimed_s = now_s
                moved = format_bytes(int(counted.get(DRAINED, 0)))
                self.view.tell("producer", f"took back {done.reclaims[0]}; {moved} moved")
                self._producer.send(Command())
        if done.dispatcher_s is None and share >= DISPATCHER_AT:
            victim = self._living[0]
            if held := victim.running():
                victim.kill()
                done.dispatcher_s, done.dispatcher_held = now_s, held
                self.view.tell(victim.name, f"killed over {held} requests")
        if done.engine_s is None and share >= ENGINE_AT:
            engine = self._engines["offline"]
            if held := int(engine.counters()["vllm:num_requests_running"]):
                engine.kill()
                done.engine_s, done.engine_held = now_s, held
                self.view.tell(engine.name, f"killed over {held} requests")

    # --- Messages --------------------------------------------------------------------------

    def _hear(self, wait_s: float = 0.0) -> None:
        """Take what the producer says, for so long."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                heard = self._group.heard.get(timeout=max(0.001, until_s - time.monotonic()))
            except queue.Empty:
                return
            if heard.report is None:
                raise self._group.died(heard.name)
            self._take(heard.report)

    def _take(self, report: Report) -> None:
        match report:
            case ProducerSample():
                self._sample = report
            case LogLine(text=text):
                self.view.tell("producer", text)
            case Failure(error=error):
                raise error_from_body(error)


def added(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What counters have counted since."""
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


TITLES: Final = {
    "stock": "the batch in file order on its own engine, people on theirs",
    "ordered": "the same in BlendServe's order",
    "ours": "both engines take the batch; memory, a dispatcher and an engine go away",
}
