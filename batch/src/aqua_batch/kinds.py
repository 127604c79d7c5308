"""Kinds of requests: what tells how long an answer will be where prompts share no beginning.

The *task* of a request is everything that its body asks for beside the prompt: its model, limit,
tools, response format, stops. Its *size* is the length of its prompt, by powers of two. Requests
alike in both come first, then those alike in either.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Hashable, Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Int32

NOT_OF_A_TASK: Final = frozenset(
    {
        "messages",
        "prompt",
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "seed",
        "service_tier",
        "store",
        "stream",
        "user",
    }
)
"""Fields that are the prompt, or say for whom or how often it is asked."""

Kinds = tuple[Int32[np.ndarray, " rows"], ...]


class KindTable:
    """Numbers the kinds of requests as they come."""

    def __init__(self) -> None:
        self._numbers: tuple[dict[Hashable, int], ...] = ({}, {}, {})
        self._columns = (array("i"), array("i"), array("i"))

    def add(self, body: Mapping[str, Any], prompt_size: int) -> None:
        """Take the next request.

        Args:
            prompt_size: Of its prompt, in whatever unit, the same for all.
        """
        task = json.dumps({k: v for k, v in body.items() if k not in NOT_OF_A_TASK}, sort_keys=True)
        size = prompt_size.bit_length()
        kinds: tuple[Hashable, ...] = ((task, size), task, size)
        for kind, numbers, column in zip(kinds, self._numbers, self._columns, strict=True):
            column.append(numbers.setdefault(kind, len(numbers)))

    def kinds(self) -> Kinds:
        """The kinds of all requests so far, from the narrowest on."""
        return tuple(np.array(column, np.int32) for column in self._columns)
