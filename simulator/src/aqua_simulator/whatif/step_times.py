"""Step times of an engine, fitted to what was seen of it.

A step takes `step_s + token_s T + context_s C + pair_s P`: T tokens pass the linear layers, C
tokens of context are read for decodes, P pairs of tokens attend in prompts. All are straight lines,
so they follow from latencies by least squares without simulating: between its first and its last
token a request sees as many steps as it has tokens left, with what the others computed meanwhile;
and one that arrives at an idle engine sees the steps of its own prompt. `front_s` is what a first
token takes beside steps (tokenizer, network).

What the observations do not tell apart is taken from the data sheet (`step_fit`). Without any
observation it is the data sheet's roofline.

Of engines behind a router nothing says which request ran where: it is taken to balance them, so
that a request is alone while fewer run than there are engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

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
from aqua_simulator.whatif.step_fit import StepObservations, solved

FITTED_EVERY: Final = 3
"""Of so many requests, one in order of arrival is fitted to; the others check the fit. Doubled, the
fit rests on half as many and the check on more."""

LEAST_ROWS: Final = 8
"""Observations that a fit needs. Doubled, short recordings fall back to the data sheet."""

RECKONED_SHARE: Final = 0.3
"""Of what a traced request saw of others, by which its number may be wrong: who was on which engine
is not recorded. Doubled, requests beside others tell half as much."""

COEFFICIENTS: Final = ("step_s", "token_s", "context_s", "pair_s")
"""Those of a step, in the order of observations."""

LEAST_LEFT: Final = 0.05
"""Of a coefficient, what is left of it however far off it may be: nothing takes no time. Doubled,
nothing changes but where a coefficient is hardly known."""


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
        errors: Of the first four, as a factor of their covariance: L of L L'. None where they are
            not fitted.
    """

    step_s: float
    token_s: float
    context_s: float
    pair_s: float
    front_s: float = 0.0
    is_fitted: bool = False
    speed: float = 1.0
    errors: tuple[tuple[float, ...], ...] = ()

    def document(self) -> dict[str, Any]:
        """The numbers for a report, with the standard error of each of the first four if fitted."""
        rows = dict(zip(COEFFICIENTS, self.errors, strict=False))
        errors = {f"{key}_error": float(np.hypot.reduce(row)) for key, row in rows.items()}
        return {key: value for key, value in asdict(self).items() if key != "errors"} | errors

    def off_by(self, deviations: float, counts: Sequence[float]) -> StepCoefficients:
        """The coefficients so many standard errors off in what some steps take.

        Of all coefficients that are as far off, those by which these steps are.

        Args:
            counts: Steps, tokens, contexts and pairs of the steps.
        """
        if not self.errors:
            return self
        factor = np.array(self.errors)
        pull = factor.T @ np.array(counts)
        off = deviations * factor @ pull / max(1e-300, float(np.sqrt(pull @ pull)))
        now = np.array([getattr(self, key) for key in COEFFICIENTS])
        moved = np.maximum(now * LEAST_LEFT, now + off).tolist()
        return replace(self, **dict(zip(COEFFICIENTS, moved, strict=True)))

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
            return context_s * batch.decode_context_tokens + pair_s * batch.token_pairs

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
        seen = [_seen_of(loads[name], shapes[name]) for name in names if name in loads]
        coefficients = sheet_coefficients(shapes[names[0]])
        if sum(len(each) for each in seen) >= LEAST_ROWS:
            sheet = np.array([getattr(coefficients, key) for key in COEFFICIENTS])
            fit = solved(seen, sheet)
            step_s, token_s, context_s, pair_s, front_s = fit.seconds.tolist()
            # Scaled, since numbers of so different sizes are no matter of rounding then.
            size = np.sqrt(np.diag(fit.covariance))
            factor = np.linalg.cholesky(fit.covariance / np.outer(size, size)) * size[:, None]
            coefficients = StepCoefficients(
                *(step_s, token_s, context_s, pair_s, front_s),
                is_fitted=True,
                errors=tuple(tuple(row) for row in factor.tolist()),
            )
        found |= dict.fromkeys(names, coefficients)
    return found


def kinds_of(shapes: Mapping[str, EngineShape]) -> dict[tuple[str, str, int], list[str]]:
    """Models that have the same kernels, by shape and GPUs."""
    kinds: dict[tuple[str, str, int], list[str]] = {}
    for name, shape in shapes.items():
        kinds.setdefault((shape.model.name, shape.gpu.name, shape.deployed.tp), []).append(name)
    return kinds


def _seen_of(load: ModelLoad, shape: EngineShape) -> StepObservations:
    return load.steps if len(load.steps) else observations(load, shape)


def is_fitted_to(index: int) -> bool:
    """Whether step times are fitted to the request of that place in order of arrival."""
    return index % FITTED_EVERY == 0


def observations(load: ModelLoad, shape: EngineShape) -> StepObservations:
    """What traced requests saw of steps: between their tokens, and before a first one alone."""
    known = np.flatnonzero(~np.isnan(load.last_s))
    chosen = known % FITTED_EVERY == 0
    load = load.known(known)
    if not len(load):
        return StepObservations()
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
    none = np.zeros(decoding.sum())
    others_read = [none, tokens, contexts, none, none, prompts, pairs]
    doubts = RECKONED_SHARE * np.column_stack(others_read)
    own_read = [own, own, context[decoding], none, none, none, none]
    decode = np.column_stack(own_read) + np.column_stack(others_read)
    ahead = np.searchsorted(load.arrival_s, load.arrival_s, side="left")
    gone = np.searchsorted(np.sort(load.last_s), load.arrival_s, side="right")
    wait = load.first_s - load.arrival_s
    alone = (ahead - gone < engines) & (wait > 0)
    later = np.searchsorted(load.arrival_s, load.first_s, side="left")
    alone &= later - np.arange(len(load)) <= engines - (ahead - gone)
    chunks = np.ceil(prompt / shape.deployed.max_num_batched_tokens)
    ones = np.ones(len(load))
    nothing = 0.0 * ones
    alone_read = [chunks, prompt, nothing, prompt**2 / 2.0, ones, nothing, nothing]
    prefill = np.column_stack(alone_read)[alone]
    return StepObservations(
        np.vstack([decode, prefill]),
        np.concatenate([spent[decoding], wait[alone]]),
        np.vstack([doubts, 0.0 * prefill]),
        np.concatenate([own, chunks[alone]]),
    ).known(np.concatenate([chosen[decoding], chosen[alone]]))


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
