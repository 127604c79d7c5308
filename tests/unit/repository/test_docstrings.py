"""Public docstrings are sentences: they have a subject or a verb, and no riddling pronouns."""

from __future__ import annotations

import re
from typing import Final

from harness.source_tree import modules

# A summary that begins so is a fragment: "Of the budget.", "In seconds, per device."
FRAGMENT: Final = re.compile(
    r"(Of|In|On|At|By|To|From|For|With|Without|As|And|Or|But|Than|Whose)\s", re.IGNORECASE
)
SHORTEST: Final = 2  # "See `Transport.close`."
# Who does it? These words hide the one thing that a docstring of a distributed system must say.
RIDDLES: Final = re.compile(r"\b(nobody|whoever|whomever|he whom|somebody else's)\b", re.IGNORECASE)


def test_summaries_are_sentences_not_fragments() -> None:
    fragments = []
    for module in modules():
        for name, text in module.public_docstrings():
            summary = text.split("\n\n")[0]
            if FRAGMENT.match(summary) or len(summary.split()) < SHORTEST:
                fragments.append(f"{module.path}: {name}: {summary}")
    assert not fragments


def test_the_source_names_who_acts() -> None:
    riddles = [
        f"{module.path}:{number}: {line.strip()}"
        for module in modules()
        for number, line in enumerate(module.text.splitlines(), start=1)
        if RIDDLES.search(line)
    ]
    assert not riddles
