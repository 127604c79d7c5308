"""This distribution's version, as members report it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final


def _installed_version() -> str:
    try:
        return version("aqualib")
    except PackageNotFoundError:
        # Run from a source tree on PYTHONPATH; only `PROTOCOL_VERSION` decides who may talk.
        return "0+source"


AQUALIB_VERSION: Final = _installed_version()
