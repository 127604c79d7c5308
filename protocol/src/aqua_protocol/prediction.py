"""A predicted rate, as a file: what a simulation hands to a profiler, which begins there.

`aqua sim stable-rate` writes it and `aqua profile run llm --predicted` reads it, so that neither
knows the other. It is an idea and no measurement: nothing in a profile rests on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aqua_protocol.errors import ConfigError
from aqua_protocol.wire import first_fault

PREDICTION_VERSION: Final = 1
"""Fixed: the form of the file."""

Positive = Annotated[float, Field(gt=0, lt=1e9, strict=True)]


class PredictedRate(BaseModel):
    """The rate that a deployment is expected to sustain.

    Attributes:
        rate_per_s: Requests per second within both limits.
        ttft_s, tbt_s: Limits of the median time to the first token and of the 99th percentile of
            the time between tokens.
        told_by: What predicted it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    version: Literal[1] = PREDICTION_VERSION
    model: str
    gpu: str
    rate_per_s: Positive
    ttft_s: Positive
    tbt_s: Positive
    told_by: str = ""


def read_prediction(path: Path) -> PredictedRate:
    """A prediction from a file.

    Raises:
        ConfigError: There is no such file, or it is no prediction.
    """
    remedy = "Make one with `aqua sim stable-rate --output FILE`, or leave --predicted out."
    try:
        return PredictedRate.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy=remedy) from error
    except ValidationError as error:
        fault = first_fault(error, "the document")
        raise ConfigError(f"{path} is no predicted rate: {fault}", remedy=remedy) from error
