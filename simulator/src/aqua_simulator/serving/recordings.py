"""Recorded runs of real engines, read from a folder: what was asked, what users saw, which engine.

Three kinds, told apart by name and content; `NAME_meta.json` beside one describes its engine:

- `NAME_requests.csv[.gz]`: a row for each request, with the engine's timestamps. In LLMServingSim's
  `vllm_real_GPU_MODEL_requests.csv` the name says GPU and model.
- `NAME.json`: the result of `vllm bench serve --save-result --save-detailed`, as the client saw it.
- `NAME.jsonl`: a request log, an object for each finished request, under names of
  `REQUEST_COLUMNS`.

A description may be old, short or missing. What it lacks falls back to the engine's arguments, then
to vLLM's defaults, then to what the GPU's memory leaves; every fallback is told in `assumed`. What
cannot be assumed is an error: which GPU and model, when requests came, what they were answered.

Source: vLLM `benchmarks/serve.py`, `engine/arg_utils.py` (0.28).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final

from aqua_protocol.decoders import DECODERS, DecoderModel
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GPUS, GpuModel
from aqua_simulator.serving.engine import EngineSettings
from aqua_simulator.serving.request import Arrival, Served
from aqua_simulator.serving.setup import kv_block_count
from aqua_simulator.timing.evaluation import PROFILED_MODELS
from aqua_simulator.timing.profiles import rows_of

_VLLM_REAL: Final = re.compile(r"vllm_real_(?P<gpu>[A-Za-z0-9-]+)_(?P<model>.+)")

REQUEST_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt": ("input_toks", "prompt_tokens", "prompt_len", "input_tokens"),
    "output": ("output_toks", "completion_tokens", "output_tokens", "output_len"),
    "queued": ("queued_ts", "arrival_time", "arrival_s", "start_time", "t_s"),
    "scheduled": ("scheduled_ts", "scheduled_s"),
    "first": ("first_token_ts", "first_token_time", "first_token_s"),
    "last": ("last_token_ts", "finish_time", "last_token_s"),
    "ttft": ("ttft", "ttft_s", "time_to_first_token"),
    "latency": ("latency", "e2e_latency", "latency_s"),
}
"""Names that engines and clients give to the columns of a request; the first found counts."""

_LARGE_BYTES: Final = 70 * 2**30
"""Fixed by vLLM: GPUs with more memory, but for the A100, get the larger defaults."""

_DEFAULT_MEMORY_SHARE: Final = 0.9
"""vLLM's `gpu_memory_utilization` until 0.22; later versions take 0.92. It cannot be doubled."""


MOST_TOKENS: Final = 10**8
"""Of a prompt or an answer that can be: more is a broken line. Doubled, nothing changes."""

MOST_SECONDS: Final = 1e11
"""Of a time that can be: since 1970 it is the year 5138, and more are milliseconds or a broken
line. Doubled, nothing changes."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded run.

    Attributes:
        gpu: As the file or its description names it.
        served: What the users saw, in seconds since the first arrival.
        block_count, block_tokens: The engine's KV memory.
        assumed: What the files do not say, and what was taken for it.
    """

    name: str
    gpu: str
    model_key: str
    model: DecoderModel
    served: tuple[Served, ...]
    settings: EngineSettings
    block_count: int
    block_tokens: int
    assumed: tuple[str, ...] = ()

    @property
    def arrivals(self) -> list[Arrival]:
        """The recorded requests."""
        return [
            Arrival(row.request_id, row.arrival_s, row.prompt_tokens, row.output_tokens)
            for row in self.served
        ]


@dataclass(frozen=True, slots=True)
class RecordingResult:
    """What a folder holds.

    Attributes:
        refused: Why a recording could not be read, by its file's name.
    """

    recordings: tuple[Recording, ...]
    refused: Mapping[str, str]


