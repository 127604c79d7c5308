"""Makes an `Instance` of a file or request, and names every way it can be wrong.

Reads the model and the column form of a parsed document. What a schema can say is checked by
`aqua_protocol.problem`; here is checked what takes the whole problem: names are unique, sizes are
numbers, groups fit a server and the cluster, pins and current places exist. An error names the
first offending item and what to do about it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float64
from pydantic import BaseModel, ValidationError

from aqua_placer.errors import ProblemInvalidError
from aqua_placer.problem.document import read_document
from aqua_placer.problem.instance import GRAIN_GB, Instance, Servers
from aqua_protocol.problem import (
    MAX_SHARDS,
    MAX_SIZE_GB,
    ColumnProblem,
    GroupColumns,
    Model,
    PlacementProblem,
    ServerClass,
)
from aqua_protocol.profile import ModelProfile, ProfileLabel

MAX_NAME: Final = 256
"""Characters of a group's name, fixed by the length of a label in the schema."""

WEIGHT_RANGE: Final = (1e-6, 1e6)
"""Magnitudes beyond which a number is a slip of the unit: products with them vanish beside a GB, or
swallow all others."""

DESCRIPTIVE: Final = ("family", "seed", "comment")
"""Keys that are allowed beside `name` and mean nothing to the placer."""

SCHEMAS: Final[dict[int | str, type[BaseModel]]] = {
    "servers": ServerClass,
    "models": Model,
    "groups": GroupColumns,
}
"""Of the parts of a problem."""


def read_problem(path: Path, profiles: Sequence[Path] = ()) -> Instance:
    """The instance in a problem file; profiles named by path are read beside it.

    Args:
        profiles: Of more models, named as the profiles say; repeats become replicas.

    Raises:
        ProblemInvalidError: Anything wrong with the file, the problem or a profile.
    """
    document = read_document(path)
    if profiles and isinstance(document, dict):
        added: dict[str, dict[str, Any]] = {}
        for file in profiles:
            profile = read_document(file)
            name = _parsed(ModelProfile, profile).model
            added.setdefault(name, {"name": name, "replicas": 0, "profile": profile})
            added[name]["replicas"] += 1
        document["models"] = [*(document.get("models") or []), *added.values()]
    if isinstance(document, dict) and isinstance(document.get("models"), list):
        for model in document["models"]:
            if isinstance(model, dict) and isinstance(model.get("profile"), str):
                model["profile"] = read_document(path.parent / model["profile"])
    return instance_from(document, default_name=path.name.split(".")[0])


def instance_from(document: Any, *, default_name: str = "") -> Instance:  # noqa: ANN401 - parsed JSON
    """The instance that a parsed problem describes.

    Raises:
        ProblemInvalidError: It is not a problem, or a contradictory one.
    """
    if not isinstance(document, dict):
        raise ProblemInvalidError(
            f"a problem is an object, not a {type(document).__name__}",
            remedy="Write `servers:` and `models:` (or `groups:`) at the top level.",
        )
    document = _without_notes(document, "servers", "models")
    if "groups" in document:
        return _from_columns(_parsed(ColumnProblem, document), default_name)
    return _from_models(_parsed(PlacementProblem, document), default_name)


def _without_notes(entry: Any, *lists: str) -> Any:  # noqa: ANN401 - parsed JSON
    """An object without its descriptive keys, nor those of objects in these `lists` of its own."""
    if not isinstance(entry, dict):
        return entry
    plain = {key: value for key, value in entry.items() if key not in DESCRIPTIVE}
    for part in lists:
        if isinstance(plain.get(part), list):
            plain[part] = [_without_notes(item) for item in plain[part]]
    return plain


def _parsed(kind: type[Any], document: Any) -> Any:  # noqa: ANN401 - one of the schemas
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = _place(document, first["loc"])
        more = error.error_count() - 1
        remedy = "Correct the named field; docs/placement.md lists them all."
        if first["type"] == "extra_forbidden":
            remedy = _remedy_of_unknown(kind, first["loc"])
        raise ProblemInvalidError(
            f"{place}: {first['msg']}" + (f" (and {more} more)" if more else ""),
            remedy=remedy,
            field=".".join(str(part) for part in first["loc"]),
        ) from error


def _remedy_of_unknown(kind: type[BaseModel], loc: Sequence[int | str]) -> str:
    """What to write instead of a key that the schema does not know, in the same form of file."""
    schema, key = SCHEMAS.get(loc[0], kind), loc[-1]
    known = sorted(schema.model_fields)
    near = get_close_matches(str(key), known, n=1)
    if schema is GroupColumns:
        return f"Remove the column {key!r}; columns of `groups` are {', '.join(known)}."
    instead = f"Write {near[0]!r} for {key!r}" if near else f"Remove {key!r}"
    notes = f"; notes go into {', '.join(DESCRIPTIVE)}" if "name" in known else ""
    return f"{instead}; keys here are {', '.join(known)}{notes}."


