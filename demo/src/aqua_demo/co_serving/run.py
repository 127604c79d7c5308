"""The co-serving demo: people's requests in bursts on a real vLLM, an offline file in the gaps.

Four engines meet the same minutes by turns (`engines.race`):

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
from pathlib import Path
from typing import Any, Final

from aqua_cli import write_text
from aqua_demo.co_serving.report import CoServingReport, make_report
from aqua_demo.co_serving.view import picture
from aqua_demo.engines.online_load import OnlineLoad, read_offline_file
from aqua_demo.engines.race import AT_ONCE, Order, Run, ServedEngine, race, serve
from aqua_demo.engines.run import EngineDemo
from aqua_demo.engines.scale import FULL, QUICK, co_serving_options

SCALES: Final = {"full": FULL, "quick": QUICK}


class CoServingDemoRun(EngineDemo):
    """One run of the demo; the offline file has more requests than are begun."""

    def run(self) -> CoServingReport:
        """Tell the story from beginning to end, and judge it.

        Raises:
            DemoError: An engine failed; the end of its log is in the message.
        """
        scale, view, seed = self.scale, self.view, self.seed
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aqua-demo-")))
            model = scratch / "model"
            self.write_inputs(model)

            def start(name: str, aqua: dict[str, Any] | None = None) -> ServedEngine:
                view.tell(name, "starts; a vLLM takes its time")
                engine = ServedEngine(self.folder / name, model, scale.engine_options(), aqua)
                stack.callback(engine.close)
                return engine

            engines = {name: start(name) for name in ("online", "control", "offline")}
            for engine in engines.values():
                engine.await_ready()
            alone = self.measure_alone(lambda load: serve(engines["online"], Order(load)))
            engines["ours"] = start("ours", co_serving_options(alone))
            engines["ours"].await_ready()
            load = OnlineLoad.on_off(
                self.lengths, 1 / alone["service_s"], seed, on_requests=scale.on_requests
            )
            view.tell(
                "race",
                f"{scale.online_count} online requests in bursts, in {load.length_s:.0f} s of each"
                " engine; one that has no turn stands still, its clock too",
            )
            filling = Order(OnlineLoad([]), self.file, AT_ONCE, seconds=load.length_s, drains=True)
            self.runs = race(
                engines,
                {
                    "online": Order(load, seed=seed),
                    "control": Order(load, seed=seed),
                    "ours": Order(load, self.file, AT_ONCE, drains=True, seed=seed),
                    "offline": filling,
                },
                lambda: view.show(lambda: picture(engines, scale.online_count)),
            )
            stock = self._answer_rest(engines["offline"], scratch)
        return make_report(self.runs, stock, **self.settings())

    def _answer_rest(self, engine: ServedEngine, scratch: Path) -> dict[str, Run]:
        """Stock vLLM's answer to each offline request that `ours` began, by name."""
        stock = {row["name"]: row for row in self.runs["offline"]["offline"]}
        begun = {row["name"] for row in self.runs["ours"]["offline"]}
        missing = [
            line for line in read_offline_file(self.file) if line["custom_id"] in begun - set(stock)
        ]
        if missing:
            self.view.tell("offline", f"stock vLLM answers {len(missing)} more, to compare")
            rest = scratch / "rest.jsonl"
            write_text(rest, "\n".join(map(json.dumps, missing)) + "\n")
            # As many at once as there are: a request that waits is begun all the same.
            run = serve(engine, Order(OnlineLoad([]), rest, len(missing), drains=True))
            stock |= {row["name"]: row for row in run["offline"]}
        return stock
