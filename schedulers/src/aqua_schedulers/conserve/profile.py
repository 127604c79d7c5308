"""The step-time profile: how long a step of an engine takes, by what it computes.

A step's *load* is four sums over its requests, and its predicted time is

    (floor^n + (token_s x new tokens)^n)^(1/n) + context_token_s x decode contexts
        + pair_s x sum of chunk x (prefix + chunk / 2) + request_s x requests

The first term is a roofline with a rounded bend: reading the weights costs `floor_s` whatever is
computed; exponent 1 is the straight line `a + b x tokens`. The others are attention of decodes,
attention of prompt chunks, and what each request costs (sampling, host).

A profile is a file: pydantic's JSON of this model, found by model, engine and GPU. It says up to
which token count it was measured and how far off it was on rows that the fit had not seen; beyond
either it promises nothing (`step_time` decides what to do then).

Source: ConServe section 4.5, "Profiler", which saves tables of measured times; the sums are ours,
so that a few dozen measured steps are enough. On Vidur's A100 tables of Llama-2-7B the roofline is
3.1 % off and the straight line 5.4 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aqua_protocol.errors import ConfigError

MAX_TERM_S: Final = 3600.0
"""No step takes so long: what says so was not measured. Raised to the highest exponent, times of so
many tokens as memory holds are numbers still. Doubled, as good."""


class StepLoad(NamedTuple):
    """What a step computes.

    Attributes:
        new_tokens: Tokens that pass the linear layers.
        context_tokens: Contexts that decodes read, together.
        pair_tokens: Sum over prompt chunks of tokens x (context + tokens / 2).
        request_count: Requests that take part.
    """

    new_tokens: int = 0
    context_tokens: int = 0
    pair_tokens: float = 0.0
    request_count: int = 0

    def and_decode(self, context_tokens: int) -> StepLoad:
        """This load and one more decode that reads such a context."""
        return StepLoad(
            self.new_tokens + 1,
            self.context_tokens + context_tokens,
            self.pair_tokens,
            self.request_count + 1,
        )

    def and_chunk(self, tokens: int, context_tokens: int) -> StepLoad:
        """This load and one more piece of a prompt, behind tokens computed before."""
        return StepLoad(
            self.new_tokens + tokens,
            self.context_tokens,
            self.pair_tokens + tokens * (context_tokens + tokens / 2),
            self.request_count + 1,
        )


class StepTimeProfile(BaseModel):
    """Predicted step times of one model on one engine and GPU.

    Attributes:
        model, engine, gpu: What was measured; the key by which a profile is found.
        floor_s: Seconds of a step with one token and no context.
        token_s: Seconds that each token adds where computation is the limit.
        exponent: How sharp the bend between both is; 1 adds them.
        context_token_s: Seconds for each token that a decode reads.
        pair_s: Seconds for each pair of new and earlier token of a chunk.
        request_s: Seconds for each request.
        max_tokens: The largest step that was measured.
        relative_error: The 95th percentile of |predicted / measured - 1|.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    model: str
    engine: str
    gpu: str
    floor_s: float = Field(gt=0.0, le=MAX_TERM_S)
    token_s: float = Field(gt=0.0, le=MAX_TERM_S)
    exponent: float = Field(default=1.0, ge=1.0, le=8.0)
    context_token_s: float = Field(default=0.0, ge=0.0, le=MAX_TERM_S)
    pair_s: float = Field(default=0.0, ge=0.0, le=MAX_TERM_S)
    request_s: float = Field(default=0.0, ge=0.0, le=MAX_TERM_S)
    max_tokens: int = Field(ge=1)
    relative_error: float = Field(default=0.0, ge=0.0)

    def seconds(self, load: StepLoad) -> float:
        """Predicted time of a step; 0 for an empty one."""
        tokens, context_tokens, pair_tokens, request_count = load
        if not tokens:
            return 0.0
        power = self.exponent
        linear_s = (self.floor_s**power + (self.token_s * tokens) ** power) ** (1.0 / power)
        return float(
            linear_s
            + self.context_token_s * context_tokens
            + self.pair_s * pair_tokens
            + self.request_s * request_count
        )

    @classmethod
    def parse(cls, text: str | bytes) -> StepTimeProfile:
        """Read a profile's file.

        Raises:
            ConfigError: It is no profile of this format.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(
                f"not a step-time profile: {error.errors()[0]['msg']}",
                remedy="Measure the engine's steps again.",
            ) from error


class MeasuredStep(NamedTuple):
    """One timed step."""

    load: StepLoad
    seconds: float


# Bends that the fit tries: where floor and slope meet, in tokens, and how sharply. Doubled, the
# grid is finer than kernels are smooth and a fit takes four times as long (milliseconds).
_KNEES: Final = tuple(float(knee) for knee in np.geomspace(16.0, 1024.0, 25))
_EXPONENTS: Final = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)

_FEWEST_STEPS: Final = 8
"""Steps without which five coefficients are a guess. Doubled, a short run is refused."""


def fitted_profile(
    steps: Iterable[MeasuredStep], *, model: str, engine: str, gpu: str
) -> StepTimeProfile:
    """Fit a profile to timed steps, for least relative error; every fourth step is the check.

    For each bend of a grid the rest is linear, and coefficients that come out negative are left
    out.

    Raises:
        ConfigError: Too few steps, or times that are not positive.
    """
    rows = list(steps)
    if len(rows) < _FEWEST_STEPS or any(row.seconds <= 0.0 for row in rows):
        raise ConfigError(
            f"{len(rows)} timed steps make no profile",
            remedy=f"Time at least {_FEWEST_STEPS} steps of different loads, all positive.",
        )
    loads = np.array([row.load for row in rows], dtype=np.float64)
    seconds = np.array([row.seconds for row in rows])
    is_check = np.arange(len(rows)) % 4 == 3  # noqa: PLR2004 - one in four
    best: tuple[float, float, float, Float64[np.ndarray, " 4"]] | None = None
    for knee in _KNEES:
        for exponent in _EXPONENTS:
            bent = (knee**exponent + loads[:, 0] ** exponent) ** (1.0 / exponent)
            terms = np.column_stack([bent, loads[:, 1:]])
            found = _positive_fit(terms[~is_check], seconds[~is_check])
            error = float(np.mean(np.abs(terms @ found / seconds - 1.0)[~is_check]))
            if found[0] > 0.0 and (best is None or error < best[0]):
                best = error, knee, exponent, found
    if best is None:
        raise ConfigError("the timed steps do not grow with their tokens", remedy="Time again.")
    _, knee, exponent, (token_s, context_s, pair_s, request_s) = best
    made = StepTimeProfile(
        model=model,
        engine=engine,
        gpu=gpu,
        floor_s=token_s * knee,
        token_s=token_s,
        exponent=exponent,
        context_token_s=context_s,
        pair_s=pair_s,
        request_s=request_s,
        max_tokens=int(loads[:, 0].max()),
    )
    checked = [row for row, checks in zip(rows, is_check, strict=True) if checks]
    return made.model_copy(update={"relative_error": _error(made, checked)})


def _error(profile: StepTimeProfile, rows: Sequence[MeasuredStep]) -> float:
    off = [abs(profile.seconds(row.load) / row.seconds - 1.0) for row in rows]
    return float(np.quantile(off, 0.95))


def _positive_fit(
    terms: Float64[np.ndarray, "rows 4"], seconds: Float64[np.ndarray, " rows"]
) -> Float64[np.ndarray, " 4"]:
    """Least squares of relative errors; terms with a negative coefficient are dropped.

    `scipy.optimize.nnls` finds the least squares; this differs where a dropped term would have come
    back. Four terms that all cost time need no better, and the policies stay without SciPy.
    """
    scaled = terms / seconds[:, None]
    kept = list(range(terms.shape[1]))
    found = np.zeros(terms.shape[1])
    while kept:
        part, *_ = np.linalg.lstsq(scaled[:, kept], np.ones(len(seconds)), rcond=None)
        if np.all(part >= 0.0):
            found[kept] = part
            break
        kept.pop(int(np.argmin(part)))
    return found
