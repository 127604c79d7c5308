"""The co-serving demo: people's requests in bursts on a real vLLM, an offline file in the gaps.

Four engines meet the same minutes by turns (`co_serving_race`):

    online      vLLM as it is, with the online requests alone
    control     another one: how far equal engines are apart is the noise of all figures
    ours        co-serves: the same online requests, and the offline file beside them
    offline     vLLM as it is, with the offline file alone: what would fill the gaps at best

Online requests come in streams that are on and off, as many as keep one of them under way on
average; first a few come one by one, which says how fast the machine is and what the objectives
are. When the last online request has ended no further offline one begins, and those that have begun
are waited for. An offline answer that `offline` has not given by then is asked for afterwards, so
that every answer has one of stock vLLM beside it.

No step-time profile is measured: the engine keeps offline work to a fixed budget, as it does for
everyone who has not measured one.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aqua_cli import write_text
from aqua_demo.co_serving_race import Order, Run, ServedEngine, measure_alone, race
from aqua_demo.co_serving_report import CoServingReport, make_report
from aqua_demo.co_serving_view import picture
from aqua_demo.online_load import (
    OnlineLoad,
    draw_lengths,
    read_offline_file,
    write_offline_file,
)
from aqua_demo.scale import LlamaSize
from aqua_demo.view import ConsoleView
from aqua_protocol import MIB

OBJECTIVE_FACTOR: Final = 2.0
"""Objectives over what requests take alone: tight. Doubled, steps in gaps may be twice as long."""
AT_ONCE: Final = 24
"""Offline requests that are there at any time: more than fit into memory. Doubled, more wait."""
STORE_BYTES: Final = 256 * MIB
"""For checkpoints: more than all offline requests have. Doubled, no more of it is used."""


@dataclass(frozen=True, slots=True)
class CoServingScale:
    """Sizes of one run."""

    llama: LlamaSize
    online_count: int
    on_requests: int  # Of a burst, on average.
    alone_count: int  # One by one, for the objectives: fewer scatter more.
    offline_count: int  # Of the file, more than are begun.
    blocks: int = 96  # Of keys and values: fewer than the requests of a burst want.
    block_tokens: int = 32
    max_tokens: int = 1024

    def engine_options(self) -> dict[str, Any]:
        """Options of each engine, as vLLM calls them."""
        return {
            "max_model_len": self.max_tokens,
            "block_size": self.block_tokens,
            "max_num_batched_tokens": self.max_tokens // 2,
            "num_gpu_blocks_override": self.blocks,
            "dtype": "float32",
            "enforce_eager": True,
            "gpu_memory_utilization": 0.1,
            "enable_prefix_caching": False,
        }


SCALES: Final = {
    "full": CoServingScale(
        llama=LlamaSize(layers=8, heads=4, head_dim=64, feed_forward=512),
        online_count=160,
        on_requests=20,
        alone_count=20,
        offline_count=2000,
    ),
    "quick": CoServingScale(
        llama=LlamaSize(layers=4, heads=2, head_dim=64, feed_forward=256),
        online_count=40,
        on_requests=10,
        alone_count=6,
        offline_count=600,
        blocks=64,
    ),
}


class CoServingDemoRun:
    """One run of the demo, shown by a view.

    Args:
        size: One of `SCALES`.
        seed: Of weights, arrivals, lengths and prompts.
        folder: Gets the offline file and the engines' logs.
        view: Shows how it goes.
    """

    def __init__(self, size: str, seed: int, folder: Path, view: ConsoleView) -> None:
        self._size, self._scale = size, SCALES[size]
        self._seed = seed
        self._folder = folder
        self._view = view
        self.runs: dict[str, Run] = {}

    def run(self) -> CoServingReport:
        """Tell the story from beginning to end, and judge it.

        Raises:
            DemoError: An engine failed; the end of its log is in the message.
        """
        scale, view = self._scale, self._view
        begun_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aqua-demo-")))
            view.tell("start", "a small Llama, and an offline file of its own prompts")
            model = scratch / "model"
            self._write_model(model)
            offline = self._folder / "offline.jsonl"
            longest = scale.max_tokens // 2
            write_offline_file(offline, scale.offline_count, self._seed, longest)

            def start(name: str, aqua: dict[str, Any] | None = None) -> ServedEngine:
                view.tell(name, "starts; a vLLM takes its time")
                job = {"model": str(model), "aqua": aqua, "engine": scale.engine_options()}
                engine = ServedEngine(self._folder / name, job)
                stack.callback(engine.close)
                return engine

            engines = {name: start(name) for name in ("online", "control", "offline")}
            for engine in engines.values():
                engine.await_ready()
            lengths = draw_lengths(scale.online_count, self._seed)
            alone = measure_alone(engines["online"], lengths[: scale.alone_count], OBJECTIVE_FACTOR)
            view.tell(
                "online",
                f"a request takes {alone['service_s']:.2f} s by itself; objectives:"
                f" {1000 * alone['ttft_s']:.0f} ms to the first token,"
                f" {1000 * alone['tpot_s']:.0f} ms between two",
            )
            engines["ours"] = start("ours", co_serving_options(alone))
            engines["ours"].await_ready()
            load = OnlineLoad.on_off(
                lengths, 1 / alone["service_s"], self._seed, on_requests=scale.on_requests
            )
            view.tell(
                "race",
                f"{scale.online_count} online requests in bursts, in {load.length_s:.0f} s of each"
                " engine; one that has no turn stands still, its clock too",
            )
            self.runs = race(
                engines,
                {
                    "online": Order(load, seed=self._seed),
                    "control": Order(load, seed=self._seed),
                    "ours": Order(load, offline, AT_ONCE, drains=True, seed=self._seed),
                    "offline": Order(
                        OnlineLoad([]), offline, AT_ONCE, seconds=load.length_s, drains=True
                    ),
                },
                lambda: view.show(lambda: picture(engines, scale.online_count)),
            )
            stock = self._answer_rest(engines["offline"], offline, scratch)
        return make_report(
            self.runs,
            stock,
            objectives=alone,
            scale=self._size,
            seed=self._seed,
            took_s=time.monotonic() - begun_s,
        )

    def _answer_rest(self, engine: ServedEngine, offline: Path, scratch: Path) -> dict[str, Run]:
        """Stock vLLM's answer to each offline request that `ours` began, by name."""
        stock = {row["name"]: row for row in self.runs["offline"]["offline"]}
        begun = {row["name"] for row in self.runs["ours"]["offline"]}
        missing = [
            line for line in read_offline_file(offline) if line["custom_id"] in begun - set(stock)
        ]
        if missing:
            self._view.tell("offline", f"stock vLLM answers {len(missing)} more, to compare")
            rest = scratch / "rest.jsonl"
            write_text(rest, "\n".join(map(json.dumps, missing)) + "\n")
            # As many at once as there are: a request that waits is begun all the same.
            order = Order(OnlineLoad([]), rest, len(missing), drains=True)
            run = race({engine.name: engine}, {engine.name: order})[engine.name]
            stock |= {row["name"]: row for row in run["offline"]}
        return stock

    def _write_model(self, folder: Path) -> None:
        # Here, because it imports transformers, which takes seconds.
        from aqua_demo.llama import write_llama

        scale = self._scale
        write_llama(folder, scale.llama, max_tokens=scale.max_tokens, seed=self._seed)


def co_serving_options(objectives: dict[str, float]) -> dict[str, Any]:
    """Options of the adapter that keep to `ttft_s` and `tpot_s`, seconds, for online requests."""
    return {
        "mode": "checkpoint",
        "is_offline": True,
        "store_bytes": STORE_BYTES,
        "co_serving": {name: objectives[name] for name in ("ttft_s", "tpot_s")},
    }
