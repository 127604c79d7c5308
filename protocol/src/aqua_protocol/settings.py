"""Settings out of the environment, and what is said of those that are wrong.

Each service and the library has settings of its own; a variable that is wrong is named alike by all
of them, and its content by none: it may be a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from aqua_protocol.errors import ConfigError

SettingsT = TypeVar("SettingsT")

VALUE_ERROR: Final = "Value error, "
"""Fixed: what pydantic writes before a validator's own words."""


def read_settings(
    kind: Callable[..., SettingsT], prefix: str, remedy: str, overrides: Mapping[str, Any]
) -> SettingsT:
    """Settings out of the environment; overrides that are not None win over it, by field name.

    Args:
        prefix: Of the variables.

    Raises:
        ConfigError: Values do not fit; it names every variable and what is wrong with it.
    """
    try:
        return kind(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_input=False, include_url=False):
            place = fault["loc"]
            variable = f"{prefix}{str(place[0]).upper()}: " if place else ""
            faults.append(variable + fault["msg"].removeprefix(VALUE_ERROR))
        raise ConfigError("; ".join(faults), remedy=remedy) from error