def read_recordings(
    folder: Path, *, gpu: str | None = None, model: str | None = None
) -> RecordingResult:
    """All recordings of a folder.

    Args:
        gpu, model: What recordings ran on that do not say so themselves.

    Raises:
        ConfigError: No folder, or nothing in it can be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}", remedy="Give the folder with the recordings.")
    found: list[Recording] = []
    refused: dict[str, str] = {}
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        try:
            name = _stem(path)
            if name is not None:
                found.append(_read(path, name, gpu, model))
        except ConfigError as error:
            refused[path.name] = f"{error.message} {error.remedy or ''}".strip()
        except OSError as error:
            refused[path.name] = f"cannot be read: {error.strerror}"
    if not found:
        reasons = "; ".join(refused.values())
        raise ConfigError(
            f"no recorded run in {folder}" + (f": {reasons}" if reasons else ""),
            remedy="Expected *_requests.csv[.gz], *.jsonl, or the JSON of `vllm bench serve "
            "--save-result --save-detailed`.",
        )
    return RecordingResult(tuple(found), refused)


def _stem(path: Path) -> str | None:
    """The recording's name; None for other files."""
    match = re.fullmatch(r"(.+)_requests\.csv(?:\.gz)?", path.name)
    if match:
        return match[1]
    if path.suffix == ".jsonl":
        return path.stem
    if path.suffix == ".json" and not path.name.endswith("_meta.json"):
        # Other JSON, such as a fit or a report, may lie in the folder.
        text = path.read_text(errors="replace")
        return path.stem if '"ttfts"' in text or '"input_lens"' in text else None
    return None


def _read(path: Path, name: str, gpu: str | None, model: str | None) -> Recording:
    meta_path = path.with_name(f"{name}_meta.json")
    meta = _object(meta_path) if meta_path.is_file() else {}
    assumed = [] if meta else [f"no {meta_path.name}: nothing is known of the engine"]
    match = _VLLM_REAL.fullmatch(name)
    if path.suffix == ".json":
        document = _object(path)
        served = _benchmark(path.name, document, assumed)
        meta = {"model": document.get("model_id"), **meta}
    else:
        rows: Iterator[Mapping[str, Any]] = (
            _lines(path) if path.suffix == ".jsonl" else rows_of(path)
        )
        served = [_served(path.name, number, row) for number, row in enumerate(rows, start=1)]
    if not served:
        raise ConfigError(f"{path.name} holds no requests")
    start = min(row.arrival_s for row in served)
    if not max(row.last_token_s for row in served) > start:
        raise ConfigError(
            f"the {len(served)} requests of {path.name} take no time",
            remedy="Record when their tokens came.",
        )
    hardware = _part(meta, "hardware", meta_path.name)
    gpu_name = gpu or (match["gpu"] if match else hardware.get("device_name"))
    model_name = model or (match["model"] if match else meta.get("model"))
    for what, value in (("GPU", gpu_name), ("model", model_name)):
        if not value:
            raise ConfigError(
                f"{path.name} does not say which {what} it ran on",
                remedy=f"Give --{what.lower()}, or {meta_path.name} with model and hardware.",
            )
    key, decoder = _decoder(path.name, str(model_name))
    engine = _Description(meta_path.name, meta, catalogued(str(gpu_name)), assumed)
    width = engine.whole("tensor_parallel_size", 1, is_told=False)
    if width != 1:
        raise ConfigError(f"{path.name} ran on {width} GPUs", remedy="Replay single-GPU runs.")
    settings = engine.settings(decoder)
    block_tokens, block_count = engine.blocks(decoder)
    return Recording(
        name,
        str(gpu_name),
        key,
        decoder,
        tuple(_since(row, start) for row in served),
        settings,
        block_count,
        block_tokens,
        tuple(assumed),
    )


def _since(row: Served, start: float) -> Served:
    return replace(
        row,
        arrival_s=row.arrival_s - start,
        scheduled_s=row.scheduled_s - start,
        first_token_s=row.first_token_s - start,
        last_token_s=row.last_token_s - start,
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path.name} is no JSON object")
    return document


