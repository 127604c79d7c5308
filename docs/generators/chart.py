"""The values of the chart: their table in its README, and what its schema lets through.

The table is read from the comments of `values.yaml`. Settings in the schema are those of
coordinator and batch service; renamed values those of `files/renamed.yaml`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml
from pydantic_settings import BaseSettings

from aqua_batch.service.settings import BatchSettings
from aqua_coordinator.settings import CoordinatorSettings

VALUES_BEGIN: Final = "<!-- values: written by `make docs` from values.yaml -->"
VALUES_END: Final = "<!-- end of values -->"
# Settings that follow from other values of the chart.
OF_THE_CHART: Final = re.compile(
    r"listen_.*|data_dir|drain_s|production|store_binary|redis_url|min_replicas|tls_.*"
    r"|(tokens|quotas)_file|capability_.*|adoption_.*|engines|engine_api_key|(database|files)_url"
    r"|batch_url|(batch_)?operator_token"
)


def chart_readme(page: str, values: str) -> str:
    """Put the table of values between its two markers in the text of the chart's README.

    Each value has a comment that begins with `--` above it; a block below one comment is one row.
    """
    rows: list[str] = []
    path: list[str] = []
    comment: list[str] = []
    described = -1  # Depth of the block that the last comment describes.
    for line in values.splitlines():
        text = line.strip()
        depth = (len(line) - len(line.lstrip())) // 2
        if text.startswith("#"):
            comment = [text[5:]] if text.startswith("# -- ") else comment
        elif found := re.match(r"([A-Za-z]+):\s*(.*)", text):
            path[depth:] = [found[1]]
            if 0 <= described < depth:
                continue
            described = depth if comment else -1
            if comment:
                default = found[2] or json.dumps(_value_at(values, path))
                rows.append(f"| `{'.'.join(path)}` | `{default}` | {' '.join(comment)} |")
                comment = []
    before, rest = page.split(VALUES_BEGIN)
    table = ["", "| value | default | meaning |", "|---|---|---|", *rows, ""]
    return before + VALUES_BEGIN + "\n".join(table) + VALUES_END + rest.split(VALUES_END)[1]


def chart_schema(schema: str, renamed: str) -> str:
    """Put settings and renamed values into the schema of the chart's values.

    A renamed value passes the schema, which could not say its new name; a template refuses it.
    """
    tree = json.loads(schema)
    models: dict[str, type[BaseSettings]]
    models = {"settings": CoordinatorSettings, "batchSettings": BatchSettings}
    for name, model in models.items():
        known = model.model_json_schema()
        tree["$defs"][name] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                setting: _schema_of_setting(field, known.get("$defs", {}))
                for setting, field in known["properties"].items()
                if not OF_THE_CHART.fullmatch(setting)
            },
        }
    for old, new in yaml.safe_load(renamed).items():
        *parents, name = old.split(".")
        node = tree
        for parent in parents:
            node = node["properties"][parent]
        node["properties"][name] = {"deprecated": True, "description": f"Now {new}."}
    return json.dumps(tree, indent=2) + "\n"


def _schema_of_setting(field: dict[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """What a value may be: its type, bounds and meaning, without what pydantic adds."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    kind = kinds[0]
    if "$ref" in kind:
        kind = definitions[kind["$ref"].rsplit("/", 1)[-1]]
    kept = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "pattern")
    result = {key: kind[key] for key in kept if key in kind}
    if result["type"] == "array":  # Lists are separated by commas.
        result = {"type": "string"}
    return {**result, "description": field["description"]}


def _value_at(values: str, path: Iterable[str]) -> object:
    node: Any = yaml.safe_load(values)
    for name in path:
        node = node[name]
    return node
