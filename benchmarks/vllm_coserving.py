"""Online requests beside offline ones on a real vLLM: what they lose, and how full the gaps become.

The question of ConServe's section 6. Five engines run as servers, with their real input thread, and
take turns of a fraction of a second in which the others are stopped and their clocks stand still
(`_paused_clock`). So all meet the same requests on the same machine at the same time:

    online      vLLM's own, without offline work
    control     another one: what differs between equal engines is the noise of all figures here
    priority    vLLM's own with its priorities, offline work beside
    ours        co-serving under Aqua, the same offline work beside
    offline     vLLM's own with the offline work alone, at first

Online requests come so that one is under way at any time, on average. Loads differ in how they
cluster: gamma-distributed gaps with a coefficient of variation from 0.5 to 4, and streams that are
on and off; or one load from a trace (`t_s,prompt_tokens,output_tokens` as CSV, gzipped or not). A
figure is the median over the loads, `worst` the worst; ratios are to the mean of `online` and
`control`. `offline_share_of_ideal` is over what `offline` would compute in the time in which the
online-only engines have nothing to do. Objectives are twice what an engine needs for online
requests one by one, at the 99th percentile; `aqua-profile steps` measures the step-time profile.

Steps are not aborted inside, so `aborts_per_online_request_max` is 0: an arrival waits for the step
that runs. `negative_control_differs`: with zeros in the place of checkpoints answers differ.

What it does not show: a GPU's numbers. On a CPU a decode costs nearly as much as a token of a
prompt, so next to no offline token fits beside online decodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Final

import typer

from _bursts import Arrival, Lengths, busy_s, draw_lengths, p99, read_trace
from _paused_clock import ProcessGroup
from vllm_burst import BLOCK_TOKENS, ENGINE_PYTHON, HINT, SHAPE, TURN_S, note, ttfts
from vllm_profiler import PROFILER, api_server, write_model

ENGINE: Final = Path(__file__).with_name("_served_engine.py")
STORE_BYTES: Final = 256 << 20
ENGINE_OPTIONS: Final = {
    "max_model_len": 1024,
    "block_size": BLOCK_TOKENS,
    "max_num_batched_tokens": 512,
    "dtype": "float32",
    "enforce_eager": True,
    "gpu_memory_utilization": 0.1,
    "enable_prefix_caching": False,
}
VARIATIONS: Final = (0.5, 1.0, 2.0, 4.0)
ON_SHARE: Final = 0.3
"""Of the time, in which the on/off load has all its requests. Doubled, there is less of a burst."""
ON_REQUESTS: Final = 20
"""Requests of an "on" on average. Doubled, bursts and pauses are twice as long."""
ALONE_COUNT: Final = 40
"""Requests one by one, for how long one takes and for the objectives. Doubled, these scatter less
and begin later."""
OBJECTIVE_FACTOR: Final = 2.0
"""Objectives over what requests take alone: tight. Doubled, steps in gaps may be twice as long."""
OFFLINE_COUNT: Final = 24
"""Offline requests that are there at any time: more than fit into memory. Doubled, more wait."""
OFFLINE_ALONE_S: Final = 60.0
"""Of a load, in which offline work alone is measured beside. Doubled, a load takes that longer."""
FAULTY_COUNT: Final = 40
"""Requests of the negative control, at once: offline ones must leave. Doubled, more of them do."""
BARS: Final = {
    "ttft_p99_ratio": ("<=", 1.10),
    "tpot_p99_ratio": ("<=", 1.05),
    "offline_share_of_ideal": (">=", 0.9),
}

Run = dict[str, Any]


def main(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    with_raw: Annotated[bool, typer.Option("--raw", help="With all requests, as JSON.")] = False,
    trace: Annotated[Path | None, typer.Option(help="CSV of arrivals and lengths.")] = None,
    requests: Annotated[int, typer.Option(help="Online requests of a load.", min=20)] = 500,
    loads: Annotated[int, typer.Option(help="Loads, from the calmest on.", min=1, max=5)] = 5,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.", min=0)] = 0,
    blocks: Annotated[int, typer.Option(help="KV blocks of 32 tokens.", min=32)] = 96,
    step_profile: Annotated[Path | None, typer.Option(help="Else it is measured.")] = None,
) -> None:
    """Measure co-serving against engines without offline work."""
    # Else engines that have no turn stay stopped for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aqua-coserving-")))
        model = folder / "model"
        write_model(model, SHAPE)

        def start(name: str, aqua: dict[str, Any] | None = None, **engine: Any) -> Served:  # noqa: ANN401 - vLLM's options
            note(f"starting {name}")
            engine |= {**ENGINE_OPTIONS, "num_gpu_blocks_override": blocks}
            job = {"model": str(model), "aqua": aqua, "engine": engine}
            served = Served(folder / name, job)
            stack.callback(served.close)
            return served

        engines = {name: start(name) for name in ("online", "control", "offline")}
        engines["priority"] = start("priority", scheduling_policy="priority")
        for each in engines.values():
            each.await_ready()
        given = None if trace is None else read_trace(trace, blocks * BLOCK_TOKENS // 4)
        lengths = [(p, o) for _, p, o in given] if given else draw_lengths(requests, seed)
        inputs = measure_alone(engines["online"], lengths, seed)
        aqua = {
            "mode": "checkpoint",
            "is_offline": True,
            "store_bytes": STORE_BYTES,
            "co_serving": {
                "ttft_s": inputs["ttft_s"],
                "tpot_s": inputs["tpot_s"],
                "step_profile": str(step_profile or measure_steps(model, folder)),
            },
        }
        ours = engines["ours"] = start("ours", aqua)
        ours.await_ready()
        made = make_loads(lengths, 1 / inputs["service_s"], seed)
        runs = {}
        for name, load in ({"trace": given} if given else dict(made[:loads])).items():
            note(f"{name}: {len(load)} requests in {load[-1][0]:.0f} s")
            runs[name] = race(engines, load, seed)
            note(json.dumps(compare(runs[name])))
        for name in ("control", "priority"):
            engines.pop(name).close()
        ours.fault.touch()
        at_once = [(1.0, *pair) for pair in draw_lengths(FAULTY_COUNT, seed)]
        faulty = race(engines, at_once, seed + 1)
    found = {name: compare(each) for name, each in runs.items()}
    summary = summarize(found) | {"negative_control_differs": differing(faulty) > 0}
    if as_json or with_raw:
        machine = {"cpus": os.cpu_count(), "machine": platform.processor() or platform.machine()}
        raw = {"raw": {"runs": runs, "faulty": faulty}} if with_raw else {}
        print(json.dumps(summary | {"loads": found, "inputs": inputs, "machine": machine} | raw))
    else:
        show(summary)


def measure_alone(online: Served, lengths: Lengths, seed: int) -> dict[str, float]:
    """What a request takes by itself; by it the objectives, and the rate of the loads."""
    rows: list[Run] = []
    for pair in lengths[:ALONE_COUNT]:
        rows += race({"online": online}, [(0.0, *pair)], seed)["online"]["online"]
    found = {
        "service_s": statistics.fmean(row["end_s"] for row in rows),
        "ttft_s": OBJECTIVE_FACTOR * p99(ttfts(rows)),
        "tpot_s": OBJECTIVE_FACTOR * p99(tpots(rows)),
    }
    note(", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    return found


def measure_steps(model: Path, folder: Path) -> Path:
    """A folder with the step-time profile of this engine, measured as its operator would."""
    note("measuring step times")
    flags = ["--scheduler-cls", "aqualib.engines.vllm.AquaScheduler"]
    flags += ["--middleware", "aqualib.engines.vllm.AquaMiddleware"]
    for name in ("max_model_len", "max_num_batched_tokens"):
        flags += ["--" + name.replace("_", "-"), str(ENGINE_OPTIONS[name])]
    token = {"AQUA_ADMIN_TOKEN": "of-this-benchmark"}
    profiles = folder / "profiles"
    with api_server(model, folder / "steps.log", *flags, **token) as url:
        command = [str(PROFILER / "aqua-profile"), "steps", "--endpoint", url]
        command += ["--folder", str(profiles)]
        # What it says is shown beside what goes on.
        if subprocess.run(command, env=os.environ | token, stdout=2, check=False).returncode:
            sys.exit("the step times could not be measured")
    return profiles


# --- Loads ----------------------------------------------------------------------------------


def make_loads(lengths: Lengths, rate: float, seed: int) -> list[tuple[str, list[Arrival]]]:
    """The loads and their names, from the calmest on."""
    return [
        *((f"cv {cv:g}", gamma_load(lengths, rate, cv, seed)) for cv in VARIATIONS),
        ("on/off", on_off_load(lengths, rate, seed)),
    ]


def gamma_load(lengths: Lengths, rate_per_s: float, cv: float, seed: int) -> list[Arrival]:
    """Arrivals with gamma-distributed gaps of that coefficient of variation."""
    rng = random.Random(seed)
    now_s = 0.0
    arrivals: list[Arrival] = []
    for pair in lengths:
        now_s += rng.gammavariate(1 / cv**2, cv**2 / rate_per_s)
        arrivals.append((now_s, *pair))
    return arrivals


def on_off_load(lengths: Lengths, rate_per_s: float, seed: int) -> list[Arrival]:
    """Poisson arrivals in part of the time, at a rate that makes up for the rest."""
    rng = random.Random(seed)
    now_s, left = 0.0, 0.0
    arrivals: list[Arrival] = []
    for pair in lengths:
        if left <= 0:
            left = rng.expovariate(1 / ON_REQUESTS)
            now_s += rng.expovariate(rate_per_s / (ON_REQUESTS * (1 - ON_SHARE)))
        now_s += rng.expovariate(rate_per_s / ON_SHARE)
        left -= 1
        arrivals.append((now_s, *pair))
    return arrivals


# --- Engines --------------------------------------------------------------------------------


class Served:
    """One engine and its clients, stopped while it has no turn.

    Args:
        place: Beginning of its files' names; the last part is what it is called.
        job: Model, options of the engine, and options of the adapter or None.

    Attributes:
        fault: A file that, once it is there, has checkpoints come back as zeros.
    """

    def __init__(self, place: Path, job: dict[str, Any]) -> None:
        self.has_offline = place.name not in {"online", "control"}
        self.is_alone = place.name == "offline"
        clock, self._log = place.with_suffix(".clock"), place.with_suffix(".log")
        self.fault = place.with_suffix(".fault")
        job |= {"clock": str(clock), "fault": str(self.fault)}
        self._group = ProcessGroup(
            [str(ENGINE_PYTHON), str(ENGINE), json.dumps(job)], clock, self._log
        )
        self._process = self._group.leader
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def await_ready(self) -> None:
        """Wait until it can be given orders; engines start beside each other."""
        self._checked(self._answers.get())
        self._group.pause()

    def close(self) -> None:
        """End it; harmless when repeated."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._group.resume()
        self._process.wait()
        self._reader.join()

    def order(self, load: list[Arrival], seed: int) -> None:
        """Have it serve these from its next turn on."""
        assert self._process.stdin is not None
        order = {
            "online": [] if self.is_alone else load,
            "offline": OFFLINE_COUNT if self.has_offline else 0,
            "seconds": min(OFFLINE_ALONE_S, load[-1][0]) if self.is_alone else 0.0,
            "seed": seed,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def turn(self, seconds: float | None) -> Run | None:
        """Let it run for so long, or to its end; what became of its requests, if all have ended."""
        self._group.resume()
        run: Run | None = None
        with contextlib.suppress(Empty):
            run = self._checked(self._answers.get(timeout=seconds))
        self._group.pause()
        return run

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                self._answers.put(json.loads(line.removeprefix("answer ")))
        self._answers.put(None)

    def _checked(self, answer: Any) -> Any:  # noqa: ANN401 - a run, or that it is ready
        if answer is None:
            sys.exit(f"{self._log.read_text()[-3000:]}\nan engine failed; {HINT}")
        return answer


def race(engines: dict[str, Served], load: list[Arrival], seed: int) -> dict[str, Run]:
    """All of them serve these by turns, those that can with offline work beside."""
    for engine in engines.values():
        engine.order(load, seed)
    order = list(engines)
    shuffler = random.Random(0)
    ended: dict[str, Run] = {}
    while len(ended) < len(engines):
        # The one that had the machine before leaves its caches: not always the same one.
        shuffler.shuffle(order)
        for name in order:
            is_last = len(engines) - len(ended) == 1
            if name in ended:
                continue
            if (run := engines[name].turn(None if is_last else TURN_S)) is not None:
                ended[name] = run
    return ended


# --- Figures --------------------------------------------------------------------------------


def compare(runs: dict[str, Run]) -> dict[str, float]:
    """The keys of one load."""
    alone = [runs["online"], runs["control"]]
    ttft_s = statistics.fmean(p99(ttfts(run["online"])) for run in alone)
    tpot_s = statistics.fmean(p99(tpots(run["online"])) for run in alone)
    busy = statistics.fmean(busy_share(run) for run in alone)
    ideal = (1 - busy) * offline_rate(runs["offline"])
    ours = runs["ours"]
    found = {"offline_share_of_ideal": offline_rate(ours) / ideal}
    for name, prefix in (("ours", ""), ("priority", "vllm_priority_"), ("control", "control_")):
        found[f"{prefix}ttft_p99_ratio"] = p99(ttfts(runs[name]["online"])) / ttft_s
        found[f"{prefix}tpot_p99_ratio"] = p99(tpots(runs[name]["online"])) / tpot_s
    return found | {
        "vllm_priority_offline_share_of_ideal": offline_rate(runs["priority"]) / ideal,
        "online_ttft_p99_s": ttft_s,
        "online_tpot_p99_s": tpot_s,
        "online_busy_share": busy,
        "offline_only_tokens_per_s": offline_rate(runs["offline"]),
        "checkpoint_stall_share": ours["counted"]["aqua:kv_step_wait_seconds_total"]
        / ours["seconds"],
        "online_victims": ours["counted"].get("aqua:online_preempted_before_offline_total", 0),
        "differing_answers": differing(runs),
        "aborts_per_online_request_max": 0,
    }


def summarize(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Medians over the loads, and the worst of what has a bar."""
    loads = list(found.values())
    summary: dict[str, Any] = {
        key: statistics.median(each[key] for each in loads) for key in loads[0]
    }
    for key in ("differing_answers", "online_victims"):
        summary[key] = sum(each[key] for each in loads)
    summary["worst"] = {
        key: (max if relation == "<=" else min)(each[key] for each in loads)
        for key, (relation, _) in BARS.items()
    }
    return summary


def differing(runs: dict[str, Run]) -> int:
    """Requests that `ours` answered otherwise than vLLM by itself, as far as both did."""
    pairs = [
        (ours["tokens"], stock["tokens"])
        for who in ("online", "offline")
        for ours, stock in zip(runs["ours"][who], runs[who][who], strict=False)
    ]
    return sum(any(a != b for a, b in zip(*pair, strict=False)) for pair in pairs)


def offline_rate(run: Run) -> float:
    """Tokens per second of offline requests, prompts and answers."""
    begun = [row for row in run["offline"] if row["tokens"]]
    tokens = sum(row["prompt_tokens"] + len(row["tokens"]) for row in begun)
    return float(tokens / run["seconds"])


def busy_share(run: Run) -> float:
    """Of the time, in which any online request was unfinished."""
    spans = [(row["arrival_s"], row["end_s"]) for row in run["online"]]
    return busy_s(spans) / float(run["seconds"])


def tpots(rows: Iterable[Run]) -> list[float]:
    """Seconds between two tokens of a request, on average."""
    return [(row["end_s"] - row["first_s"]) / max(1, row["output_tokens"] - 1) for row in rows]


def show(summary: dict[str, Any]) -> None:
    """The figures beside their bars."""
    print(f"{'':40}{'median':>8}{'worst':>8}{'bar':>8}")
    for name, (relation, bar) in BARS.items():
        worst = summary["worst"][name]
        print(f"{name:40}{summary[name]:8.3f}{worst:8.3f}{relation + f'{bar:g}':>8}")
    for name, value in summary.items():
        if name not in BARS and name != "worst":
            print(f"{name:40}{value:8.3f}")


if __name__ == "__main__":
    typer.run(main)
