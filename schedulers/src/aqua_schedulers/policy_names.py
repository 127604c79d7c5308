"""Names of a family of policies, as command lines and engine configurations give them."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from aqua_protocol.errors import ConfigError


class PolicyNames(StrEnum):
    """A family of policies; each family says which is its best, and that `best` is a name too."""

    @classmethod
    def best(cls) -> Self:
        """The best of the family."""
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
