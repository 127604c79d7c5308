"""A burst on a real vLLM: first come first served beside time slices, with and without Aqua.

The paper's experiment (section 9.3, Figures 1 and 8) on a CPU: requests at a rate that the engine
sustains, twice that rate for a while, then the first rate again. Memory for keys and values is
limited, so that the burst does not fit. Four schedulers meet the same requests in one run, each in
a fresh engine:

    fcfs        vLLM's own
    recompute   the paper's policy, preempted requests are computed again
    aqua        the paper's policy, preempted requests page into memory lent by another process
    best        our policy, likewise

The stable rate is a share of what the engine was measured to finish per second when it had all
requests at once. Lengths come from a seeded generator (log-normal, as chat logs are), or arrivals
and lengths from a trace (`t_s,prompt_tokens,output_tokens` as CSV, gzipped or not).

What it shows: waiting, slicing, and the cost of paging relative to that of computing, on one real
engine. What it does not: a GPU's numbers. A CPU computes a prompt slowly, so recomputing looks
worse than on a GPU, and memory is as near as the store, so paging looks better than over PCIe.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Self

import typer

ENGINE: Final = Path(__file__).with_name("_burst_engine.py")
ENGINE_PYTHON: Final = Path(__file__).resolve().parents[1] / ".venv-engine/bin/python"

Arrival = tuple[float, int, int]

BLOCK_TOKENS: Final = 32
STORE_BYTES: Final = 256 << 20
SHAPE: Final = {"layers": 8, "hidden": 256}
SLICE_ITERATIONS: Final = 8
IDLE: Final[list[Arrival]] = [(0.0, 64, 100)] * 8
"""Requests that fit into memory together: nobody waits, so nothing is to be decided."""
IDLE_ROUNDS: Final = 9

HINT: Final = "`make .venv-engine/.ready` makes an environment with vLLM for CPUs"

BARS: Final = {
    "ttft_p99_gain": (">=", 5.0),
    "ttft_max_gain": (">=", 5.0),
    "completion_ratio_vs_fcfs": ("<=", 1.5),
    "completion_max_ratio_vs_fcfs": ("<=", 1.05),
    "throughput_ratio_vs_fcfs": (">=", 1.0),
    "completion_gain_vs_recompute": (">=", 2.0),
    "idle_throughput_ratio": (">=", 0.97),
}
BEST_BARS: Final = BARS | {"completion_ratio_vs_fcfs": ("<=", 1.25)}


def main(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trace: Annotated[Path | None, typer.Option(help="CSV of arrivals and lengths.")] = None,
    requests: Annotated[int, typer.Option(help="Requests of the generator.", min=20)] = 110,
    seed: Annotated[int, typer.Option(help="Of the generator.")] = 0,
    blocks: Annotated[int, typer.Option(help="KV blocks of 32 tokens.", min=24)] = 64,
    stable: Annotated[float, typer.Option(help="Stable rate over capacity.", min=0.1)] = 0.8,
    slice_iterations: Annotated[int, typer.Option(help="Engine steps of a slice.", min=1)] = (
        SLICE_ITERATIONS
    ),
    plot: Annotated[Path | None, typer.Option(help="Where to draw TTFT and TPOT (PNG).")] = None,
) -> None:
    """Measure a burst under four schedulers."""
    given = read_trace(trace, blocks) if trace is not None else None
    lengths = [(prompt, output) for _, prompt, output in given] if given else []
    lengths = lengths or draw_lengths(requests, seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aqua-burst-")))
        python = str(ENGINE_PYTHON if ENGINE_PYTHON.exists() else sys.executable)
        note(f"engines run on {python}")
        model = folder / "model"
        write_model(python, model, SHAPE)
        environment = stack.enter_context(lending(python, folder))
        engines = {}
        for name, aqua in policies(slice_iterations).items():
            note(f"starting {name}: {aqua or 'vLLM as it is'}")
            bench = Bench(python, model, blocks, aqua, environment)
            engines[name] = stack.enter_context(bench)
        rows = engines["fcfs"].run([(0.0, *pair) for pair in lengths[:60]])["rows"]
        capacity = len(rows) / max(row["end_s"] for row in rows)
        note(f"capacity: {capacity:.2f} requests/s with everything there at once")
        arrivals = given or burst(lengths, stable * capacity, seed)
        runs = {}
        for name, engine in engines.items():
            note(f"the burst on {name}")
            runs[name] = engine.run(arrivals) | {"idle": []}
        note("turns without contention")
        for _ in range(IDLE_ROUNDS):
            for name in ("fcfs", "aqua", "best"):
                runs[name]["idle"].append(engines[name].run(IDLE)["rows"])
    summary: dict[str, Any] = compare(runs, "aqua")
    summary["best"] = compare(runs, "best")
    if plot is not None:
        draw(runs, plot)
    if as_json:
        inputs = {
            "capacity_requests_per_s": capacity,
            "stable": stable,
            "blocks": blocks,
            "block_tokens": BLOCK_TOKENS,
            "slice_iterations": slice_iterations,
            "seed": seed,
            "arrivals": arrivals,
            "model": SHAPE,
        }
        machine = {"cpus": os.cpu_count(), "machine": platform.processor() or platform.machine()}
        print(json.dumps(summary | {"raw": runs, "inputs": inputs, "machine": machine}))
    else:
        show(summary)


def policies(slice_iterations: int) -> dict[str, dict[str, Any] | None]:
    """Options of the adapter for each scheduler of the comparison."""
    cfs = {"policy": "cfs", "slice_iterations": slice_iterations, "prefix_tier": False}
    paging = {**cfs, "store_bytes": STORE_BYTES}
    return {
        "fcfs": None,
        "recompute": {**cfs, "mode": "recompute"},
        "aqua": paging,
        "best": {**paging, "policy": "first-token"},
    }


# --- Requests -------------------------------------------------------------------------------


def draw_lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and output tokens: log-normal with long tails, cut to what the engine holds."""
    rng = random.Random(seed)

    def draw(median: float, spread: float, low: int, high: int) -> int:
        return round(min(high, max(low, median * math.exp(rng.gauss(0, spread)))))

    return [(draw(110, 0.6, 16, 480), draw(90, 0.8, 8, 480)) for _ in range(count)]


