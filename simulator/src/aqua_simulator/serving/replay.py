"""Replay of a recorded engine run: the same requests, the same engine, predicted times.

Reads a run as LLMServingSim's bench records it (`vllm_real_<gpu>_<model>_requests.csv[.gz]` and
`..._meta.json`) beside the kernel tables of the same GPU, serves the recorded arrivals with
`Engine`, and compares what the users saw.

One constant may be calibrated: the host overhead per step, chosen so that the first part of the
run (by arrivals) shows the recorded time per output token. The rest of the run never enters it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from aqua_protocol.decoders import DecoderModel
from aqua_protocol.errors import ConfigError
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory
from aqua_simulator.serving.request import Arrival, Served, summary
from aqua_simulator.timing.evaluation import PROFILED_MODELS
from aqua_simulator.timing.fit import Fit, fit_samples
from aqua_simulator.timing.iteration import IterationTime, from_kernels
from aqua_simulator.timing.profiles import read_folder, rows_of

_NAME: Final = re.compile(r"vllm_real_(?P<gpu>[A-Za-z0-9-]+)_(?P<model>.+)_requests\.csv(?:\.gz)?")

COMPARED: Final = (
    *("makespan_s", "tokens_per_s", "output_tokens_per_s", "ttft_mean_s", "ttft_p99_s"),
    *("tpot_mean_s", "tpot_p99_s", "completion_mean_s", "completion_p99_s"),
)
"""Rows of the comparison."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded run.

    Attributes:
        served: What the users saw, in seconds since the first arrival.
        block_count, block_tokens: The engine's KV memory.
    """

    gpu: str
    model_key: str
    model: DecoderModel
    served: tuple[Served, ...]
    settings: EngineSettings
    block_count: int
    block_tokens: int

    @property
    def arrivals(self) -> list[Arrival]:
        """The recorded requests."""
        return [
            Arrival(row.request_id, row.arrival_s, row.prompt_tokens, row.output_tokens)
            for row in self.served
        ]


def read_recordings(folder: Path) -> list[Recording]:
    """All recordings of a folder.

    Raises:
        ConfigError: None, or one that lacks its description or a column.
    """
    found = []
    for path in sorted(folder.glob("vllm_real_*_requests.csv*")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        meta = folder / f"vllm_real_{match['gpu']}_{match['model']}_meta.json"
        if not meta.is_file():
            raise ConfigError(f"{path.name} has no {meta.name}", remedy="Keep both in one folder.")
        if match["model"] not in PROFILED_MODELS:
            known = ", ".join(PROFILED_MODELS)
            raise ConfigError(f"{path.name}: unknown model", remedy=f"Known: {known}.")
        try:
            found.append(_read(path, json.loads(meta.read_text()), match))
        except KeyError as missing:
            raise ConfigError(f"{path.name} or {meta.name} lacks {missing}") from missing
    if not found:
        raise ConfigError(
            f"no recorded run in {folder}", remedy="Expected vllm_real_*_requests.csv[.gz]."
        )
    return found


def _read(path: Path, meta: dict[str, Any], match: re.Match[str]) -> Recording:
    rows = list(rows_of(path))
    # Queued, not sent: the clock of the front end differs, and its tokenizer is not the engine's.
    start = min(float(row["queued_ts"]) for row in rows)
    served = tuple(
        Served(
            row["request_id"],
            float(row["queued_ts"]) - start,
            float(row["scheduled_ts"]) - start,
            float(row["first_token_ts"]) - start,
            float(row["last_token_ts"]) - start,
            int(row["input_toks"]),
            int(row["output_toks"]),
            0,
        )
        for row in rows
    )
    model = PROFILED_MODELS[match["model"]]
    width = int(meta.get("engine_kwargs", {}).get("tensor_parallel_size", 1))
    if width != 1:
        raise ConfigError(f"{path.name} ran on {width} GPUs", remedy="Replay single-GPU runs.")
    scheduler = meta["resolved_config"]["scheduler_config"]
    settings = EngineSettings(
        max_num_batched_tokens=int(scheduler["max_num_batched_tokens"]),
        max_num_seqs=int(scheduler["max_num_seqs"]),
        steps_in_flight=2 if scheduler.get("async_scheduling") else 1,
        kv_bytes_per_token=model.kv_bytes_per_token,
    )
    cache = meta["kv_cache"]
    return Recording(
        match["gpu"],
        match["model"],
        model,
        served,
        settings,
        int(cache["num_gpu_blocks"]),
        int(cache["block_size"]),
    )


def simulate(recording: Recording, time_of: IterationTime) -> tuple[list[Served], Engine]:
    """Serve the recorded arrivals."""
    memory = PagedMemory(recording.block_count, recording.block_tokens)
    engine = Engine(recording.gpu, recording.settings, time_of, memory)
    return engine.run(recording.arrivals), engine


def calibrate(recording: Recording, time_of: IterationTime, *, first: float) -> IterationTime:
    """Choose the host overhead from the first part of the run.

    The simulated time per output token of the first `first` of the requests (by arrival) is made
    equal to the recorded one by bisection; 0 if the tables alone are already too slow.
    """
    ordered = sorted(recording.served, key=lambda row: row.arrival_s)
    chosen = {row.request_id for row in ordered[: max(1, int(first * len(ordered)))]}
    target = _tpot([row for row in recording.served if row.request_id in chosen])

    def tpot(overhead_s: float) -> float:
        served, _ = simulate(recording, replace(time_of, overhead_s=overhead_s))
        return _tpot([row for row in served if row.request_id in chosen])

    low, high = 0.0, HIGHEST_OVERHEAD_S
    if tpot(low) >= target:
        return replace(time_of, overhead_s=low)
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if tpot(middle) < target else (low, middle)
    return replace(time_of, overhead_s=(low + high) / 2)


HIGHEST_OVERHEAD_S: Final = 0.02
"""Seconds of host time per step, far above any seen (2.6 ms on an H100 host). Doubled, the search
for it takes one step more for the same precision."""


def _tpot(rows: Sequence[Served]) -> float:
    times = [row.tpot_s for row in rows if row.output_tokens > 1]
    return sum(times) / len(times)


def compare(recording: Recording, served: Sequence[Served]) -> list[dict[str, Any]]:
    """Recorded against simulated: name, both values, difference in percent."""
    real, ours = summary(recording.served), summary(served)
    return [
        {
            "name": name,
            "recorded": real[name],
            "simulated": ours[name],
            "difference_percent": (ours[name] / real[name] - 1.0) * 100.0,
        }
        for name in COMPARED
    ]


def iteration_time(folder: Path, recording: Recording, fit: Fit | None = None) -> IterationTime:
    """The recording's engine from kernel tables in the folder, or from a fit made before."""
    if fit is None:
        prefix = f"{recording.gpu}/{recording.model_key}/"
        fit = fit_samples(group for group in read_folder(folder) if group.key.startswith(prefix))
    return from_kernels(fit, recording.gpu, recording.model_key, recording.model)
