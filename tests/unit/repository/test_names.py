"""Names: a public class name has one meaning, modules are nouns, words are the field's or ours."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Final

from harness.source_tree import ROOT, modules

# Words in -ing that the field uses as nouns; `string` and the like are nouns anyway.
NOUNS_IN_ING: Final = frozenset(
    {
        "batching",
        "leasing",
        "lending",
        "mapping",
        "matching",
        "paging",
        "pinning",
        "ranking",
        "routing",
        "scheduling",
        "serving",
        "timing",
        "tracing",
    }
)
MAX_LINES: Final = 500
FIELD_WORDS: Final = Path(__file__).with_name("field_words.txt")


def test_one_public_class_name_stands_in_one_module() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in module.public_classes():
            homes[node.name].append(module.path)
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_modules_are_nouns() -> None:
    gerunds = {
        module.path
        for module in modules()
        if (last := module.name.rpartition("_")[2]).endswith("ing") and last not in NOUNS_IN_ING
    }
    assert not gerunds


def test_no_module_is_longer_than_a_reader_keeps_in_mind() -> None:
    places = ("*/src/**/*.py", "tests/**/*.py", "benchmarks/*.py", "docs/**/*.py")
    counts = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for place in places
        for path in ROOT.glob(place)
    }
    assert not {path: count for path, count in counts.items() if count > MAX_LINES}


def test_each_word_of_a_public_name_is_the_fields_or_stands_in_the_glossary() -> None:
    """A new word is either used by the field (add it to `field_words.txt`) or ours (glossary)."""
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").lower()
    known = {
        word
        for line in FIELD_WORDS.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
        for word in line.split()
    }
    ours = set(re.findall(r"[a-z]+", " ".join(re.findall(r"\*\*([^*]+)\*\*", glossary))))
    unknown: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in module.public_classes():
            for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", node.name):
                if word.lower() not in known | ours:
                    unknown[word.lower()].append(f"{module.path}: {node.name}")
    assert not unknown


def test_each_field_word_is_used() -> None:
    """A word that left the code leaves the list, so that it cannot come back unseen."""
    used = {
        word.lower()
        for module in modules()
        for node in module.public_classes()
        for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", node.name)
    }
    listed = {
        word
        for line in FIELD_WORDS.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
        for word in line.split()
    }
    assert not listed - used
