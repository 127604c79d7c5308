"""What the middleware writes into the body of a request on its way to vLLM.

vLLM passes a request's `vllm_xargs` on to its scheduler, through whatever processes there are, and
at its token-in, token-out API the `extra_args` of its `sampling_params`. So what a header says, and
the scheduler is to know, is written there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from aqua_protocol.errors import RequestInvalidError

Choose = Callable[[Mapping[str, Any], object], object]
"""Given a request's content and an argument in it, or None, the argument to send on; None drops."""


def with_xargs(body: bytes, choices: Mapping[str, Choose]) -> bytes:
    """A request's body with arguments for the scheduler as chosen, as JSON.

    What is not a JSON object is returned as it is: vLLM says what is wrong with it.

    Args:
        body: As the client sent it.
        choices: By an argument's name, what says what it is to be.

    Raises:
        RequestInvalidError: It is nested deeper than JSON is read here.
    """
    content = _read(body)
    if not isinstance(content, dict):
        return body
    params = content.get("sampling_params")
    for name, choose in choices.items():
        _choose(content, "vllm_xargs", name, content, choose)
        if isinstance(params, dict):
            _choose(params, "extra_args", name, content, choose)
    return json.dumps(content).encode()


def _choose(
    holder: dict[str, Any], field: str, name: str, content: Mapping[str, Any], choose: Choose
) -> None:
    given = holder.get(field)
    xargs = dict(given) if isinstance(given, Mapping) else {}
    chosen = choose(content, xargs.pop(name, None))
    if chosen is not None:
        xargs[name] = chosen
    if xargs or given:
        holder[field] = xargs


def _read(body: bytes) -> object:
    try:
        return json.loads(body)
    except RecursionError as error:
        raise RequestInvalidError("the body is nested too deeply") from error
    except ValueError:
        return None
