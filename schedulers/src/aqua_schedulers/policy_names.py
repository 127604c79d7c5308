"""Policies of one kind by name, as command lines and engine configurations give it."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from aqua_protocol.errors import ConfigError


class PolicyKind(StrEnum):
    """Policies of one kind; `best` is a name for that which its kind calls the best."""

    @classmethod
    def best(cls) -> Self:
        """The best of the kind."""
        raise NotImplementedError

    @classmethod
    def named(cls, name: str) -> Self:
        """The policy of that name; `best` is the best we have.

        Raises:
            ConfigError: No policy of that name.
        """
        if name == "best":
            return cls.best()
        try:
            return cls(name)
        except ValueError:
            known = ", ".join((*cls, "best"))
            raise ConfigError(f"no policy named {name!r}", remedy=f"Known: {known}.") from None