def _part(meta: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """An object inside a description; empty when it is missing or null."""
    part = meta.get(key) or {}
    if not isinstance(part, dict):
        raise ConfigError(f"{name}: {key} is no object")
    return part


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a request log."""
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is no text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path.name}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path.name}, line {number} is no JSON object")
        yield row


def _served(name: str, number: int, row: Mapping[str, Any]) -> Served:
    """A request of a table or log."""

    def found(column: str) -> float | None:
        present = (row[key] for key in REQUEST_COLUMNS[column] if row.get(key) not in (None, ""))
        value = next(present, None)
        return None if value is None else float(value)

    def needed(column: str, fallback: float | None = None) -> float:
        value = found(column)
        value = fallback if value is None else value
        if value is None:
            known = ", ".join(REQUEST_COLUMNS[column])
            raise ConfigError(
                f"{name}, request {number} has no {column}", remedy=f"One of {known}."
            )
        return value

    try:
        queued = needed("queued")
        ttft, latency = found("ttft"), found("latency")
        first = needed("first", None if ttft is None else queued + ttft)
        last = needed("last", None if latency is None else queued + latency)
        scheduled = found("scheduled")
        prompt, output = int(needed("prompt")), int(needed("output"))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name}, request {number}: {error}") from error
    times = [queued, *([] if scheduled is None else [scheduled]), first, last]
    _check(name, number, times, prompt, output)
    identity = str(row.get("request_id") or number)
    scheduled = nan if scheduled is None else scheduled
    return Served(identity, queued, scheduled, first, last, prompt, output, 0)


def _check(name: str, number: int, times: Sequence[float], prompt: int, output: int) -> None:
    """Refuse what no run can have shown, as a step of a clock leaves it.

    Raises:
        ConfigError: Times that are no seconds or run backwards, or lengths that cannot be.
    """
    if not all(map(isfinite, times)) or list(times) != sorted(times):
        raise ConfigError(
            f"{name}, request {number}: its times are not in order, or no numbers",
            remedy="A clock was set during the run, or the log is broken; drop the request.",
        )
    if max(map(abs, times)) > MOST_SECONDS:
        raise ConfigError(
            f"{name}, request {number}: its times are no seconds", remedy="Give times in seconds."
        )
    if not 1 <= min(prompt, output) <= max(prompt, output) <= MOST_TOKENS:
        raise ConfigError(f"{name}, request {number}: lengths must be 1 to {MOST_TOKENS}")


def _benchmark(name: str, document: Mapping[str, Any], assumed: list[str]) -> list[Served]:
    """Requests of `vllm bench serve`; those that failed are left out, and told."""
    columns = ("input_lens", "output_lens", "ttfts", "itls")
    missing = [column for column in columns if not isinstance(document.get(column), list)]
    if missing:
        raise ConfigError(
            f"{name} has no {', '.join(missing)}",
            remedy="Record with `vllm bench serve --save-result --save-detailed`.",
        )
    starts = document.get("start_times")
    count = len(document["input_lens"])
    if not starts:
        if str(document.get("request_rate")) != "inf" or document.get("max_concurrency"):
            raise ConfigError(
                f"{name} does not say when its requests were sent",
                remedy="Newer versions of vLLM record start_times.",
            )
        starts = [0.0] * count
        assumed.append("all requests sent at once: no start times, and a request rate of inf")
    errors = document.get("errors") or [""] * count
    lists = [*(document[column] for column in columns), starts, errors]
    if not all(isinstance(each, list) for each in lists):
        raise ConfigError(f"{name}: start_times and errors must be lists")
    if any(len(each) != count for each in lists):
        raise ConfigError(f"{name}: its lists have different lengths")
    served = []
    for number, (prompt, output, ttft, itls, start, error) in enumerate(
        zip(*lists, strict=True), 1
    ):
        if error or not output:
            continue
        try:
            first = float(start) + float(ttft)
            last = first + sum(map(float, itls))
            times = [float(start), first, last]
            _check(name, number, times, int(prompt), int(output))
        except (TypeError, ValueError, OverflowError) as broken:
            raise ConfigError(f"{name}, request {number}: {broken}") from broken
        served.append(Served(str(number), times[0], nan, first, last, int(prompt), int(output), 0))
    if len(served) < count:
        assumed.append(f"{count - len(served)} of {count} requests failed and are left out")
    return served


def _decoder(name: str, model: str) -> tuple[str, DecoderModel]:
    """A model by its key in profile files, or by its name on a hub."""
    if model in PROFILED_MODELS:
        return model, PROFILED_MODELS[model]
    decoder = decoder_called(model)
    if decoder is not None:
        keys = (key for key, each in PROFILED_MODELS.items() if each == decoder)
        return next(keys, decoder.name), decoder
    known = ", ".join((*PROFILED_MODELS, *DECODERS))
    raise ConfigError(f"{name}: unknown model {model!r}", remedy=f"Known: {known}.")


def decoder_called(model: str) -> DecoderModel | None:
    """The model of the catalogue whose name on a hub this is."""
    plain = re.sub(r"-(instruct|chat|hf)\b", "", model.rpartition("/")[2].lower())
    plain = plain.removeprefix("meta-")
    return next((each for known, each in DECODERS.items() if known.lower() == plain), None)


def catalogued(gpu: str) -> GpuModel | None:
    """The GPU of the catalogue whose name has all words of this one's, or the reverse."""
    words = set(re.findall(r"[a-z0-9]+", gpu.lower()))
    for known, model in GPUS.items():
        if set(re.findall(r"[a-z0-9]+", known.lower())) <= words or known.lower() == gpu.lower():
            return model
    return None


@dataclass(frozen=True, slots=True)
class _Description:
    """What a description says of an engine, and what is taken where it is silent."""

    name: str
    meta: Mapping[str, Any]
    gpu: GpuModel | None
    assumed: list[str] = field(repr=False)

    def whole(self, key: str, default: int, *, is_told: bool = True) -> int:
        """A whole number of the scheduler: as resolved, of the arguments, or vLLM's default."""
        resolved = _part(self.meta, "resolved_config", self.name)
        scheduler = _part(resolved, "scheduler_config", self.name)
        arguments = _part(self.meta, "engine_kwargs", self.name)
        value, source = scheduler.get(key), ""
        if value is None:
            value, source = arguments.get(key), "the engine's arguments"
        if value is None:
            value, source = default, "vLLM's default"
        number = self._count(key, value)
        if source and is_told:
            self.assumed.append(f"{key} {number} ({source})")
        return number

    def _count(self, key: str, value: Any) -> int:  # noqa: ANN401 - whatever the file holds
        """A count that a file gives."""
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{self.name}: {key} is {value!r}, no whole number") from error
        if not 1 <= number <= MOST_TOKENS:
            raise ConfigError(f"{self.name}: {key} is {value!r}, not 1 to {MOST_TOKENS}")
        return number

    def settings(self, decoder: DecoderModel) -> EngineSettings:
        """The scheduler's settings."""
        resolved = _part(self.meta, "resolved_config", self.name)
        scheduler = _part(resolved, "scheduler_config", self.name)
        gpu = self.gpu
        is_large = gpu is not None and gpu.hbm_bytes >= _LARGE_BYTES and "A100" not in gpu.name
        if scheduler:
            is_async = bool(scheduler.get("async_scheduling"))
        else:
            is_async = True
            self.assumed.append("asynchronous scheduling (vLLM's default)")
        return EngineSettings(
            max_num_batched_tokens=self.whole("max_num_batched_tokens", 8192 if is_large else 2048),
            max_num_seqs=self.whole("max_num_seqs", 1024 if is_large else 256),
            steps_in_flight=2 if is_async else 1,
            kv_bytes_per_token=decoder.kv_bytes_per_token,
        )

    def blocks(self, decoder: DecoderModel) -> tuple[int, int]:
        """Tokens of a block, and how many blocks there are.

        Raises:
            ConfigError: Neither the description nor the GPU's memory says.
        """
        cache = _part(self.meta, "kv_cache", self.name)
        arguments = _part(self.meta, "engine_kwargs", self.name)
        size = self._count(
            "block_size", cache.get("block_size") or arguments.get("block_size") or 16
        )
        for part, key, tokens in (
            (cache, "num_gpu_blocks", 1),
            (cache, "num_kv_tokens", size),
            (arguments, "num_gpu_blocks_override", 1),
        ):
            if part.get(key):
                return size, self._count(key, part[key]) // tokens
        share = (
            cache.get("gpu_memory_utilization")
            or arguments.get("gpu_memory_utilization")
            or _DEFAULT_MEMORY_SHARE
        )
        if not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ConfigError(
                f"{self.name}: gpu_memory_utilization is {share!r}, no share of a memory"
            )
        hardware = _part(self.meta, "hardware", self.name)
        memory = hardware.get("device_total_memory_bytes") or (self.gpu and self.gpu.hbm_bytes)
        if not memory:
            raise ConfigError(
                f"{self.name} does not say how large the KV cache was, nor the GPU's memory",
                remedy="Add kv_cache.num_gpu_blocks or hardware.device_total_memory_bytes, or give "
                f"--gpu as one of {', '.join(GPUS)}.",
            )
        if not isinstance(memory, int | float) or not isfinite(memory):
            raise ConfigError(f"{self.name}: device_total_memory_bytes is {memory!r}, no number")
        count = kv_block_count(decoder, memory, share, block_tokens=size)
        if count < 1:
            raise ConfigError(f"{self.name}: {decoder.name} leaves no room for a KV cache")
        self.assumed.append(f"{count} blocks of {size} tokens: what {share:g} of the memory leaves")
        return size, count
