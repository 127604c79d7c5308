"""The reference of variables that configure a service or a member, from their settings."""

from __future__ import annotations

from typing import Final

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from aqua_batch.service.settings import BatchSettings
from aqua_coordinator.settings import CoordinatorSettings
from aqualib.settings import Settings

SIGNS: Final = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def configuration_page(notice: str) -> str:
    """Every variable that configures a coordinator, a member or a batch service."""
    sections: list[str] = []
    kinds = (
        ("A coordinator", CoordinatorSettings),
        ("A member", Settings),
        ("A batch service", BatchSettings),
    )
    for title, kind in kinds:
        prefix = kind.model_config.get("env_prefix", "")
        rows = [
            f"| `{prefix}{name.upper()}` | {_default(field)} | {_bounds(field)} | "
            f"{field.description} |"
            for name, field in kind.model_fields.items()
        ]
        head = [f"## {title}", "", "| variable | default | bounds | meaning |", "|---|---|---|---|"]
        sections += [*head, *rows, ""]
    words = [
        "Set by environment variables; an empty one counts as unset. A value that does not fit is",
        "refused at the start, by its name. Lists are separated by commas.",
    ]
    return "\n".join([notice, "# Configuration", "", *words, "", *sections])


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "see meaning"
    return "unset" if field.default in (None, (), frozenset()) else f"`{field.default}`"


def _bounds(field: FieldInfo) -> str:
    limits = [
        f"{SIGNS[type(limit).__name__.lower()]} {getattr(limit, type(limit).__name__.lower())}"
        for limit in field.metadata
        if isinstance(limit, Ge | Gt | Le | Lt)
    ]
    return ", ".join(limits) or "–"
