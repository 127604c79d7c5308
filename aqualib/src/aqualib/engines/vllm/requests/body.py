"""What the middleware writes into the body of a request on its way to vLLM.

vLLM passes a request's `vllm_xargs` on to its scheduler, through whatever processes there are. So
what a header says, and the scheduler is to know, is written there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


def with_xarg(
    body: bytes, name: str, choose: Callable[[Mapping[str, Any], object], object]
) -> bytes:
    """A request's body with one of its `vllm_xargs` as chosen, as JSON.

    What is not a JSON object is returned as it is: vLLM says what is wrong with it.

    Args:
        body: As the client sent it.
        name: Of the argument.
        choose: Given the content and the argument in it, or None, gives the argument to send on;
            nothing of it for None.
    """
    try:
        content = json.loads(body)
    except ValueError:
        return body
    if not isinstance(content, dict):
        return body
    given = content.get("vllm_xargs")
    xargs = dict(given) if isinstance(given, Mapping) else {}
    chosen = choose(content, xargs.pop(name, None))
    if chosen is not None:
        xargs[name] = chosen
    if xargs or given:
        content["vllm_xargs"] = xargs
    return json.dumps(content).encode()
