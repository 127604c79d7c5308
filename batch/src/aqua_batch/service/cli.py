"""`aqua batch serve | submit | status | wait | cancel | fetch | key | quota`: the Batch API in use.

Exit codes are those of all commands (`aqua_cli`); `wait` and `submit --wait` say 1 where the batch
did not complete.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aqua_cli import Json, print_json, print_table, progress, replacing, say
from aqua_cli.program import ExitCode
from aqua_protocol.errors import ConfigError, UnknownResourceError

if TYPE_CHECKING:
    from aqua_batch.service.client import BatchClient
    from aqua_batch.service.wire import BatchObject

app = typer.Typer(rich_markup_mode="markdown")
key_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="API keys of a batch service's tenants."
)
app.add_typer(key_app, name="key")
quota_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="Limits of a batch service's tenants."
)
app.add_typer(quota_app, name="quota")

DEFAULT_URL: Final = "http://127.0.0.1:7720"
LOOK_S: Final = 1.0
"""Seconds between looks at a batch that is waited for. Doubled, its end is told a second later."""
LOG_EVERY_S: Final = 30.0
"""Seconds between two lines where stderr is no terminal. Doubled, a log says half as often."""
OPTIONS: Final = {
    "endpoint": "--endpoint, or the url of each line",
    "completion_window": "--window",
    "metadata": "--label",
}
"""Where a user says what a batch's fields say; fixed by `submit`."""
LAST: Final = frozenset({"completed", "failed", "expired", "cancelled"})

Url = Annotated[str, typer.Option("--url", envvar="AQUA_BATCH_URL", help="The batch service.")]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="AQUA_BATCH_API_KEY", help="API key for it.")
]
BatchId = Annotated[str, typer.Argument(help="Id of the batch.", metavar="BATCH")]
DatabaseOption = Annotated[
    str | None,
    typer.Option("--database-url", help="As of `serve`. [AQUA_BATCH_DATABASE_URL]"),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Database and files, without URLs. [AQUA_BATCH_DATA_DIR]")
]


@app.command()
def serve(
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of an engine; may be repeated. [AQUA_BATCH_ENGINES]"),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on. [AQUA_BATCH_LISTEN_HOST, default 127.0.0.1]"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port; 0 takes a free one. [AQUA_BATCH_LISTEN_PORT, default 7720]"),
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseOption = None,
    files_url: Annotated[
        str | None, typer.Option(help="Where files lie, by fsspec. [AQUA_BATCH_FILES_URL]")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. [AQUA_BATCH_LOG_LEVEL]")
    ] = None,
) -> None:
    """Serve OpenAI's Batch API in front of engines, until interrupted.

    **On your own machine**, beside a vLLM:

    `vllm serve ./Llama-3.1-8B --port 8000`

    `aqua batch serve --engine http://127.0.0.1:8000`

    **For others**: make an API key first, then listen on an address that they reach:

    `aqua batch key add --tenant research`

    `aqua batch serve --engine http://node-1:8000 --engine http://node-2:8000 --host 10.0.0.5`

    Kill it at any moment: each request ends exactly once. OpenAI's client takes it as
    `OpenAI(base_url="http://127.0.0.1:7720/v1")`; every setting is also a variable.
    """
    from aqua_batch.service.server import serve as run
    from aqua_batch.service.settings import load_batch_settings
    from aqua_cli.service import configure_logs

    settings = load_batch_settings(
        engines=None if engine is None else tuple(engine),
        listen_host=host,
        listen_port=port,
        data_dir=data_dir,
        database_url=database_url,
        files_url=files_url,
        log_level=log_level,
    )
    configure_logs(settings.log_level)
    run(settings)


