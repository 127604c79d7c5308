"""The one door to numba: functions compiled to machine code, still typed for the reader.

Numba ships no type information, so its decorator would turn every kernel into `Any`. `compiled`
keeps the signature. Kernels are cached beside their source, because compiling takes seconds;
there is no fast-math: the same input must give the same floats on every machine that rounds as
IEEE 754 says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def compiled(function: FunctionT) -> FunctionT:
    """Compile `function` on its first call; it must keep to what numba understands."""
    return cast("FunctionT", numba.njit(cache=True)(function))
