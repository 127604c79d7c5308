"""Online requests beside offline ones on a real vLLM: what they lose, and how full the gaps become.

The question of ConServe's section 6. Five engines run as servers, with their real input thread, and
take turns of a fraction of a second in which the others are stopped and their clocks stand still
(`aqua_demo.engines.paused_clock`). So all meet the same requests on the same machine at the same
time. Equal engines may differ for as long as they live, so each load has engines of its own:

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
requests one by one, by turns with a second one, at the 99th percentile; `aqua-profile steps`
measures the step-time profile.

Online requests are served in order of arrival, as by vLLM, so that what they lose is what offline
work costs them. With `--policy first-token`, the adapter's default, they take turns where they
want more memory than there is: first tokens come sooner, and answers pause.

An online request that arrives aborts the step of offline work that runs: `step_aborts` is how many
were, `aborts_per_online_request_max` how many for one request, and `abort_safepoint_intervals` how
many intervals between two of its safepoints an aborted step took to stop, on average: 2 at most,
and what it takes to tell the scheduler; `late_aborts` took more than 2.
`negative_control_differs`: with zeros in the place of checkpoints answers differ.

Five loads of 500 requests take hours on two cores. With `--records FILE` each load is kept when it
has ended, and a run goes on with those that are missing.

What it does not show: a GPU's numbers. On a CPU a decode costs nearly as much as a token of a
prompt, so next to no offline token fits beside online decodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from _burst_race import SHAPE, note
from _bursts import read_trace
from _records import Records
from aqua_demo.co_serving.report import figures_of
from aqua_demo.engines.online_load import (
    OUTPUT_MEDIAN,
    Lengths,
    OnlineLoad,
    draw_lengths,
    write_offline_file,
)
from aqua_demo.engines.race import (
    AT_ONCE,
    Engines,
    Order,
    Run,
    ServedEngine,
    differing,
    measure_alone,
    offline_rate,
    race,
)
from aqua_demo.engines.report import VICTIMS
from aqua_demo.engines.scale import FULL, co_serving_options
from aqua_schedulers.cfs import PolicyName
from vllm_profiler import (
    ENGINE_PYTHON,
    PROFILER,
    api_server,
    require_environments,
    write_model,
)

ENGINES: Final = ("online", "control", "offline", "priority", "ours")
VARIATIONS: Final = (0.5, 1.0, 2.0, 4.0)
ALONE_COUNT: Final = 40
"""Requests one by one, for how long one takes and for the objectives. Doubled, these scatter less
and begin later."""
OFFLINE_COUNT: Final = 20_000
"""Of the offline file, many times what is answered. Doubled, it takes seconds longer to write."""
OFFLINE_ALONE_S: Final = 60.0
"""Of a load, in which offline work alone is measured beside. Doubled, a load takes that longer."""
FAULTY_COUNT: Final = 40
"""Requests of the negative control, at once: offline ones must leave. Doubled, more of them do."""
BARS: Final = {
    "ttft_p99_ratio": ("<=", 1.10),
    "tpot_p99_ratio": ("<=", 1.05),
    "offline_share_of_ideal": (">=", 0.9),
}


def main(  # noqa: PLR0913 - a command has as many arguments as options
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    with_raw: Annotated[bool, typer.Option("--raw", help="With all requests, as JSON.")] = False,
    trace: Annotated[Path | None, typer.Option(help="CSV of arrivals and lengths.")] = None,
    requests: Annotated[int, typer.Option(help="Online requests of a load.", min=20)] = 500,
    loads: Annotated[int, typer.Option(help="Loads, from the calmest on.", min=1, max=5)] = 5,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.", min=0)] = 0,
    output_median: Annotated[
        int, typer.Option(help="Tokens of an online answer; fewer take less time.", min=8)
    ] = OUTPUT_MEDIAN,
    policy: Annotated[
        PolicyName, typer.Option(help="Order of online requests under co-serving.")
    ] = PolicyName.FCFS,
    step_profile: Annotated[
        Path | None, typer.Option(help="Else it is measured.", exists=True, dir_okay=False)
    ] = None,
    records: Annotated[Path | None, typer.Option(help="Keeps loads; a run goes on here.")] = None,
) -> None:
    """Measure co-serving against engines without offline work."""
    require_environments()
    run = {"requests": requests, "seed": seed, "trace": str(trace or ""), "policy": policy.value}
    kept = Records(records, run | {"output_median": output_median})
    # Else engines that have no turn stay stopped for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="aqua-coserving-") as scratch:
        folder = Path(scratch)
        model, offline = folder / "model", folder / "offline.jsonl"
        write_model(model, SHAPE)
        write_offline_file(offline, OFFLINE_COUNT, seed, FULL.longest_prompt)
        given = None if trace is None else read_trace(trace, FULL.blocks * FULL.block_tokens // 4)
        lengths = (
            [(p, o) for _, p, o in given] if given else draw_lengths(requests, seed, output_median)
        )
        # By turns, as in the loads: alone, an engine finds its caches as it left them.
        with started(folder, model, ["online", "control"]) as engines:
            inputs = measure_alone(
                lambda load: race(engines, dict.fromkeys(engines, Order(load)))["online"],
                lengths[:ALONE_COUNT],
            )
        note(", ".join(f"{name} {value:.3g}" for name, value in inputs.items()))
        profile = step_profile or measure_steps(model, folder)
        step_times = json.loads(profile.read_text())
        aqua = co_serving_options(inputs, step_profile=str(profile)) | {"policy": policy.value}
        made = dict(make_loads(lengths, 1 / inputs["service_s"], seed)[:loads])
        runs: dict[str, dict[str, Run]] = {}

        def measured(name: str, load: OnlineLoad) -> dict[str, float | None]:
            note(f"{name}: {len(load.arrivals)} requests in {load.length_s:.0f} s")
            with started(folder, model, ENGINES, aqua) as engines:
                runs[name] = race(engines, orders(engines, load, offline, seed))
            return compare(runs[name])

        found = {}
        for name, load in ({"trace": OnlineLoad(given)} if given else made).items():
            found[name] = kept.once(name, partial(measured, name, load))
            note(f"{name}: {json.dumps(found[name])}")
        with started(folder, model, ["online", "offline", "ours"], aqua) as engines:
            engines["ours"].fault.touch()
            at_once = OnlineLoad.at_once(draw_lengths(FAULTY_COUNT, seed), 1.0)
            faulty = race(engines, orders(engines, at_once, offline, seed + 1))
    summary = summarize(found) | {"negative_control_differs": differing_answers(faulty) > 0}
    if as_json or with_raw:
        machine = {"cpus": os.cpu_count(), "machine": platform.processor() or platform.machine()}
        summary |= {"loads": found, "inputs": inputs, "machine": machine}
        samples = {"raw": {"runs": runs, "faulty": faulty, "step_profile": step_times}}
        print(json.dumps(summary | (samples if with_raw else {})))
    else:
        show(summary)


@contextlib.contextmanager
def started(
    folder: Path, model: Path, names: Iterable[str], aqua: Mapping[str, Any] | None = None
) -> Iterator[dict[str, ServedEngine]]:
    """Engines that have started beside each other, `ours` with these options of the adapter."""
    with contextlib.ExitStack() as stack:
        engines = {}
        for name in names:
            note(f"starting {name}")
            options = FULL.engine_options()
            if name == "priority":
                options["scheduling_policy"] = "priority"
            of_ours = aqua if name == "ours" else None
            engine = ServedEngine(folder / name, model, options, of_ours, str(ENGINE_PYTHON))
            stack.callback(engine.close)
            engines[name] = engine
        for engine in engines.values():
            engine.await_ready()
        yield engines


def measure_steps(model: Path, folder: Path) -> Path:
    """The step-time profile of this engine, measured as its operator would."""
    note("measuring step times")
    flags = ["--scheduler-cls", "aqualib.engines.vllm.AquaScheduler"]
    flags += ["--middleware", "aqualib.engines.vllm.AquaMiddleware"]
    options = FULL.engine_options()
    for name in ("max_model_len", "max_num_batched_tokens"):
        flags += ["--" + name.replace("_", "-"), str(options[name])]
    token = {"AQUA_ADMIN_TOKEN": "of-this-benchmark"}
    profiles = folder / "profiles"
    with api_server(model, folder / "steps.log", *flags, **token) as url:
        command = [str(PROFILER / "aqua-profile"), "steps", "--endpoint", url]
        command += ["--folder", str(profiles)]
        # What it says is shown beside what goes on.
        if subprocess.run(command, env=os.environ | token, stdout=2, check=False).returncode:
            sys.exit("the step times could not be measured")
    return next(profiles.glob("*.json"))


def make_loads(lengths: Lengths, rate: float, seed: int) -> list[tuple[str, OnlineLoad]]:
    """The loads and their names, from the calmest on."""
    return [
        *((f"cv {cv:g}", OnlineLoad.gamma(lengths, rate, cv, seed)) for cv in VARIATIONS),
        ("on/off", OnlineLoad.on_off(lengths, rate, seed)),
    ]


def orders(engines: Engines, load: OnlineLoad, offline: Path, seed: int) -> dict[str, Order]:
    """Online requests for all but one, offline ones for all that have them beside."""
    found = dict.fromkeys(engines, Order(load, offline, AT_ONCE, seed=seed))
    for name in {"online", "control"} & set(engines):
        found[name] = Order(load, seed=seed)
    alone_s = min(OFFLINE_ALONE_S, load.length_s)
    found["offline"] = Order(OnlineLoad([]), offline, AT_ONCE, seconds=alone_s)
    return found


# --- Figures --------------------------------------------------------------------------------


def compare(runs: dict[str, Run]) -> dict[str, float | None]:
    """The keys of one load; None for a share of gaps that are not there."""
    ours = runs["ours"]
    found = figures_of(runs).model_dump()
    priority = figures_of(runs | {"ours": runs["priority"]}).model_dump()
    for key in BARS:
        found[f"vllm_priority_{key}"] = priority[key]
    return found | {
        "offline_only_tokens_per_s": offline_rate(runs["offline"]),
        "checkpoint_stall_share": ours["counted"]["aqua:kv_step_wait_seconds_total"]
        / ours["seconds"],
        "online_victims": ours["counted"].get(VICTIMS, 0),
        "differing_answers": differing_answers(runs),
        "step_aborts": ours["counted"].get("aqua:step_aborts_total", 0),
        "aborts_per_online_request_max": ours["levels"].get("aqua:step_aborts_per_arrival", 0),
        "abort_safepoint_intervals": abort_intervals(ours["counted"]),
        "late_aborts": ours["counted"].get("aqua:step_aborts_late_total", 0),
    }


def abort_intervals(counted: Mapping[str, float]) -> float | None:
    """Intervals between safepoints that an abort took, on average; None without an abort."""
    intervals_s = counted.get("aqua:step_abort_safepoint_seconds_total", 0)
    return counted["aqua:step_abort_seconds_total"] / intervals_s if intervals_s else None


def summarize(found: dict[str, dict[str, float | None]]) -> dict[str, Any]:
    """Medians over the loads that have a key, and the worst of what has a bar."""
    columns = {
        key: [value for each in found.values() if (value := each[key]) is not None]
        for key in next(iter(found.values()))
    }
    summary: dict[str, Any] = {
        key: statistics.median(values) if values else None for key, values in columns.items()
    }
    counts = ("differing_answers", "online_victims", "offline_preemptions", "step_aborts")
    for key in (*counts, "late_aborts"):
        summary[key] = sum(columns[key])
    summary["aborts_per_online_request_max"] = max(columns["aborts_per_online_request_max"])
    summary["worst"] = {
        key: (max if relation == "<=" else min)(columns[key], default=None)
        for key, (relation, _) in BARS.items()
    }
    return summary


def differing_answers(runs: dict[str, Run]) -> int:
    """Requests that `ours` answered otherwise than vLLM by itself, as far as both did."""
    return sum(differing(runs["ours"][who], runs[who][who]) for who in ("online", "offline"))


def show(summary: dict[str, Any]) -> None:
    """The figures beside their bars."""
    print(f"{'':40}{'median':>8}{'worst':>8}{'bar':>8}")
    for name, (relation, bar) in BARS.items():
        shown = "".join(
            "       -" if v is None else f"{v:8.3f}"
            for v in (summary[name], summary["worst"][name])
        )
        print(f"{name:40}{shown}{relation + f'{bar:g}':>8}")
    for name, value in summary.items():
        if name not in BARS and name != "worst":
            print(f"{name:40}{'-' if value is None else f'{value:.3f}':>8}")


if __name__ == "__main__":
    typer.run(main)
