"""A stock vLLM, in this process, as the feed's engine.

Only public calls: `LLM`, `llm_engine.add_request`, `step`, `get_metrics`. Nothing is subclassed or
patched, so the blended order runs on whatever vLLM is installed (0.32 is what the tests run).
Prompts go in as token ids, the ones the plan was made from: what the plan calls shared is shared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aqua_batch.engine import CacheCounters, EngineProperties, StepEvents
from aqua_batch.outputs import RowOutput
from aqua_protocol.errors import ConfigError, UnavailableError


class VllmEngine:
    """vLLM with a pool of requests to draw from.

    Raises:
        UnavailableError: vLLM is not installed.
        ConfigError: vLLM refuses the model.
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
            raise UnavailableError(
                f"vLLM is not installed in this environment: {error}",
                remedy="pip install vllm, and aqua-batch into the same environment.",
            ) from error
        self._sampling = SamplingParams
        self._refusals = _refusals()
        failures: tuple[type[Exception], ...] = (*self._refusals, OSError, RuntimeError)
        try:
            with _llvmlite_without_surprises():
                self._llm = LLM(
                    model=model, enable_prefix_caching=True, disable_log_stats=False, **options
                )
        except failures as error:
            raise ConfigError(
                f"vLLM cannot serve {model}: {error}", remedy="Try it with `vllm serve` first."
            ) from error
        self._engine = self._llm.llm_engine
        self._prompt_of: Callable[[int], list[int]] | None = None
        self._sampling_of: Callable[[int], Mapping[str, Any]] | None = None
        self._pool = 0
        self._running: dict[str, int] = {}
        self._begun: set[int] = set()
        self._refused: list[int] = []
        self._outputs: list[RowOutput] = []

    @property
    def facts(self) -> EngineProperties:
        """What vLLM found out when it started."""
        config = self._engine.vllm_config
        cache = config.cache_config
        return EngineProperties(
            # vLLM keeps one block for itself.
            capacity_tokens=(int(cache.num_gpu_blocks) - 1) * int(cache.block_size),
            max_step_tokens=int(config.scheduler_config.max_num_batched_tokens),
            longest_tokens=int(config.model_config.max_model_len),
        )

    def serve(
        self, prompt_of: Callable[[int], list[int]], sampling_of: Callable[[int], Mapping[str, Any]]
    ) -> None:
        """Name the pool that the next requests are indices into."""
        assert not self._running, "the last pool has not ended"
        self._prompt_of, self._sampling_of = prompt_of, sampling_of
        self._pool += 1

    def submit(self, request: int) -> None:
        """Add a request of the pool."""
        assert self._prompt_of is not None and self._sampling_of is not None, "no pool"  # noqa: PT018 - one condition
        name = f"{self._pool}-{request}"
        try:
            params = self._sampling(**self._sampling_of(request))
            prompt = {"prompt_token_ids": self._prompt_of(request)}
            self._engine.add_request(name, prompt, params)
        except self._refusals as error:
            # The engine's word on this request alone; the others go on.
            self._outputs.append(RowOutput(request, "", "error", 0, 0, str(error)))
            self._refused.append(request)
            return
        self._running[name] = request

    def step(self, token_budget: int) -> StepEvents:
        """Take one step of vLLM; its budget is its own."""
        del token_budget
        started, finished = list(self._refused), list(self._refused)
        tokens = [0] * len(self._refused)
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
                self._outputs.append(
                    RowOutput(
                        request,
                        completion.text,
                        completion.finish_reason or "stop",
                        generated,
                        output.num_cached_tokens or 0,
                    )
                )
        return StepEvents(started, finished, tokens)

    def take_outputs(self) -> list[RowOutput]:
        """Completions since the last call."""
        taken, self._outputs = self._outputs, []
        return taken

    def cache_counters(self) -> CacheCounters:
        """The engine's own prefix-cache counters."""
        values = {metric.name: getattr(metric, "value", 0) for metric in self._engine.get_metrics()}
        return CacheCounters(
            int(values.get("vllm:prefix_cache_queries", 0)),
            int(values.get("vllm:prefix_cache_hits", 0)),
        )


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises over a request; 0.32 has a type of its own for it, older ones have not."""
    import vllm

    own = getattr(getattr(vllm, "exceptions", None), "VLLMError", ValueError)
    return ValueError, TypeError, own


@contextmanager
def _llvmlite_without_surprises() -> Iterator[None]:
    """Let vLLM start although numba is loaded.

    vLLM's CPU build looks through everything that loaded modules hold, by `hasattr(x, "__dict__")`
    and `vars(x).get`. llvmlite, which numba brings, holds a library object that has *any*
    attribute one asks it for: its `__dict__` is a function of the library, and vLLM stops with
    "no attribute 'get'". The policies are compiled by numba, and so may be much in a program that
    uses this class. While vLLM starts, that object says that it has no `__dict__`.
    """
    holder = sys.modules.get("llvmlite.binding.ffi")
    library = getattr(holder, "lib", None)
    if library is None or isinstance(getattr(library, "__dict__", {}), dict):
        yield
        return
    kind: Any = type(library)
    answer = kind.__getattr__

    def answer_honestly(self: object, name: str) -> object:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(self, name)

    kind.__getattr__ = answer_honestly
    try:
        yield
    finally:
        kind.__getattr__ = answer
