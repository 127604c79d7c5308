"""Step times of an engine, fitted to what was seen of it.

A step takes `step_s + token_s T + context_s C + pair_s P`: T tokens pass the linear layers, C
tokens of context are read for decodes, P pairs of tokens attend in prompts. All are straight lines,
so they follow from latencies by least squares without simulating: between its first and its last
token a request sees as many steps as it has tokens left, with what the others computed meanwhile;
and one that arrives at an idle engine sees the steps of its own prompt. `front_s` is what a first
token takes beside steps (tokenizer, network).

What the observations do not tell apart is taken from the data sheet, which stands in the system as
a few weak rows: steps and tokens are near it, and what is of the same kind is as far off it. A step
reads the weights as it reads contexts; tokens are computed, as pairs are. Without any observation
it is the data sheet's roofline.

Of engines behind a router nothing says which request ran where: it is taken to balance them, so
that a request is alone while fewer run than there are engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float64
from scipy.optimize import nnls

from aqua_protocol.decoders import BYTES_PER_VALUE
from aqua_simulator.timing.iteration import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    ROOFLINE_EXPONENT,
    Chunk,
    IterationTime,
    ScheduledBatch,
    from_data_sheet,
)
from aqua_simulator.whatif.cluster import EngineShape
from aqua_simulator.whatif.recorded_day import ModelLoad

FITTED_EVERY: Final = 3
"""Of so many requests, one in order of arrival is fitted to; the others check the fit. Doubled, the
fit rests on half as many and the check on more."""

LEAST_ROWS: Final = 20
"""Observations that a fit needs. Doubled, short recordings fall back to the data sheet."""

PRIOR_WEIGHT: Final = 0.003
"""Of being off the data sheet by all of a coefficient, beside as much for all observations.
Doubled, coefficients that the recording hardly tells are drawn four times as much to the sheet."""


@dataclass(frozen=True, slots=True)
class StepLaw:
    """An engine's step times in numbers, for compiled engines.

    A step takes `(floor_s^power + (token_s T)^power)^(1/power) + context_s C + chunk_context_s K +
    pair_s P`, and `head_s` if a token is sampled: T tokens, C tokens of context read for decodes, K
    for pieces of prompts, P token pairs in prompts.
    """

    power: float
    floor_s: float
    token_s: float
    context_s: float
    chunk_context_s: float
    pair_s: float
    head_s: float


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """Seconds by step, token, token of context and token pair, and before the first step.

    Attributes:
        is_fitted: Whether a recording has told them; else the roofline of the data sheet counts.
        speed: All step times are so many times shorter: for sensitivities.
    """

    step_s: float
    token_s: float
    context_s: float
    pair_s: float
    front_s: float = 0.0
    is_fitted: bool = False
    speed: float = 1.0

    def iteration_time(self, shape: EngineShape) -> IterationTime:
        """The coefficients as engines take step times."""
        if not self.is_fitted:
            sheet = from_data_sheet(shape.gpu, shape.model, width=shape.deployed.tp)
            if self.speed == 1.0:
                return sheet
            return replace(
                sheet,
                linear=lambda tokens: sheet.linear(tokens) / self.speed,
                attention=lambda batch: sheet.attention(batch) / self.speed,
                head=lambda sampled: sheet.head(sampled) / self.speed,
            )
        step_s, token_s = self.step_s / self.speed, self.token_s / self.speed
        context_s, pair_s = self.context_s / self.speed, self.pair_s / self.speed

        def attention(batch: ScheduledBatch) -> float:
            pairs = sum(chunk.tokens * (chunk.context + chunk.tokens / 2) for chunk in batch.chunks)
            return context_s * batch.decode_context_tokens + pair_s * pairs

        return IterationTime(
            f"{shape.deployed.name}, fitted",
            lambda tokens: token_s * tokens,
            attention,
            lambda _sampled: 0.0,
            step_s,
        )

    def law(self, shape: EngineShape) -> StepLaw:
        """The same step times in numbers."""
        if self.is_fitted:
            times = (self.step_s, self.token_s, self.context_s, 0.0, self.pair_s, 0.0)
            power = 1.0
        else:
            sheet = from_data_sheet(shape.gpu, shape.model, width=shape.deployed.tp)
            # Of one token read, and of one token that attends to half of itself.
            context_s = sheet.attention(ScheduledBatch((), 1, 1, 1))
            pair_s = 2.0 * sheet.attention(ScheduledBatch((Chunk(1, 0),), 0, 0, 1))
            # With so many tokens the floor is lost in the roofline's slope.
            many = 1 << 40
            token_s = sheet.linear(many) / many
            times = (sheet.linear(0), token_s, context_s, context_s, pair_s, sheet.head(1))
            power = ROOFLINE_EXPONENT
        return StepLaw(power, *(each / self.speed for each in times))


def sheet_coefficients(shape: EngineShape) -> StepCoefficients:
    """What the data sheet gives, as straight lines."""
    model, gpu = shape.model, shape.gpu.group(shape.deployed.tp)
    bytes_per_s = gpu.hbm_bytes_per_s * BANDWIDTH_SHARE
    flops_per_s = gpu.flops_per_s * COMPUTE_SHARE
    parameters = model.parameter_count - model.vocabulary_size * model.hidden_size
    return StepCoefficients(
        parameters * BYTES_PER_VALUE / bytes_per_s,
        2.0 * parameters / flops_per_s,
        model.kv_bytes_per_token / bytes_per_s,
        4.0 * model.head_count * model.head_size * model.layer_count / flops_per_s,
    )


def fitted(
    loads: Mapping[str, ModelLoad], shapes: Mapping[str, EngineShape]
) -> dict[str, StepCoefficients]:
    """Step times of each model as the recording tells them; the data sheet's where it does not.

    Models of one shape on the same GPUs have the same kernels and are fitted together.
    """
    found: dict[str, StepCoefficients] = {}
    for names in kinds_of(shapes).values():
        seen = [_rows_of(loads[name], shapes[name]) for name in names if name in loads]
        coefficients = sheet_coefficients(shapes[names[0]])
        if sum(len(rows) for rows, _ in seen) >= LEAST_ROWS:
            rows = np.vstack([rows for rows, _ in seen])
            coefficients = _solved(
                rows, np.concatenate([seconds for _, seconds in seen]), coefficients
            )
        found |= dict.fromkeys(names, coefficients)
    return found


def kinds_of(shapes: Mapping[str, EngineShape]) -> dict[tuple[str, str, int], list[str]]:
    """Models that have the same kernels, by shape and GPUs."""
    kinds: dict[tuple[str, str, int], list[str]] = {}
    for name, shape in shapes.items():
        kinds.setdefault((shape.model.name, shape.gpu.name, shape.deployed.tp), []).append(name)
    return kinds


def _rows_of(
    load: ModelLoad, shape: EngineShape
) -> tuple[Float64[np.ndarray, "rows 5"], Float64[np.ndarray, " rows"]]:
    if len(load.step_rows):
        return load.step_rows, load.step_seconds
    return observations(load, shape)


def is_fitted_to(index: int) -> bool:
    """Whether step times are fitted to the request of that place in order of arrival."""
    return index % FITTED_EVERY == 0


_PRIOR: Final = np.array(
    [
        [1.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0, 0.0],
        [-1.0, 0.0, 1.0, 0.0, 0.0],
        [0.0, -1.0, 0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 1.0],
    ]
)
"""Rows of steps, tokens, contexts, pairs and first tokens, in shares of the data sheet's: the first
two are as on it, contexts as steps, pairs as tokens, and nothing is before a first token. Doubled,
it is `PRIOR_WEIGHT` that doubles."""
_PRIOR_WANTED: Final = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
"""What these rows give; fixed by them."""


def _solved(
    rows: Float64[np.ndarray, "rows 5"],
    seconds: Float64[np.ndarray, " rows"],
    sheet: StepCoefficients,
) -> StepCoefficients:
    prior = np.array([sheet.step_s, sheet.token_s, sheet.context_s, sheet.pair_s])
    # In shares of the data sheet's values and of the observed seconds: all errors are relative.
    scale = np.append(prior, np.median(seconds))
    system = rows * scale / seconds[:, None]
    weight = PRIOR_WEIGHT * np.sqrt(len(rows))
    wanted = np.concatenate([np.ones(len(rows)), weight * _PRIOR_WANTED])
    found, _ = nnls(np.vstack([system, weight * _PRIOR]), wanted)
    step_s, token_s, context_s, pair_s, front_s = (found * scale).tolist()
    return StepCoefficients(step_s, token_s, context_s, pair_s, front_s, is_fitted=True)


def observations(
    load: ModelLoad, shape: EngineShape
) -> tuple[Float64[np.ndarray, "rows 5"], Float64[np.ndarray, " rows"]]:
    """What requests saw: (steps, tokens, contexts, pairs, first tokens) and their seconds."""
    known = np.flatnonzero(~np.isnan(load.last_s))
    chosen = known % FITTED_EVERY == 0
    load = load.known(known)
    if not len(load):
        return np.empty((0, 5)), np.empty(0)
    engines, prompt = shape.deployed.replicas, load.prompt_tokens.astype(float)
    steps = load.output_tokens - 1.0
    spent = load.last_s - load.first_s
    decoding = (steps > 0) & (spent > 0)
    context = steps * (prompt + load.output_tokens / 2.0)
    rate = np.where(decoding, 1.0 / np.where(spent > 0, spent, 1.0), 0.0)
    first, last = load.first_s[decoding], load.last_s[decoding]
    others = []
    for own, from_rate in ((steps, steps * rate), (context, context * rate)):
        done = _cumulated(first, last, from_rate[decoding])
        others.append(np.maximum(0.0, done(last) - done(first) - own[decoding]))
    # A prompt counts where its first token comes: in the step that ends then.
    order = np.argsort(load.first_s)
    begin, end = (
        np.searchsorted(load.first_s[order], each, side="right") for each in (first, last)
    )
    for own in (prompt, prompt**2 / 2.0):
        sums = np.concatenate([[0.0], np.cumsum(own[order])])
        others.append(sums[end] - sums[begin])
    # Of the others, those on the same engine: a router that balances leaves none while an engine
    # is free, and its part of all beyond.
    own, all_steps = steps[decoding], steps[decoding] + others[0]
    share = (np.maximum(own, all_steps / engines) - own) / np.maximum(others[0], 1e-9)
    tokens, contexts, prompts, pairs = (share * each for each in others)
    rows = [own + tokens + prompts, context[decoding] + contexts, pairs]
    decode = np.column_stack([steps[decoding], *rows, np.zeros(decoding.sum())])
    ahead = np.searchsorted(load.arrival_s, load.arrival_s, side="left")
    gone = np.searchsorted(np.sort(load.last_s), load.arrival_s, side="right")
    wait = load.first_s - load.arrival_s
    alone = (ahead - gone < engines) & (wait > 0)
    later = np.searchsorted(load.arrival_s, load.first_s, side="left")
    alone &= later - np.arange(len(load)) <= engines - (ahead - gone)
    chunks = np.ceil(prompt / shape.deployed.max_num_batched_tokens)
    ones = np.ones(len(load))
    prefill = np.column_stack([chunks, prompt, 0.0 * ones, prompt**2 / 2.0, ones])[alone]
    is_used = np.concatenate([chosen[decoding], chosen[alone]])
    seen = np.concatenate([spent[decoding], wait[alone]])
    return np.vstack([decode, prefill])[is_used], seen[is_used]


def _cumulated(
    start: Float64[np.ndarray, " spans"],
    end: Float64[np.ndarray, " spans"],
    rate: Float64[np.ndarray, " spans"],
) -> Callable[[Float64[np.ndarray, " times"]], Float64[np.ndarray, " times"]]:
    """The integral of what happens at a rate in each span, as a function of time."""
    parts = []
    for edge in (start, end):
        order = np.argsort(edge)
        sums = np.concatenate([[0.0], np.cumsum(rate[order])])
        moments = np.concatenate([[0.0], np.cumsum((rate * edge)[order])])
        parts.append((edge[order], sums, moments))

    def at(times: Float64[np.ndarray, " times"]) -> Float64[np.ndarray, " times"]:
        total = np.zeros(len(times))
        for sign, (edges, sums, moments) in zip((1.0, -1.0), parts, strict=True):
            index = np.searchsorted(edges, times, side="right")
            total += sign * (sums[index] * times - moments[index])
        return total

    return at
