"""What a plan does not know of a Kubernetes cluster: images, ports, nodes, GPUs by UUID.

A mapping is a small file beside the plan. What it says of an engine or a server are values of the
chart by the chart's own names. `models` are found by the name of a group (`llama.0.stage1`), then
of its model (`llama`), then by patterns (`llama-*`) in their order; `defaults` fill what none says.
What is missing is told all at once, with lines to add.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from aqua_placer.errors import MappingIncompleteError, MappingInvalidError
from aqua_placer.problem.document import read_document
from aqua_protocol.wire import Wire, first_fault

MAPPING_VERSION: Final = 1
"""Fixed: the form of the file; it grows when a reader of the old form would misread a new one."""

MAX_TOLD: Final = 8
"""Missing lines in one message. Doubled, the message is longer; `--json` has all of them."""

Uuid = Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z-]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Mode = Literal["dra", "hostNamespaces", "sidecar"]


class ChartValues(Wire):
    """Values of the chart, by the chart's names."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class EngineTemplate(ChartValues):
    """How engines of a model run."""

    image: Annotated[str, Field(min_length=1)] | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[dict[str, Any]] | None = None
    port: Port | None = None
    metrics_port: Port | None = None
    health_path: Annotated[str, Field(pattern="^/")] | None = None
    resources: dict[str, Any] | None = None
    volumes: list[dict[str, Any]] | None = None
    volume_mounts: list[dict[str, Any]] | None = None


class ServerTemplate(ChartValues):
    """Which node a server of the plan is, and what its pods need there.

    Attributes:
        node: Its `kubernetes.io/hostname`.
        gpus: UUIDs of all its GPUs, in the order of the plan's numbers.
    """

    node: str | None = None
    gpus: list[Uuid] | None = None
    node_selector: dict[str, str] | None = None
    tolerations: list[dict[str, Any]] | None = None
    priority_class_name: str | None = None
    device_class_name: str | None = None
    constraints: list[dict[str, Any]] | None = None
    run_as_user: Annotated[int, Field(ge=1)] | None = None


class ClusterMapping(ChartValues):
    """The file. `servers` are found by name (`dgx/3`), then by class (`dgx`), which has no node."""

    version: Literal[1] = MAPPING_VERSION
    mode: Mode = "dra"
    namespace: str | None = None
    defaults: EngineTemplate = EngineTemplate()
    models: dict[str, EngineTemplate] = Field(default_factory=dict)
    servers: dict[str, ServerTemplate] = Field(default_factory=dict)

    def engine(self, group: str) -> EngineTemplate:
        """What is said of a group's engine, over what is said of all."""
        own = self.models.get(group) or self.models.get(model_of(group))
        if own is None:
            patterns = (name for name in self.models if fnmatchcase(group, name))
            own = self.models.get(next(patterns, ""), EngineTemplate())
        return EngineTemplate(
            **self.defaults.model_dump(exclude_none=True) | own.model_dump(exclude_none=True)
        )

    def server(self, name: str) -> ServerTemplate:
        """What is said of a server, over what is said of its class."""
        kind = self.servers.get(name.rpartition("/")[0], ServerTemplate())
        own = self.servers.get(name, ServerTemplate())
        shared = kind.model_dump(exclude_none=True, exclude={"node", "gpus"})
        return ServerTemplate(**shared | own.model_dump(exclude_none=True))

    def require(self, groups: Iterable[str], servers: Iterable[tuple[str, int]]) -> None:
        """Refuse a mapping that lacks what these groups and servers (name, GPUs) need.

        Raises:
            MappingIncompleteError: Names every group and server, with what it lacks.
        """
        without = [model_of(group) for group in groups if self.engine(group).image is None]
        missing = [f"models.{model}.image" for model in dict.fromkeys(without)]
        for name, count in servers:
            told = self.server(name)
            if self.mode == "hostNamespaces":
                missing += [
                    f"servers.{name}.{key}"
                    for key in ("node", "gpus")
                    if getattr(told, key) is None
                ]
            if told.gpus is not None and (len(told.gpus) != count or len(set(told.gpus)) != count):
                missing.append(f"servers.{name}.gpus (it has {count}, each once)")
        if missing:
            more = f" and {len(missing) - MAX_TOLD} more" if len(missing) > MAX_TOLD else ""
            raise MappingIncompleteError(
                f"the mapping lacks {', '.join(missing[:MAX_TOLD])}{more}",
                missing=missing,
            )


def model_of(group: str) -> str:
    """The model of a group, which is called `model.copy.stageN`, each where there are several."""
    return re.sub(r"(\.\d+)?(\.stage\d+)?$", "", group)


def read_mapping(path: Path | None) -> ClusterMapping:
    """Read a mapping file; an empty mapping without one.

    Raises:
        MappingInvalidError: It is not a mapping.
        ProblemInvalidError: It cannot be read at all.
    """
    if path is None:
        return ClusterMapping()
    try:
        mapping = ClusterMapping.model_validate(read_document(path))
    except ValidationError as error:
        raise MappingInvalidError(f"{path}: {first_fault(error)}") from error
    uuids = Counter(uuid for told in mapping.servers.values() for uuid in told.gpus or ())
    # Two servers may share a node, as halves that NVLink does not join, if their GPUs are said.
    nodes = Counter(told.node for told in mapping.servers.values() if told.node and not told.gpus)
    for what, names in (("node", nodes), ("GPU", uuids)):
        if twice := [name for name, count in names.items() if count > 1]:
            raise MappingInvalidError(f"{path}: {what} {twice[0]} is in two servers")
    return mapping
