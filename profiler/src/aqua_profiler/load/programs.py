"""Deployments that are not LLM endpoints: programs named `module:factory`, and HTTP endpoints.

A factory takes no argument and returns an object. A *batch* program has `run(size)`, which makes a
batch of that size and returns when it is done. A *context* program has `read(tokens)`, which reads
a prompt of so many tokens and returns the bytes of its context (keys and values). Either may keep
account of an emulated device: `used_bytes`, the highest of the last call, and `total_bytes`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Final, Protocol

import httpx

from aqua_profiler.errors import EndpointGoneError, EndpointRefusedError
from aqua_profiler.load.answer_stream import SHOWN
from aqua_protocol import ConfigError

TIMEOUT_S: Final = 600.0
"""Seconds of one batch: diffusion of a thousand images takes minutes. Doubled, a hung server is
found out twice as late."""

SIZE_MARK: Final = '"$batch"'
"""What stands for the size of a batch in the body of a request."""


class BatchProgram(Protocol):
    """A program that makes batches."""

    def run(self, size: int) -> None:
        """Make one batch; return when it is done."""


class ContextProgram(Protocol):
    """Reads prompts, within a budget of device memory."""

    used_bytes: int
    total_bytes: int

    def read(self, tokens: int) -> int:
        """Read a prompt; returns the bytes of its keys and values."""


def load(name: str, method: str) -> Any:  # noqa: ANN401 - the user's object
    """What a `module:factory` makes.

    Raises:
        ConfigError: No such module or factory, or what it makes lacks the method.
    """
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise ConfigError(f"{name!r} is not a program", remedy="Name it as module:factory.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cannot load {name!r}: {error}", remedy="Name a module that can be imported from here."
        ) from error
    finally:
        sys.path.pop(0)
    program = factory()
    if not callable(getattr(program, method, None)):
        raise ConfigError(
            f"what {name} returns has no method {method}",
            remedy=f"Return an object with {method}(...); docs/profiling.md shows one.",
        )
    return program


class HttpBatchProgram:
    """A batch is one POST.

    Args:
        url: Of the operation, for example `/v1/images/generations`.
        body: JSON text with `"$batch"` where the size goes.
    """

    is_remote = True

    def __init__(self, url: str, body: str, token: str | None = None) -> None:
        if SIZE_MARK not in body:
            raise ConfigError(
                f"the body has no {SIZE_MARK}",
                remedy='Write for example {"prompt": "a", "n": "$batch"}.',
            )
        try:
            json.loads(body)
        except ValueError as error:
            raise ConfigError(f"the body is not JSON: {error}", remedy="Mend --body.") from error
        self._url, self._body = url, body
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.Client(
            headers=headers, timeout=TIMEOUT_S, follow_redirects=True, trust_env=False
        )

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def run(self, size: int) -> None:
        """Ask for one batch and read all of it.

        Raises:
            MemoryError: The server ran out of memory; larger batches will too.
            EndpointError: It failed otherwise.
        """
        body = self._body.replace(SIZE_MARK, str(size))
        try:
            answer = self._http.post(self._url, content=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointGoneError(f"no answer from {self._url}: {error!r}") from error
        if not answer.is_error:
            return
        said = answer.text[:SHOWN]
        if "out of memory" in answer.text.lower():
            raise MemoryError(said)
        raise EndpointRefusedError(f"{self._url} answered {answer.status_code}: {said!r}")
