"""A stock vLLM, in this process, as the feed's engine.

Only public calls: `LLM`, `llm_engine.add_request`, `step`, `get_metrics`. Nothing is subclassed or
patched, so the blended order runs on whatever vLLM is installed (0.32 is what the tests run).
Prompts go in as token ids, the ones the plan was made from: what the plan calls shared is shared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aqua_batch.engine import StepEvents
from aqua_batch.records import CHAT_URL, Entry, output_limit
from aqua_protocol.errors import ConfigError

SAMPLING_FIELDS: Final = (
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
)
"""Fields of a body that vLLM's SamplingParams knows under the same name."""


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """The engine's own count of prefix-cache lookups.

    Attributes:
        queried_tokens: Prompt tokens looked up.
        hit_tokens: Prompt tokens found.
    """

    queried_tokens: int
    hit_tokens: int


class VllmEngine:
    """vLLM with a pool of requests to draw from.

    Args:
        model: Folder or name of the model.
        options: Further arguments of `vllm.LLM`.

    Raises:
        ConfigError: vLLM is not installed, or refuses the model.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        # One process: a step is a step, and a crash of the engine is a crash of the run.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # stdout is for the summary.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise ConfigError(
                "vLLM is not installed in this environment",
                remedy="pip install vllm, and aqua-batch into the same environment.",
            ) from error
        self._sampling = SamplingParams
        try:
            self._llm = LLM(
                model=model, enable_prefix_caching=True, disable_log_stats=False, **options
            )
        except (ValueError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"vLLM cannot serve {model}: {error}", remedy="Try it with `vllm serve` first."
            ) from error
        self._engine = self._llm.llm_engine
        self._model = model
        self._prompt_of: Callable[[int], list[int]] | None = None
        self._entry_of: Callable[[int], tuple[Entry, dict[str, Any]]] | None = None
        self._running: dict[str, int] = {}
        self._begun: set[int] = set()
        self._refused: list[int] = []
        self.results: list[dict[str, Any]] = []

    @property
    def capacity_tokens(self) -> int:
        """KV tokens that fit."""
        config = self._engine.vllm_config.cache_config
        return int(config.num_gpu_blocks) * int(config.block_size)

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that vLLM computes in a step."""
        return int(self._engine.vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output that the model holds."""
        return int(self._engine.vllm_config.model_config.max_model_len)

    def serve(
        self,
        prompt_of: Callable[[int], list[int]],
        entry_of: Callable[[int], tuple[Entry, dict[str, Any]]],
    ) -> None:
        """Name the pool that the next requests are indices into."""
        assert not self._running, "the last pool has not ended"
        self._prompt_of, self._entry_of = prompt_of, entry_of

    def submit(self, request: int) -> None:
        """Add a request of the pool."""
        assert self._prompt_of is not None and self._entry_of is not None, "no pool"  # noqa: PT018 - one condition
        entry, body = self._entry_of(request)
        prompt = self._prompt_of(request)
        given = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
        limit = output_limit(body)
        room = self.longest_tokens - len(prompt)
        given["max_tokens"] = room if limit is None else min(limit, room)
        try:
            params = self._sampling(**given)
            self._engine.add_request(entry.custom_id, {"prompt_token_ids": prompt}, params)
        except (ValueError, TypeError) as error:
            # The engine's word on this request alone; the others go on.
            self.results.append(_failure(entry, str(error)))
            self._refused.append(request)
            return
        self._running[entry.custom_id] = request

    def step(self, token_budget: int) -> StepEvents:
        """One step of vLLM; its budget is its own."""
        del token_budget
        started, finished, tokens = (
            list(self._refused),
            list(self._refused),
            [0] * len(self._refused),
        )
        self._refused.clear()
        for output in self._engine.step() if self._running else ():
            request = self._running.get(output.request_id)
            if request is None:
                continue
            completion = output.outputs[0]
            generated = len(completion.token_ids)
            if request not in self._begun and generated > 0:
                self._begun.add(request)
                started.append(request)
            if output.finished:
                if request not in self._begun:
                    started.append(request)
                self._begun.discard(request)
                del self._running[output.request_id]
                finished.append(request)
                tokens.append(generated)
                self.results.append(self._success(request, output, completion))
        return StepEvents(started, finished, tokens)

    def take_results(self) -> list[dict[str, Any]]:
        """Results since the last call, in OpenAI's output format."""
        taken, self.results = self.results, []
        return taken

    def cache_counters(self) -> CacheCounters:
        """The engine's own prefix-cache counters."""
        values = {metric.name: getattr(metric, "value", 0) for metric in self._engine.get_metrics()}
        return CacheCounters(
            int(values.get("vllm:prefix_cache_queries", 0)),
            int(values.get("vllm:prefix_cache_hits", 0)),
        )

    def _success(self, request: int, output: Any, completion: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's types
        assert self._entry_of is not None
        entry, body = self._entry_of(request)
        reason = completion.finish_reason
        prompt_count, output_count = len(output.prompt_token_ids), len(completion.token_ids)
        chat = entry.url == CHAT_URL
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if chat:
            choice["message"] = {"role": "assistant", "content": completion.text}
        else:
            choice["text"] = completion.text
        answer = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{entry.custom_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model", self._model),
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt_count,
                "completion_tokens": output_count,
                "total_tokens": prompt_count + output_count,
                "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
            },
        }
        return {
            "id": f"batch_req_line_{entry.line}",
            "custom_id": entry.custom_id,
            "response": {"status_code": 200, "request_id": output.request_id, "body": answer},
            "error": None,
        }


def _failure(entry: Entry, message: str) -> dict[str, Any]:
    return {
        "id": f"batch_req_line_{entry.line}",
        "custom_id": entry.custom_id,
        "response": None,
        "error": {"code": "engine_error", "message": message, "line": entry.line},
    }