def burst(lengths: list[tuple[int, int]], rate: float, seed: int) -> list[Arrival]:
    """A quarter at the stable rate, half at twice that, a quarter at the stable rate again."""
    rng = random.Random(seed + 1)
    arrivals: list[Arrival] = []
    now_s, quarter = 0.0, len(lengths) // 4
    for index, (prompt, output) in enumerate(lengths):
        is_burst = quarter <= index < len(lengths) - quarter
        now_s += rng.expovariate(rate * (2 if is_burst else 1))
        arrivals.append((now_s, prompt, output))
    return arrivals


def read_trace(path: Path, blocks: int) -> list[Arrival]:
    """Arrivals of a file; lengths are cut to half of the engine's memory."""
    most = blocks * BLOCK_TOKENS // 4
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = list(csv.DictReader(content.decode().splitlines()))
    return [
        (
            float(row["t_s"]),
            min(most, max(1, int(row["prompt_tokens"]))),
            min(most, max(2, int(row["output_tokens"]))),
        )
        for row in rows
    ]


# --- Engines --------------------------------------------------------------------------------


class Bench:
    """One engine in a process of its own; a context manager.

    Args:
        python: An interpreter with vLLM.
        model: Folder of the model.
        blocks: KV blocks of the engine.
        aqua: Options of the adapter; None for vLLM's own scheduler.
        environment: Of a consumer of Aqua.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        blocks: int,
        aqua: dict[str, Any] | None,
        environment: dict[str, str],
    ) -> None:
        is_paging = aqua is not None and aqua.get("mode") != "recompute"
        job = {
            "model": str(model),
            "aqua": aqua,
            "leased_bytes": STORE_BYTES // 2 if is_paging else 0,
            "engine": {
                "max_model_len": 1024,
                "num_gpu_blocks_override": blocks,
                "block_size": BLOCK_TOKENS,
                "max_num_batched_tokens": 512,
                "max_num_seqs": 256,
                "gpu_memory_utilization": 0.1,
                "dtype": "float32",
                "enforce_eager": True,
                "enable_prefix_caching": False,
                "disable_log_stats": True,
                "seed": 0,
            },
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `__exit__`
        self._process = subprocess.Popen(
            [python, str(ENGINE), json.dumps(job)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def run(self, arrivals: list[Arrival]) -> dict[str, Any]:
        """Serve these; the rows and what else was measured."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arrivals) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        return answer

    def _answer(self) -> Any:  # noqa: ANN401 - whatever was asked
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self._log.seek(0)
        sys.exit(f"{self._log.read()[-3000:]}\nan engine failed; {HINT}")