def _place(document: Any, loc: Sequence[int | str]) -> str:  # noqa: ANN401 - parsed JSON
    """`models[3] (llama): tp` rather than a bare path."""
    words = ""
    node = document
    for part in loc:
        if isinstance(part, int):
            words += f"[{part}]"
            node = node[part] if isinstance(node, list) and part < len(node) else None
            if isinstance(node, dict) and isinstance(node.get("name"), str):
                words += f" ({node['name']})"
        else:
            words += f".{part}" if words else str(part)
            node = node.get(part) if isinstance(node, dict) else None
    return words or "problem"


def _digest_of(problem: BaseModel) -> str:
    """SHA-256 of the problem's meaning: the same for YAML, JSON and field order."""
    content = problem.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _servers(classes: Sequence[ServerClass]) -> Servers:
    names = [
        kind.name or ("server" if index == 0 else f"server-{index + 1}")
        for index, kind in enumerate(classes)
    ]
    _refuse_repeated(names, "server classes", "Give each class its own name.")
    return Servers(
        class_names=tuple(names),
        counts=np.array([kind.count for kind in classes], dtype=np.int64),
        gpus=np.array([kind.gpus for kind in classes], dtype=np.int64),
        hbm_gb=np.array([kind.hbm_gb for kind in classes], dtype=np.float64),
        links=tuple(
            None if kind.links is None else np.array(kind.links, dtype=np.float64)
            for kind in classes
        ),
    )


def _refuse_repeated(names: Sequence[str], what: str, remedy: str) -> None:
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        details: dict[str, Any] = {"group": twice} if what == "groups" else {}
        message = f"two {what} are named {twice!r}"
        raise ProblemInvalidError(message, remedy=remedy.format(twice), **details)


def _from_columns(problem: ColumnProblem, default_name: str) -> Instance:
    columns = problem.groups
    count = len(columns.name)
    for field in ("tp", "r_gb", "weight", "current"):
        column = getattr(columns, field)
        if column is not None and len(column) != count:
            raise ProblemInvalidError(
                f"groups.{field} has {len(column)} entries, groups.name has {count}",
                remedy="Give every column one entry per group.",
            )
    names = [str(name) for name in columns.name]
    servers = _servers(problem.servers)
    r_gb = np.array(columns.r_gb, dtype=np.float64)
    # Any whole number may stand there: what is far out is refused by name, below.
    tp = np.array([min(max(each, 0), MAX_SHARDS + 1) for each in columns.tp], dtype=np.int64)
    weight = np.ones(count) if columns.weight is None else np.array(columns.weight, np.float64)
    _first(names, ~np.isfinite(r_gb), "r_gb is not a number", "Profile it again, or leave it out.")
    _first(names, np.abs(r_gb) > MAX_SIZE_GB, "r_gb is out of range", "Give GB, not bytes.")
    _first(names, tp < 1, "has less than one shard", "Give tp as a whole number of at least 1.")
    _first(names, tp > MAX_SHARDS, f"has more than {MAX_SHARDS} shards", "Split the model.")
    places = {servers.name(index): index for index in range(servers.count)}
    today = columns.current or [None] * count
    current = [
        _current(name, place, places, servers) for name, place in zip(names, today, strict=True)
    ]
    return _checked(
        Instance(
            name=problem.name or default_name,
            servers=servers,
            names=names,
            tp=tp,
            r_gb=np.repeat(r_gb[:, None], len(servers.counts), axis=1),
            weight=weight,
            current=np.array(current, dtype=np.int64),
            digest=_digest_of(problem),
        ),
        "Give every entry of `groups.name` its own name, such as {0}.0 and {0}.1.",
    )


def _first(
    names: Sequence[str], wrong: Bool[np.ndarray, " groups"], what: str, remedy: str
) -> None:
    if wrong.any():
        index = int(wrong.argmax())
        raise ProblemInvalidError(
            f"group {names[index]!r} (entry {index}): {what}", remedy=remedy, group=names[index]
        )


def _current(
    group: str, place: int | str | None, places: Mapping[str, int], servers: Servers
) -> int:
    if place is None or place == -1:
        return -1
    index = place if isinstance(place, int) else places.get(place, -1)
    if not 0 <= index < servers.count:
        raise ProblemInvalidError(
            f"group {group!r} is on server {place!r} today, which does not exist",
            remedy="Use a server name (class/index) of this problem, or null.",
            group=group,
        )
    return index


