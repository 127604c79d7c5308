"""JSON and YAML as people write them: what a parser would pass over in silence is an error.

Of a key that is there twice a parser keeps the last value, and drops what may be the one that was
meant. A file that is nested deeper than Python goes is no file that a person wrote.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any


def parse_document(text: str, *, is_json: bool) -> Any:  # noqa: ANN401 - whatever the text holds
    """The content of a text.

    Raises:
        ValueError: It is not of that format, or a key is there twice; says where, if known.
    """
    try:
        return json.loads(text, object_pairs_hook=_object) if is_json else _yaml(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        _refuse_twice([key for key, _ in pairs])
    return found


def _refuse_twice(keys: Sequence[Hashable], where: str = "") -> None:
    seen = set[Hashable]()
    for key in keys:
        if key in seen:
            raise ValueError(f"the key {key!r} is there twice{where}; keep one of them")
        seen.add(key)


def _yaml(text: str) -> Any:  # noqa: ANN401 - whatever the text holds
    import yaml

    class Loader(yaml.SafeLoader):
        """As safe as its base; looks at keys before `<<` merges others among them."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401 - yaml's
            node = super().compose_mapping_node(anchor)
            _refuse_twice(
                [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)],
                f" in the mapping of line {node.start_mark.line + 1}",
            )
            return node

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