@app.command()
def submit(
    source: Annotated[Path, typer.Argument(help="Batch file.", metavar="IN")],
    endpoint: Annotated[
        str | None, typer.Option(help="URL of its requests; that of its first line otherwise.")
    ] = None,
    window: Annotated[str, typer.Option(help="Time it may take: 90m, 24h, 7d.")] = "24h",
    label: Annotated[
        list[str] | None, typer.Option(help="Metadata, as name=value; may be repeated.")
    ] = None,
    wait_for_it: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Upload IN and create a batch of it; prints the batch's id.

    What is wrong with the options, the URL or the key is told before IN is sent.

    `aqua batch submit in.jsonl --wait && aqua batch fetch BATCH -o out.jsonl`
    """
    metadata = dict(_pair(each) for each in label or ())
    if not source.is_file():
        raise ConfigError(f"no file {source}", remedy="Name a batch file, a request per line.")
    if source.stat().st_size == 0:
        raise ConfigError(f"{source} is empty", remedy="Write a request per line.")
    endpoint = endpoint or _endpoint_of(source)
    _require_accepted(endpoint, window, metadata)
    with _connect(url, api_key) as client:
        client.list(1)
        with progress("uploading", quiet=as_json):
            file = client.upload(source)
        batch = client.create(file.id, endpoint, window, metadata)
        if wait_for_it:
            batch = _wait(client, batch.id, quiet=as_json)
    _show(batch, as_json=as_json)
    if wait_for_it:
        _exit_by(batch)


@app.command()
def status(
    batch_id: Annotated[
        str | None, typer.Argument(help="Id of a batch; the newest otherwise.", metavar="[BATCH]")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many of the newest.")] = 20,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Show a batch, or the newest.

    `aqua batch status --json | jq '.[] | select(.status == "in_progress").id'`
    """
    with _connect(url, api_key) as client:
        if batch_id is not None:
            _show(client.retrieve(batch_id), as_json=as_json)
            return
        found = client.list(limit)
    if as_json:
        print_json([each.model_dump() for each in found])
        return
    rows = [
        (each.id, each.status, _counts(each), f"{each.request_counts.failed}", _age(each))
        for each in found
    ]
    print_table("Batches", ("id", "status", "ended", "failed", "created"), rows)


@app.command("wait")
def wait_command(
    batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None, as_json: Json = False
) -> None:
    """Wait until a batch has ended, with progress; 1 unless it completed."""
    with _connect(url, api_key) as client:
        batch = _wait(client, batch_id, quiet=as_json)
    _show(batch, as_json=as_json)
    _exit_by(batch)


@app.command()
def cancel(
    batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None, as_json: Json = False
) -> None:
    """Cancel a batch: what runs is broken off, what has been answered can be fetched."""
    with _connect(url, api_key) as client:
        _show(client.cancel(batch_id), as_json=as_json)


@app.command()
def fetch(
    batch_id: BatchId,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the answers here.")],
    errors: Annotated[
        Path | None, typer.Option(help="And the errors here; OUT with .errors.jsonl otherwise.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Write the answers of a batch that has ended, and its errors if there are any."""
    with _connect(url, api_key) as client:
        batch = client.retrieve(batch_id)
        if batch.status not in LAST:
            raise ConfigError(
                f"{batch_id} is {batch.status}", remedy=f"`aqua batch wait {batch_id}` waits."
            )
        wanted = {
            output: batch.output_file_id,
            errors or output.with_suffix(".errors.jsonl"): batch.error_file_id,
        }
        if not any(wanted.values()):
            raise UnknownResourceError(
                f"{batch_id} has neither answers nor errors", remedy="Its status says why."
            )
        written = {}
        for path, file_id in wanted.items():
            if file_id is None:
                continue
            with replacing(path) as file, progress(f"fetching {path.name}", quiet=as_json):
                for piece in client.content(file_id):
                    file.write(piece)
            written[str(path)] = file_id
    if as_json:
        print_json({"files": written})
    else:
        for name in written:
            say(f"wrote {name}")


@key_app.command("add")
def add(
    tenant: Annotated[str, typer.Option(help="Whose files and batches it sees.")],
    note: Annotated[str, typer.Option(help="What it is for, for people.")] = "",
    database_url: DatabaseOption = None,
    data_dir: DataDir = None,
) -> None:
    """Make an API key and print it: this once, since the database keeps only its hash.

    From the first key on, every request needs one. Run it where the service's database is reached.
    """
    from aqua_batch.service.rows.keys import add_key, tenant_name

    tenant = tenant_name(tenant)
    with _database(database_url, data_dir) as run:
        key, row = run(lambda connection: add_key(connection, tenant, note[:256], time.time()))
    print(key)  # noqa: T201 - what the command is for
    say(f"key {row.key_id} added for {tenant}")


@key_app.command("list")
def list_keys(
    database_url: DatabaseOption = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """List the keys: ids, tenants, notes. Never the keys themselves."""
    from aqua_batch.service.rows import keys

    with _database(database_url, data_dir) as run:
        found = run(keys.list_keys)
    if as_json:
        print_json(
            [
                {"id": e.key_id, "tenant": e.tenant, "note": e.note, "created_s": e.created_s}
                for e in found
            ]
        )
        return
    made = [time.strftime("%Y-%m-%d %H:%M", time.localtime(each.created_s)) for each in found]
    rows = [(e.key_id, e.tenant, e.note, at) for e, at in zip(found, made, strict=True)]
    print_table("API keys", ("id", "tenant", "note", "made"), rows)


@key_app.command("load")
def load(
    folder: Annotated[Path, typer.Argument(help="A file for each tenant, a key a line.")],
    database_url: DatabaseOption = None,
    data_dir: DataDir = None,
) -> None:
    """Take API keys that were made elsewhere from FOLDER, such as a mounted Secret.

    Keys of an earlier load that are no longer there are revoked; those of `add` stay. The database
    is brought to this version's tables on the way, so it may run before `serve`.
    """
    from aqua_batch.service.rows.keys import read_key_folder, replace_loaded_keys

    tenants = read_key_folder(folder)
    with _database(database_url, data_dir) as run:
        run(lambda connection: replace_loaded_keys(connection, tenants, time.time()))
    say(f"{len(tenants)} keys of {len(set(tenants.values()))} tenants")


@key_app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="Id of the key.")],
    database_url: DatabaseOption = None,
    data_dir: DataDir = None,
) -> None:
    """Revoke a key; it is refused from the next request on."""
    from aqua_batch.service.rows.keys import revoke_key

    with _database(database_url, data_dir) as run:
        run(lambda connection: revoke_key(connection, key_id))


@quota_app.command("set")
def set_limits(
    tenant: Annotated[str, typer.Argument(help="Of its API keys; `default` without keys.")],
    stored_bytes: Annotated[
        int | None, typer.Option(min=0, help="Bytes of all its files together.")
    ] = None,
    open_requests: Annotated[
        int | None, typer.Option(min=0, help="Requests of its batches that have not ended.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Online requests, at each service.")
    ] = None,
    database_url: DatabaseOption = None,
    data_dir: DataDir = None,
) -> None:
    """Set the limits of a tenant, all at once: one that is left out is none.

    `aqua batch quota set research --stored-bytes 10000000000 --open-requests 200000`
    """
    from aqua_batch.service.rows.quotas import TenantLimits, set_quota

    quota = TenantLimits(tenant, stored_bytes, open_requests, requests_per_minute)
    with _database(database_url, data_dir) as run:
        run(lambda connection: set_quota(connection, quota))


@quota_app.command("list")
def list_limits(
    database_url: DatabaseOption = None, data_dir: DataDir = None, as_json: Json = False
) -> None:
    """List tenants with limits."""
    from aqua_batch.service.rows.quotas import list_quotas

    with _database(database_url, data_dir) as run:
        found = [asdict(each) for each in run(list_quotas)]
    if as_json:
        print_json(found)
        return
    rows = [tuple("-" if v is None else str(v) for v in each.values()) for each in found]
    print_table("Quotas", ("tenant", "bytes", "open requests", "a minute"), rows)


@contextmanager
def _database(url: str | None, data_dir: Path | None) -> Iterator[Any]:
    """The service's database, as a function that runs transactions."""
    from aqua_batch.service.rows.database import Database
    from aqua_batch.service.settings import load_batch_settings

    # Engines are not asked for anything here, but the settings want some.
    settings = load_batch_settings(
        engines=("http://none.invalid",), database_url=url, data_dir=data_dir
    )
    database = Database(settings.database)
    try:
        yield lambda work: asyncio.run(database.write(work))
    finally:
        database.close()


def _connect(url: str, api_key: str | None) -> BatchClient:
    from aqua_batch.service.client import BatchClient

    return BatchClient(url, api_key)


def _pair(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not is_there or not name:
        raise ConfigError(f"{text!r} is not name=value", remedy="For example --label team=search.")
    return name, value


def _require_accepted(endpoint: str, window: str, metadata: dict[str, str]) -> None:
    """Check what the service checks of a batch beside its file."""
    from aqua_batch.service.refusals import BatchApiError
    from aqua_batch.service.wire import batch_params

    given = {"endpoint": endpoint, "completion_window": window, "metadata": metadata}
    try:
        batch_params({"input_file_id": "not known yet", **given})
    except BatchApiError as error:
        field = (error.param or "").partition(".")[0]
        raise ConfigError(error.message, remedy=f"Correct {OPTIONS[field]}.") from error


def _endpoint_of(source: Path) -> str:
    """The URL that the first line names."""
    from aqua_batch.records import LONGEST_LINE_BYTES

    with source.open("rb") as file:
        line = file.readline(LONGEST_LINE_BYTES)
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the first line of {source} is no request with a url", remedy="Add --endpoint."
        ) from error


def _wait(client: BatchClient, batch_id: str, *, quiet: bool) -> BatchObject:
    began_s, before = time.monotonic(), -1
    with progress("waiting", 1.0, quiet=quiet, log_every_s=LOG_EVERY_S) as shown:
        while True:
            batch = client.retrieve(batch_id)
            if batch.status in LAST:
                return batch
            counts = batch.request_counts
            ended = counts.completed + counts.failed
            before = ended if before < 0 else before
            rate = (ended - before) / max(1e-9, time.monotonic() - began_s)
            note = f"{batch.status}, {_counts(batch)}"
            if rate > 0:
                note += f", {timedelta(seconds=round((counts.total - ended) / rate))} left"
            shown.update(done=ended / max(1, counts.total), note=note)
            time.sleep(LOOK_S)


def _exit_by(batch: BatchObject) -> None:
    if batch.status != "completed":
        raise typer.Exit(ExitCode.FAILED)


def _counts(batch: BatchObject) -> str:
    counts = batch.request_counts
    return f"{counts.completed + counts.failed} of {counts.total}"


def _age(batch: BatchObject) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(batch.created_at))


def _show(batch: BatchObject, *, as_json: bool) -> None:
    if as_json:
        print_json(batch)
        return
    print(batch.id)  # noqa: T201 - the result
    failed = batch.request_counts.failed
    say(f"{batch.status}: {_counts(batch)} requests" + (f", {failed} failed" if failed else ""))
    for fault in batch.errors.data if batch.errors else ():
        say(f"  {fault.message}")
