"""Each number at module level says what it is, whence it comes, and what doubling it does.

A *tuning* constant could be another number: its comment says what happens when it is doubled. A
*fixed* one could not (a format, a unit, an ABI, an index): its comment says by what it is fixed.
"""

from __future__ import annotations

import re
from typing import Final

from harness.source_tree import constants, modules

EXPLAINED: Final = re.compile(
    r"\b(doubl\w+|twice|hal(f|ved|ving)|(two|three|four|ten) times|"
    r"fixed|defined by|without (it|them))\b",
    re.IGNORECASE,
)


def test_each_numeric_constant_says_what_doubling_does_or_what_fixes_it() -> None:
    silent = [
        f"{constant.module}:{constant.line}: {constant.name}"
        for module in modules()
        for constant in constants(module)
        if not EXPLAINED.search(constant.words)
    ]
    assert not silent