@contextlib.contextmanager
def lending(python: str, folder: Path) -> Iterator[dict[str, str]]:
    """A coordinator and a producer; yields the environment of a consumer."""
    with contextlib.ExitStack() as stack:
        coordinator = subprocess.Popen(
            [
                *(python, "-m", "aqua_coordinator", "serve"),
                *("--port", "0", "--data-dir", str(folder / "d")),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(coordinator.wait)
        stack.callback(coordinator.terminate)
        assert coordinator.stderr is not None
        url = next(json.loads(line)["url"] for line in coordinator.stderr if '"listening"' in line)
        lender = subprocess.Popen(
            [python, str(ENGINE), "lend", url, str(STORE_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | place("lender"),
        )
        stack.callback(lender.wait)
        assert lender.stdin is not None
        assert lender.stdout is not None
        stack.callback(lender.stdin.close)
        lender.stdout.readline()
        yield place("engine") | {
            "AQUA_COORDINATOR_URL": url,
            "AQUA_SLAB_BYTES": str(4 << 20),
            "AQUA_WANTED_BYTES": str(STORE_BYTES // 2),
        }


def write_model(python: str, model: Path, shape: dict[str, int]) -> None:
    """Write the model that all engines run."""
    command = [python, str(ENGINE), "model", str(model), json.dumps(shape)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"no model could be written; {HINT}")


def place(gpu: str) -> dict[str, str]:
    """Where a member says it is: on one machine, each on a device of its own."""
    return {"AQUA_NODE": "bench", "AQUA_DOMAIN": "bench", "AQUA_GPU_UUID": f"GPU-{gpu}"}


# --- Figures --------------------------------------------------------------------------------


def compare(runs: dict[str, dict[str, Any]], name: str) -> dict[str, float]:
    """The keys of one policy against the baselines."""
    fcfs, ours, recompute = (runs[n]["rows"] for n in ("fcfs", name, "recompute"))
    idle = zip(runs["fcfs"]["idle"], runs[name]["idle"], strict=True)
    return {
        "ttft_p99_gain": p99(ttfts(fcfs)) / p99(ttfts(ours)),
        "ttft_max_gain": max(ttfts(fcfs)) / max(ttfts(ours)),
        "completion_ratio_vs_fcfs": mean_completion(ours) / mean_completion(fcfs),
        "completion_max_ratio_vs_fcfs": max(completions(ours)) / max(completions(fcfs)),
        "throughput_ratio_vs_fcfs": throughput(ours) / throughput(fcfs),
        "completion_gain_vs_recompute": mean_completion(recompute) / mean_completion(ours),
        "idle_throughput_ratio": statistics.median(
            throughput(with_aqua) / throughput(without) for without, with_aqua in idle
        ),
    }


def ttfts(rows: list[dict[str, float]]) -> list[float]:
    """Seconds from arrival to the first token."""
    return [row["first_s"] - row["arrival_s"] for row in rows]


def completions(rows: list[dict[str, float]]) -> list[float]:
    """Seconds from arrival to the last token."""
    return [row["end_s"] - row["arrival_s"] for row in rows]


def mean_completion(rows: list[dict[str, float]]) -> float:
    """Mean of `completions`."""
    return statistics.fmean(completions(rows))


def throughput(rows: list[dict[str, float]]) -> float:
    """Output tokens per second of the whole run."""
    return sum(row["output_tokens"] for row in rows) / max(row["end_s"] for row in rows)


def p99(values: list[float]) -> float:
    """The 99th percentile, interpolated."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """TTFT and time per output token by request, as in the paper's Figures 1 and 8."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    labels = {
        "fcfs": "vLLM, first come first served",
        "recompute": "time slices, recomputing",
        "aqua": "time slices with Aqua (paper's policy)",
        "best": "first tokens first with Aqua (ours)",
    }
    for name, label in labels.items():
        rows = sorted(runs[name]["rows"], key=lambda row: row["arrival_s"])
        tpots = [
            1000 * (row["end_s"] - row["first_s"]) / max(1, row["output_tokens"] - 1)
            for row in rows
        ]
        above.plot(ttfts(rows), label=label)
        below.plot(tpots, label=label)
    above.set_ylabel("time to first token (s)")
    below.set_ylabel("time per output token (ms)")
    below.set_xlabel("request, by arrival")
    above.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show(summary: dict[str, Any]) -> None:
    """The figures beside their bars."""
    best = summary["best"]
    print(f"{'':32}{'paper':>8}{'bar':>8}{'best':>8}{'bar':>8}")
    for name, (relation, bar) in BARS.items():
        bars = f"{relation}{bar:g}", f"{BEST_BARS[name][0]}{BEST_BARS[name][1]:g}"
        print(f"{name:32}{summary[name]:8.2f}{bars[0]:>8}{best[name]:8.2f}{bars[1]:>8}")


def note(text: str) -> None:
    """Say what goes on, where it does not disturb a reader of the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
