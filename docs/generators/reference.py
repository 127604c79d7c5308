"""The reference of commands and of HTTP, read from what runs: Typer's apps, OpenAPI's documents.

Each tool has a page with every command, its arguments and options, in the words of `--help`. Each
service has one with every operation, and every model that it takes or answers with. Nothing is
started: the applications are built beside a Redis that does not exist, and a database in a folder
that is removed again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import typer

from aqua_cli.aqua import app as aqua_app
from aqua_cli.distributions import DISTRIBUTION_OF, tools
from aqua_cli.program import ExitCode, command_of

EXIT_CODES: Final = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "a check failed, a target was missed, or the service refused",
    ExitCode.WRONG: "wrong usage, input or configuration; nothing was done",
    ExitCode.UNAVAILABLE: "a service, solver, engine or device is not available",
    ExitCode.INTERRUPTED: "interrupted",
}


def cli_pages(notice: str) -> Iterator[tuple[str, str]]:
    """Write the pages of `aqua` and of each of its tools: file name and text."""
    with _plain_environment():
        root = typer.main.get_command(aqua_app)
        rows = [f"| [`aqua {name}`]({name}.md) | `aqua-{name}` |" for name in DISTRIBUTION_OF]
        codes = [f"| {code.value} | {words} |" for code, words in EXIT_CODES.items()]
        lines = [
            *(notice, "# Commands", "", "`aqua` has every tool under one name. `--json` makes an"),
            *("answer one JSON object on standard output, an error too.", ""),
            *("| command | the same as |", "|---|---|", *rows, ""),
            *("## Exit status", "", "| | |", "|---|---|", *codes, ""),
            *("## `aqua`", "", *_parameters(root, typer.Context(root, info_name="aqua"))),
        ]
        context = typer.Context(root, info_name="aqua")
        doctor = root.get_command(context, "doctor")  # type: ignore[attr-defined]  # A group.
        lines += _command(doctor, "aqua doctor", 2)
        yield "README.md", "\n".join(lines)
        for name in DISTRIBUTION_OF:
            command = command_of(tools()[name].load(), f"aqua-{name}")
            yield f"{name}.md", "\n".join([notice, *_command(command, f"aqua {name}", 1)])


def _command(command: Any, path: str, depth: int) -> list[str]:  # noqa: ANN401 - Typer's, private
    """Describe a command and what is below it; `path` is what one types."""
    context = typer.Context(command, info_name=path)
    pieces = " ".join(command.collect_usage_pieces(context))
    lines = [
        *(f"{'#' * depth} `{path}`", "", *_paragraphs(command.help or ""), ""),
        *("```text", f"{path} {pieces}", "```", "", *_parameters(command, context)),
    ]
    for name in command.list_commands(context) if hasattr(command, "list_commands") else []:
        below = command.get_command(context, name)
        if not below.hidden:
            lines += _command(below, f"{path} {name}", depth + 1)
    return lines


def _paragraphs(text: str) -> list[str]:
    """Give a help text as Markdown: click's mark of a block that is not to be wrapped goes."""
    return text.replace("\b", "").strip().splitlines()


def _parameters(command: Any, context: typer.Context) -> list[str]:  # noqa: ANN401 - as above
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            rows.append(f"| `{_cell(record[0])}` | {_cell(record[1])} |")
    return ["| argument or option | meaning |", "|---|---|", *rows, ""] if rows else []


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def rest_pages(notice: str) -> Iterator[tuple[str, str]]:
    """Write the page of each service's HTTP interface: file name and text."""
    from aqua_batch.service.app import BatchService
    from aqua_batch.service.settings import BatchSettings
    from aqua_coordinator.app import Service
    from aqua_coordinator.settings import CoordinatorSettings
    from aqua_placer.service import create_app

    with _plain_environment(), tempfile.TemporaryDirectory() as folder:
        coordinator = Service(CoordinatorSettings(), "redis://127.0.0.1:1").api
        yield "coordinator.md", _rest_page(notice, "The coordinator", coordinator.openapi())
        yield "placer.md", _rest_page(notice, "The placer", create_app().openapi())
        settings = BatchSettings(data_dir=Path(folder), engines=("http://127.0.0.1:8000",))
        batch: Any = BatchService(settings)
        document = batch.asgi.openapi()
        batch.services.database.close()
        yield "batch.md", _rest_page(notice, "The batch service", document)


