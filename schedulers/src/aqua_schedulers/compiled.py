"""Numba, typed: functions compiled to machine code, and the scalars that they change.

Numba ships no type information, so its decorator would turn every kernel into `Any`. `compiled`
keeps the signature. Kernels are cached beside their source, because compiling takes seconds;
there is no fast-math: the same input must give the same floats on every machine that rounds as
IEEE 754 says.

A *record* holds the counters that a kernel changes: a structured array of one element, made from
the fields of a dataclass, so that both sides name them. Kernels take it by reference (`record[0]`)
and read and write `.field` as fast as they do an array's elements; Python reads it the same way, or
all at once with `snapshot`. Why not numba's `structref` or `jitclass`: from Python each of their
fields is a compiled call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from typing import Any, TypeVar, cast

import numba
import numpy as np

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
FieldsT = TypeVar("FieldsT")

_NJIT = cast("Any", numba.njit)  # Numba's types do not know all of its options.
_SCALARS = {"int": np.int64, "float": np.float64}


def compiled(function: FunctionT) -> FunctionT:
    """Compile `function` on its first call; it must keep to what numba understands."""
    made = _NJIT(cache=True, no_cfunc_wrapper=True)(function)
    return cast("FunctionT", made)


def compiled_part(function: FunctionT) -> FunctionT:
    """Compile a function that only compiled ones call.

    It has no way in from Python: to make one takes numba longer than the function itself where
    arguments are tuples of arrays.
    """
    made = _NJIT(cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return cast("FunctionT", made)


def variable(value: int) -> int:
    """A constant that kernels pass on as any number.

    For a plain one numba compiles what is called with it once for each value.
    """
    return cast("int", np.int64(value))


def records(kind: type[FieldsT], count: int) -> Sequence[FieldsT]:
    """`count` records with the fields of a dataclass (of `int` and `float` only), all zero."""
    dtype = np.dtype((np.record, [(field.name, _SCALARS[field.type]) for field in fields(kind)]))  # type: ignore[arg-type, index] # any dataclass; its annotations are strings
    return cast("Sequence[FieldsT]", np.zeros(count, dtype))


def record(values: FieldsT) -> Sequence[FieldsT]:
    """One record that starts with the values of a dataclass."""
    made = records(type(values), 1)
    cast("Any", made)[0] = astuple(values)  # type: ignore[call-overload] # any dataclass
    return made


def snapshot(kind: type[FieldsT], made: Sequence[FieldsT]) -> FieldsT:
    """The present values of one record, as plain Python numbers."""
    return kind(*cast("Any", made).item())
