"""The engine's KV cache as its `/metrics` tell it: how full, how large, how much a token takes.

And, on the same page, how many requests wait for room in it.

Bytes are taken from, in this order: the operator (`--kv-bytes`), the number of blocks with the
model's own configuration where its folder can be read, or the size that the engine was given. If
none of them says it, the size is unknown and stays so.

Source of the names: vLLM's Prometheus metrics, present and former.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from aqua_profiler.errors import EndpointError
from aqua_profiler.load.endpoint import Endpoint
from aqua_protocol import ConfigError
from aqua_protocol.decoders import read_config
from aqua_protocol.supervision import resting

USAGE_NAMES: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
CONFIG_NAMES: Final = ("vllm:cache_config_info", "vllm:cache_config")
WAITING_NAMES: Final = ("vllm:num_requests_waiting{", "sglang:num_queue_reqs{")
OF_INTEREST: Final = (*USAGE_NAMES, *CONFIG_NAMES, *WAITING_NAMES)
"""Metrics of the cache's use and configuration, and of the queue; names of vLLM, present and
former, and SGLang. The brace keeps out vLLM's counts by reason."""

LEAST_POLL_S: Final = 0.25
"""Seconds between two looks at the least: a trial's peak lasts longer. Halved, nothing changes."""

MOST_POLL_S: Final = 2.0
"""Seconds between two looks at the most: a trial of ten seconds must be seen. Doubled, peaks of
short trials are missed."""

LOOKING_SHARE: Final = 0.01
"""Share of the server's time that looking may take: an engine's page has hundreds of lines and is
made by the process that also sends its tokens, for 10 ms or more each time. Doubled, it takes twice
that from what is measured."""

# Bytes of an element, by the names of Hugging Face and of vLLM's cache_dtype.
DTYPE_BYTES: Final = (
    dict.fromkeys(("float32", "float"), 4)
    | dict.fromkeys(("float16", "half", "bfloat16"), 2)
    | dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1)
)


@dataclass(frozen=True, slots=True)
class KvCache:
    """A KV cache.

    Attributes:
        tokens: That it holds, None if the engine does not say.
        nbytes: Its size, None if it is not known.
        source: Who says it.
    """

    tokens: int | None
    nbytes: int | None
    source: str

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of a token of context; None where tokens or bytes are unknown."""
        if not self.tokens or self.nbytes is None:
            return None
        return self.nbytes / self.tokens


class EngineFigures(NamedTuple):
    """What a page of metrics says; None of what it does not.

    Attributes:
        usage: Share of the cache in use.
        waiting: Requests that wait.
        config: Labels of the cache's configuration.
    """

    usage: float | None = None
    waiting: float | None = None
    config: Mapping[str, str] = {}


def parse_metrics(text: str) -> EngineFigures:
    """Read a page; several engines behind it count as the fullest, and as the longest queue.

    Raises:
        ValueError: Not Prometheus text.
    """
    usage: float | None = None
    waiting: float | None = None
    config: dict[str, str] = {}
    # To parse it all would make the generator late by 20 ms: what is not of the cache stays unread.
    told = "".join(line for line in text.splitlines(keepends=True) if line.startswith(OF_INTEREST))
    for family in text_string_to_metric_families(told):
        for sample in family.samples:
            if sample.name in CONFIG_NAMES:
                config |= sample.labels
            elif sample.value != sample.value:
                continue
            elif sample.name in USAGE_NAMES:
                usage = max(sample.value, usage or 0.0)
            else:
                waiting = max(sample.value, waiting or 0.0)
    return EngineFigures(usage, waiting, config)


class KvCachePoller:
    """Polls an endpoint's `/metrics` beside a trial.

    Attributes:
        seen: What the engine said last.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.seen = EngineFigures()

    async def look(self) -> None:
        """Ask once."""
        try:
            page = await self._endpoint.get("/metrics") or b""
            self.seen = parse_metrics(page.decode(errors="replace"))
        except (EndpointError, ValueError):
            self.seen = EngineFigures()  # An engine is judged by its answers, not its metrics.

    async def follow(self) -> None:
        """Keep asking, until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            began_s = now()
            await self.look()
            took_s = now() - began_s
            with resting():
                await asyncio.sleep(min(max(took_s / LOOKING_SHARE, LEAST_POLL_S), MOST_POLL_S))


def cache_of(config: Mapping[str, str], model_folder: Path | None, kv_bytes: int | None) -> KvCache:
    """The size of the cache.

    Args:
        config: Labels of the engine's configuration metric.
        model_folder: With the model's `config.json`.
        kv_bytes: What the operator says.
    """
    blocks, block_tokens = _number(config.get("num_gpu_blocks")), _number(config.get("block_size"))
    tokens = blocks * block_tokens if blocks and block_tokens else None
    if kv_bytes is not None:
        return KvCache(tokens, kv_bytes, "given")
    if model_folder is not None and tokens:
        per_token = token_bytes(model_folder, config.get("cache_dtype", "auto"))
        if per_token is not None:
            return KvCache(tokens, tokens * per_token, "blocks and the model's config.json")
    if not _number(config.get("num_gpu_blocks_override")):
        for name in ("kv_cache_memory_bytes", "cpu_kvcache_space_bytes"):
            if size := _number(config.get(name)):
                return KvCache(tokens, size, name)
    return KvCache(tokens, None, "unknown")


def token_bytes(folder: Path, cache_dtype: str) -> int | None:
    """Bytes of keys and values of a token, from a Hugging Face `config.json`; None if unclear."""
    try:
        config = read_config(folder)
    except ConfigError:
        return None
    config = config.get("text_config") or config
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim")
    if not head_dim and heads and config.get("hidden_size"):
        head_dim = config["hidden_size"] // heads
    own = str(config.get("dtype") or config.get("torch_dtype") or "")
    width = DTYPE_BYTES.get(own if cache_dtype == "auto" else cache_dtype)
    if not (layers and kv_heads and head_dim and width) or config.get("kv_lora_rank"):
        return None
    return 2 * int(layers) * int(kv_heads) * int(head_dim) * width


def _number(text: str | None) -> int | None:
    try:
        return int(float(text)) if text else None
    except ValueError:
        return None
