"""How much of a slow tier a run takes: a seeded slice by default, all of it on request.

Some tests repeat one claim over many examples, victims or seeds. `make test` and `make test-slow`
take a slice of them, the same one every time, so that they stay short and nothing in them depends
on luck. The targets for whole tiers (`make chaos`, `make property`) set AQUA_TESTS_WHOLE=1;
AQUA_TESTS_SEED picks another slice.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Final, TypeVar

Item = TypeVar("Item")

IS_WHOLE: Final = os.environ.get("AQUA_TESTS_WHOLE") == "1"
SEED: Final = int(os.environ.get("AQUA_TESTS_SEED", "0"))


def examples(count: int, *, whole: int) -> int:
    """Hypothesis examples to draw: `count` in a slice, `whole` in a whole tier."""
    return whole if IS_WHOLE else count


def shuffled(items: Sequence[Item], *, key: str = "") -> list[Item]:
    """All items in an order drawn by the seed and `key`, for a slice of unknown length."""
    return random.Random(f"{SEED} {key}").sample(list(items), len(items))
