"""Lua steps: one typed Python function for each script, whose signature is the contract.

    @lua_step("renew_lease.lua", rows.lease)
    async def renew_lease(self, lease_id: str, *, epoch: int, ttl_s: float) -> LeaseView:
        '''Start the time to live anew.'''

The parameters are the script's ARGV, in their order and under their names; its header says the
same, with what it answers and which shared functions it calls
(`tests/unit/coordinator/test_scripts.py` compares).

What a parameter is declared as says how it travels: a float is a time in seconds and travels as
microseconds, a wire model as JSON without nulls, None as '', strings and whole numbers as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, get_type_hints

from pydantic import BaseModel

from aqua_coordinator.store.pipeline import Argument
from aqua_coordinator.store.rows import MICROSECONDS


class ScriptRunner(Protocol):
    """What steps are methods of."""

    async def run(self, script: str, *arguments: Argument) -> Sequence[Any]:
        """The answer of a script, `{'ok', ...}`; a refusal is raised."""


AnswerT = TypeVar("AnswerT")
RunnerT = TypeVar("RunnerT", bound=ScriptRunner)
P = ParamSpec("P")

STEPS: Final[dict[str, inspect.Signature]] = {}
"""The declared signature of each step, by the name of its script."""


def lua_step(
    file: str, read: Callable[[Sequence[Any]], AnswerT]
) -> Callable[
    [Callable[Concatenate[RunnerT, P], Awaitable[AnswerT]]],
    Callable[Concatenate[RunnerT, P], Coroutine[Any, Any, AnswerT]],
]:
    """Make a method without a body call a script of `lua/`; `read` says what its answer means."""
    script = file.removesuffix(".lua")

    def decorate(
        declared: Callable[Concatenate[RunnerT, P], Awaitable[AnswerT]],
    ) -> Callable[Concatenate[RunnerT, P], Coroutine[Any, Any, AnswerT]]:
        STEPS[script] = inspect.signature(declared)
        hints = get_type_hints(declared)
        parameters = list(STEPS[script].parameters.values())[1:]
        names = [parameter.name for parameter in parameters]
        encoders = [
            (index, encode)
            for index, name in enumerate(names)
            if (encode := _encoder(hints[name])) is not None
        ]
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

        @functools.wraps(declared)
        async def step(self: RunnerT, /, *args: P.args, **named: P.kwargs) -> AnswerT:
            words: list[Any] = [*args]
            if rest := names[len(args) :]:
                words += [named[name] if name in named else defaults[name] for name in rest]
            for index, encode in encoders:
                words[index] = encode(words[index])
            return read(await self.run(script, *words))

        return step

    return decorate


def _encoder(declared: object) -> Callable[[Any], Argument] | None:
    """How a parameter travels; None: as it is."""
    if declared is float:
        return lambda seconds: round(seconds * MICROSECONDS)
    if isinstance(declared, type) and issubclass(declared, BaseModel):
        return lambda body: body.__pydantic_serializer__.to_json(body, exclude_none=True)
    return None if declared in {str, int} else lambda value: "" if value is None else value