def _from_models(problem: PlacementProblem, default_name: str) -> Instance:
    servers = _servers(problem.servers)
    places = {servers.name(index): index for index in range(servers.count)}
    names: list[str] = []
    tp: list[int] = []
    sizes: list[Float64[np.ndarray, " classes"]] = []
    weight: list[float] = []
    current: list[int] = []
    allowed: dict[int, Bool[np.ndarray, " servers"]] = {}
    apart: list[tuple[int, ...]] = []
    alike: dict[str, list[int]] = {}
    for model in problem.models:
        copies = [f".{index}" for index in range(model.replicas)] if model.replicas > 1 else [""]
        stages = [f".stage{index}" for index in range(model.stages)] if model.stages > 1 else [""]
        own = [model.name + copy + stage for copy in copies for stage in stages]
        members = range(len(names), len(names) + len(own))
        names += own
        tp += [model.shards] * len(own)
        sizes += [_size_by_class(model, servers)] * len(own)
        weight += [model.weight] * len(own)
        today = model.current or [None] * len(own)
        current += [_current(*entry, places, servers) for entry in zip(own, today, strict=True)]
        if model.pin:
            allowed |= dict.fromkeys(members, _pinned(model, servers, places))
        if model.anti_affinity is not None:
            alike.setdefault(model.anti_affinity, []).extend(members)
        if model.stages_apart and model.stages > 1:
            ends = range(0, len(own), model.stages)
            apart += [tuple(members[first : first + model.stages]) for first in ends]
    apart += [tuple(members) for members in alike.values() if len(members) > 1]
    return _checked(
        Instance(
            name=problem.name or default_name,
            servers=servers,
            names=names,
            tp=np.array(tp, dtype=np.int64),
            r_gb=np.array(sizes, dtype=np.float64).reshape(len(names), len(servers.counts)),
            weight=np.array(weight, dtype=np.float64),
            current=np.array(current, dtype=np.int64),
            allowed=allowed,
            apart=tuple(apart),
            digest=_digest_of(problem),
        ),
        "Give every entry of `models` its own `name`; `replicas: 2` makes two copies of {0}.",
    )


def _size_by_class(model: Model, servers: Servers) -> Float64[np.ndarray, " classes"]:
    if model.profile is not None and model.profile.partial:
        wrong, first = "is partial", "Finish profiling it (aqua-profile resumes)"
    elif model.profile is not None and model.profile.label is ProfileLabel.UNKNOWN:
        wrong = "does not say what it spares or needs"
        first = "Profile it where its memory can be read"
    else:
        measured = model.measured_hbm_gb
        shift = np.zeros(len(servers.counts)) if measured is None else servers.hbm_gb - measured
        return model.signed_gb + shift
    raise ProblemInvalidError(
        f"the profile of {model.name!r} {wrong}",
        remedy=f"{first}, or give memory_gb yourself.",
        model=model.name,
    )


def _pinned(
    model: Model, servers: Servers, places: Mapping[str, int]
) -> Bool[np.ndarray, " servers"]:
    mask: Bool[np.ndarray, " servers"] = np.zeros(servers.count, dtype=bool)
    for place in model.pin:
        if place in servers.class_names:
            mask |= servers.class_of == servers.class_names.index(place)
        elif place in places:
            mask[places[place]] = True
        else:
            raise ProblemInvalidError(
                f"model {model.name!r} is pinned to {place!r}, which is no server and no class",
                remedy=f"Classes here: {', '.join(servers.class_names)}; servers: class/index.",
                model=model.name,
            )
    return mask


def _checked(instance: Instance, remedy_of_duplicates: str) -> Instance:
    """What takes the whole problem; sizes below half a grain become nothing.

    Raises:
        ProblemInvalidError: Naming the first item that is wrong.
    """
    names, servers = instance.names, instance.servers
    _refuse_repeated(names, "groups", remedy_of_duplicates)
    if any(not name or len(name) > MAX_NAME for name in names):
        raise ProblemInvalidError(
            f"a group's name is empty or longer than {MAX_NAME} characters", remedy="Rename it."
        )
    (least, most), largest = WEIGHT_RANGE, int(servers.gpus.max())
    wrong = ~((instance.weight >= least) & (instance.weight <= most))
    _first(names, wrong, f"weight is not between {least:g} and {most:g}", "Use 1 for normal.")
    what = f"has more shards than the {largest} GPUs of the largest server"
    remedy = "Lower its tensor parallelism, or split it into pipeline stages."
    _first(names, instance.tp > largest, what, remedy)
    shards, gpus = int(instance.tp.sum()), servers.total_gpus
    if shards > gpus:
        raise ProblemInvalidError(
            f"{shards} shards do not fit {gpus} GPUs",
            remedy=f"Remove {shards - gpus} shards, or add servers of {largest} GPUs: "
            f"{math.ceil((shards - gpus) / largest)} more suffice.",
            shards=shards,
            gpus=gpus,
        )
    for group, mask in instance.allowed.items():
        fits = mask & (servers.capacity >= instance.tp[group])
        if not fits.any():
            raise ProblemInvalidError(
                f"group {names[group]!r} needs {instance.tp[group]} GPUs on one server, more than "
                "any server it is pinned to has",
                remedy="Pin it to larger servers, or lower its tensor parallelism.",
                group=names[group],
            )
    sizes = np.where(np.abs(instance.r_gb) < GRAIN_GB / 2, 0.0, instance.r_gb)
    return replace(instance, r_gb=sizes)