def _rest_page(notice: str, title: str, document: Mapping[str, Any]) -> str:
    about = document["info"].get("description", "").strip().splitlines()
    words = "Where a service has tokens or keys, `Authorization: Bearer` is asked for under `/v1`."
    lines = [
        *(notice, f"# {title} over HTTP", "", *about, *([""] if about else [])),
        *(words, "A running one has this at `/openapi.json`.", ""),
    ]
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            lines += _operation(path, verb, operation)
    models = document.get("components", {}).get("schemas", {})
    lines += ["## Models", ""]
    for name, schema in sorted(models.items()):
        lines += _model(name, schema)
    return "\n".join(lines)


def _operation(path: str, verb: str, operation: Mapping[str, Any]) -> list[str]:
    lines = [f"## `{verb.upper()} {path}`", ""]
    lines += (operation.get("description") or operation.get("summary", "")).strip().splitlines()
    rows = [
        f"| `{each['name']}` | {each['in']} | {_type(each['schema'])} | "
        f"{_cell(each.get('description', ''))} |"
        for each in operation.get("parameters", ())
    ]
    if rows:
        lines += ["", "| parameter | in | type | meaning |", "|---|---|---|---|", *rows]
    takes = _content(operation.get("requestBody", {}))
    lines += ["", f"Takes {takes}."] if takes else []
    answers = [
        f"{status} {_content(answer)}".rstrip()
        for status, answer in operation["responses"].items()
        if status.startswith("2")
    ]
    refusals = [status for status in operation["responses"] if not status.startswith("2")]
    refused = f"; or {', '.join(refusals)}" if refusals else ""
    lines += ["", f"Answers {', '.join(answers)}{refused}."]
    return [*lines, ""]


def _content(body: Mapping[str, Any]) -> str:
    kinds = [
        _type(content["schema"]) if content.get("schema") else f"`{media}`"
        for media, content in body.get("content", {}).items()
    ]
    return " or ".join(dict.fromkeys(kind for kind in kinds if kind))


def _model(name: str, schema: Mapping[str, Any]) -> list[str]:
    lines = [f"### `{name}`", "", *schema.get("description", "").strip().splitlines(), ""]
    if "enum" in schema:
        return [*lines, ", ".join(f"`{value}`" for value in schema["enum"]) + ".", ""]
    required = schema.get("required", ())
    rows = [
        f"| `{field}` | {_type(kind)} | {'required' if field in required else _default(kind)} | "
        f"{_cell(kind.get('description', ''))} |"
        for field, kind in schema.get("properties", {}).items()
    ]
    return [*lines, "| field | type | default | meaning |", "|---|---|---|---|", *rows, ""]


def _default(kind: Mapping[str, Any]) -> str:
    return f"`{kind['default']}`" if kind.get("default") is not None else "–"


def _type(kind: Mapping[str, Any]) -> str:
    """Name a schema in a few words; a model by a link to it."""
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name.lower()})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in kind:
            return " or ".join(dict.fromkeys(_type(each) for each in kind[several]))
    if "enum" in kind or "const" in kind:
        values = kind.get("enum") or [kind["const"]]
        return " or ".join(f"`{value}`" for value in values)
    name = kind.get("type", "any")
    if name == "array":
        return f"list of {_type(kind.get('items', {}))}"
    if name == "object" and isinstance(kind.get("additionalProperties"), Mapping):
        return f"map to {_type(kind['additionalProperties'])}"
    return str(kind.get("format", name))


@contextmanager
def _plain_environment() -> Iterator[None]:
    """Take away what would make a page differ from one machine to the next, and put it back."""
    before = dict(os.environ)
    for name in [*before]:
        if name.startswith("AQUA_") or name in {"COLUMNS", "HOME"}:
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)
