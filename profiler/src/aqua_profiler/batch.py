"""Batch producers: raise the batch size until throughput saturates; what is free then is spare.

Images and audio have no use for partial responses, so nothing is gained by batches beyond that
size. Sizes double. Each is repeated until its throughput is known to a few percent. Throughput has
saturated when two doublings together gained less than `LEAST_GAIN`; the peak is the smallest size
within that share of the best. Running out of memory ends the search as well: the sizes before it
count.

A program is an HTTP endpoint, or named `module:factory`; a factory takes no argument. A *batch*
program has `run(size)`, which makes a batch of that size and returns when it is done. A *context*
program has `read(tokens)`, which reads a prompt of so many tokens and returns the bytes of its
context (keys and values). Either may keep account of an emulated device: `used_bytes`, the highest
of the last call, and `total_bytes`.

Source: Aqua section 4, Figures 3 and 7(a).
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, Protocol

import httpx

from aqua_profiler.errors import EndpointError, EndpointGoneError, EndpointRefusedError
from aqua_profiler.estimate.rate import confidence_of
from aqua_profiler.load.endpoint import KEEPALIVE_S, SHOWN
from aqua_profiler.measure.memory import MemoryMeter
from aqua_profiler.spec import BatchSpec
from aqua_protocol import ConfigError
from aqua_protocol.bearer import bearer_headers
from aqua_protocol.profile import ModelProfile, ProfileKind, ProfileLabel, label_of

LEAST_GAIN: Final = 0.05
"""Share of throughput that two doublings of the batch must gain to go on, and by which the peak may
fall short of the best. Doubled, the peak is a batch size sooner and more memory is spare."""

LEAST_REPEATS: Final = 3
"""Batches of a size at the least, for a standard error. Doubled, steady programs take twice as
long."""

MOST_REPEATS: Final = 30
"""Batches of a size at the most: a bound, chosen by hand. Doubled, noisy programs take twice as
long."""

ENOUGH_ERROR: Final = 0.02
"""Relative standard error of throughput at which a size is known: well below `LEAST_GAIN`. Halved,
it takes four times as many batches."""

TIMEOUT_S: Final = 600.0
"""Seconds of one batch: diffusion of a thousand images takes minutes. Doubled, a hung server is
found out twice as late."""

SIZE_MARK: Final = '"$batch"'
"""What stands for the size of a batch in the body of a request."""


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """One batch size.

    Attributes:
        error: Relative standard error of the throughput.
        free_bytes: Never used while such batches ran.
    """

    size: int
    items_per_s: float
    error: float
    free_bytes: int
    repeats: int


def is_saturated(steps: Sequence[BatchMeasurement]) -> bool:
    """Two doublings together gained next to nothing."""
    if len(steps) < 3:  # noqa: PLR2004 - two doublings
        return False
    best_before = max(step.items_per_s for step in steps[:-2])
    return max(step.items_per_s for step in steps[-2:]) < best_before * (1 + LEAST_GAIN)


def peak(steps: Sequence[BatchMeasurement]) -> BatchMeasurement:
    """The smallest size that reaches the best throughput, but for `LEAST_GAIN`."""
    best = max(step.items_per_s for step in steps)
    return next(step for step in steps if step.items_per_s * (1 + LEAST_GAIN) >= best)


def profile_batch(
    plan: BatchSpec,
    program: BatchProgram,
    meter: MemoryMeter,
    listen: Callable[[BatchMeasurement], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[ModelProfile, EndpointError | None]:
    """Measure a program that makes batches; the error says why the profile is partial."""
    began_s = clock()
    steps: list[BatchMeasurement] = []
    notes: list[str] = []
    error: EndpointError | None = None
    size, ended = 1, False
    while not ended and size <= plan.largest:
        try:
            step = _measure(program, meter, size, clock, began_s + plan.budget_s)
        except EndpointError as failure:
            error = failure
            break
        except Exception as failure:
            # torch and engines have their own types for it; anything else is the program's bug.
            if not steps or not _is_out_of_memory(failure):
                raise
            notes.append(f"batches of {size} do not fit the memory")
            ended = True
            break
        if step is None:
            notes.append(f"the budget was spent at a batch size of {size}")
            break
        steps.append(step)
        listen(step)
        ended = is_saturated(steps)
        size *= 2
    if size > plan.largest and not ended:
        notes.append(f"throughput still rises at the largest size allowed, {plan.largest}")
        ended = True
    return _profile(plan, steps, meter, notes, error, complete=ended and bool(steps)), error


def _measure(
    program: BatchProgram, meter: MemoryMeter, size: int, clock: Callable[[], float], until_s: float
) -> BatchMeasurement | None:
    """Repeat a size until its throughput is known; None when the time is up first."""
    program.run(size)  # Compiles, grows pools, and is not counted.
    meter.reset()
    times: list[float] = []
    free_bytes: int | None = None
    while len(times) < MOST_REPEATS:
        if clock() >= until_s:
            return None
        started_s = clock()
        program.run(size)
        times.append(max(clock() - started_s, 1e-9))
        free = meter.read().free_bytes
        free_bytes = free if free_bytes is None else min(free, free_bytes)
        if len(times) >= LEAST_REPEATS and _error(times) <= ENOUGH_ERROR:
            break
    assert free_bytes is not None, size
    return BatchMeasurement(size, size / fmean(times), _error(times), free_bytes, len(times))


def _error(times: Sequence[float]) -> float:
    return stdev(times) / fmean(times) / math.sqrt(len(times))


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower()


def _profile(
    plan: BatchSpec,
    steps: Sequence[BatchMeasurement],
    meter: MemoryMeter,
    notes: list[str],
    error: EndpointError | None,
    *,
    complete: bool,
) -> ModelProfile:
    partial = not complete or error is not None
    best = peak(steps) if steps else None
    spare = None if best is None or partial else best.free_bytes
    if error is not None:
        notes = [*notes, f"the endpoint failed: {error.message}"]
    # A batch model needs no swap: it has no partial responses to wait for.
    needed = None if partial else 0
    more: dict[str, Any] = {
        "batches": [asdict(step) for step in steps],
        "peak_batch": None if best is None else best.size,
        "meter": meter.name,
        "error": None if error is None else error.to_body().model_dump(mode="json"),
    }
    hbm = plan.hbm_bytes
    if hbm is None and steps:
        hbm = meter.read().total_bytes
    return ModelProfile(
        model=plan.model,
        kind=ProfileKind.BATCH,
        label=ProfileLabel.UNKNOWN if partial else label_of(spare, needed, plan.threshold_bytes),
        spare_bytes=spare,
        needed_bytes=needed,
        threshold_bytes=plan.threshold_bytes,
        hbm_bytes=hbm,
        stable_rate_per_s=None if best is None else best.items_per_s,
        confidence=0.0 if best is None else confidence_of(best.error),
        requests_sent=sum(step.repeats + 1 for step in steps),
        partial=partial,
        notes=notes,
        provenance=plan.provenance,
        **more,
    )


def profile_context(
    plan: BatchSpec, program: ContextProgram, tokens: int, prefix_tokens: int = 0
) -> ModelProfile:
    """A consumer that reads long prompts: the swap for one of `tokens`, from two short ones.

    Context grows in proportion to tokens, so two prompts tell what a token takes; the program need
    not be able to read the long one yet, which is the point.
    """
    short = max(1, min(64, tokens // 4))
    first, second = program.read(short), program.read(2 * short)
    per_token = (second - first) / short
    fixed = max(0.0, first - short * per_token)
    context = math.ceil(fixed + per_token * tokens)
    budget = int(program.total_bytes)
    prefix = math.ceil(per_token * prefix_tokens)
    needed = max(0, context - budget) + prefix
    spare = max(0, budget - context)
    more: dict[str, Any] = {
        "needs_bytes": {"long_prompt": max(0, context - budget), "prefix_cache": prefix},
        "bytes_per_token": per_token,
        "long_prompt_tokens": tokens,
    }
    return ModelProfile(
        model=plan.model,
        kind=ProfileKind.LLM,
        label=label_of(spare, needed, plan.threshold_bytes),
        spare_bytes=spare,
        needed_bytes=needed,
        threshold_bytes=plan.threshold_bytes,
        hbm_bytes=plan.hbm_bytes,
        requests_sent=2,
        provenance=plan.provenance,
        **more,
    )


class BatchProgram(Protocol):
    """A program that makes batches."""

    def run(self, size: int) -> None:
        """Make one batch; return when it is done."""


class ContextProgram(Protocol):
    """Reads prompts, within a budget of device memory."""

    used_bytes: int
    total_bytes: int

    def read(self, tokens: int) -> int:
        """Read a prompt; returns the bytes of its keys and values."""


def load(name: str, method: str) -> Any:  # noqa: ANN401 - the user's object
    """What a `module:factory` makes.

    Raises:
        ConfigError: No such module or factory, or what it makes lacks the method.
    """
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise ConfigError(f"{name!r} is not a program", remedy="Name it as module:factory.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cannot load {name!r}: {error}", remedy="Name a module that can be imported from here."
        ) from error
    finally:
        sys.path.pop(0)
    program = factory()
    if not callable(getattr(program, method, None)):
        raise ConfigError(
            f"what {name} returns has no method {method}",
            remedy=f"Return an object with {method}(...); docs/profiling.md shows one.",
        )
    return program


class HttpBatchProgram:
    """A batch is one POST.

    Args:
        url: Of the operation, for example `/v1/images/generations`.
        body: JSON text with `"$batch"` where the size goes.
    """

    is_remote = True

    def __init__(self, url: str, body: str, token: str | None = None) -> None:
        if SIZE_MARK not in body:
            raise ConfigError(
                f"the body has no {SIZE_MARK}",
                remedy='Write for example {"prompt": "a", "n": "$batch"}.',
            )
        try:
            json.loads(body)
        except ValueError as error:
            raise ConfigError(f"the body is not JSON: {error}", remedy="Mend --body.") from error
        self._url, self._body = url, body
        self._http = httpx.Client(
            headers={"Content-Type": "application/json"} | bearer_headers(token),
            timeout=TIMEOUT_S,
            follow_redirects=True,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def run(self, size: int) -> None:
        """Ask for one batch and read all of it.

        Raises:
            MemoryError: The server ran out of memory; larger batches will too.
            EndpointError: It failed otherwise.
        """
        body = self._body.replace(SIZE_MARK, str(size))
        try:
            answer = self._http.post(self._url, content=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointGoneError(f"no answer from {self._url}: {error!r}") from error
        if not answer.is_error:
            return
        said = answer.text[:SHOWN]
        if "out of memory" in answer.text.lower():
            raise MemoryError(said)
        raise EndpointRefusedError(f"{self._url} answered {answer.status_code}: {said!r}")
