"""The command line: `aqua-coordinator serve | status | quotas | token`.

Errors and exit codes are those of all commands (`aqua_cli`): 1 refused or not found, 2 wrong usage
or configuration, 3 a service that does not answer.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from aqua_cli import CoordinatorToken, CoordinatorUrl, Json, print_json, print_table, say
from aqua_cli import main as run_program
from aqua_cli.program import DEFAULT_COORDINATOR_URL
from aqua_coordinator.access.tokens import (
    Role,
    create_token,
    parse_duration,
    read_tokens,
    revoke_token,
)
from aqua_protocol import ConfigError

app = typer.Typer(
    name="aqua-coordinator",
    help="Aqua's books: who lends GPU memory, who holds a lease on it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
token_app = typer.Typer(rich_markup_mode="markdown")
app.add_typer(token_app, name="token")


def main() -> None:
    """Run the command line."""
    run_program(app, "aqua-coordinator")


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. [AQUA_LISTEN_HOST, default 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 takes a free one. [AQUA_LISTEN_PORT, default 7700]")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            help="redis://, rediss://, unix:// or redis+sentinel://a:26379,b:26379/service/0. "
            "Without it a Valkey server is embedded. [AQUA_REDIS_URL]"
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the embedded Valkey keeps its data. [AQUA_DATA_DIR]")
    ] = None,
    tokens_file: Annotated[
        Path | None, typer.Option(help="Tokens of `aqua-coordinator token`. [AQUA_TOKENS_FILE]")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. [AQUA_LOG_LEVEL]")
    ] = None,
) -> None:
    """Serve the books over HTTP until interrupted.

    **On your own machine**: `aqua-coordinator serve`

    **For a cluster**: make tokens first, then listen on an address that members reach:

    `aqua-coordinator token --file tokens.json --role operator`

    `aqua-coordinator serve --host 10.0.0.5 --tokens-file tokens.json --redis-url
    rediss://redis.internal:6379/0`

    Every setting is also an environment variable; the API describes itself at `/docs`.
    """
    from aqua_cli.service import configure_logs
    from aqua_coordinator.server import serve as run
    from aqua_coordinator.settings import load_settings

    settings = load_settings(
        listen_host=host,
        listen_port=port,
        redis_url=redis_url,
        data_dir=data_dir,
        tokens_file=tokens_file,
        log_level=log_level,
    )
    configure_logs(settings.log_level)
    run(settings)


@app.command()
def status(
    url: CoordinatorUrl = DEFAULT_COORDINATOR_URL,
    token: CoordinatorToken = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=60, help="Seconds between looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show producers, consumers, leases and reclaims, live until interrupted.

    `aqua-coordinator status --once`

    `aqua-coordinator status --json | jq '.producers[].free_bytes'`
    """
    from rich.console import Console

    from aqua_client import CoordinatorClient
    from aqua_coordinator.status import TIMEOUT_S, Status, watch

    with CoordinatorClient(url, token, timeout_s=TIMEOUT_S) as client:
        if as_json:
            print_json(Status.read(client))
        elif once:
            Console().print(Status.read(client).render(client.url))
        else:
            watch(client, interval_s)


@app.command()
def quotas(
    url: CoordinatorUrl = DEFAULT_COORDINATOR_URL,
    token: CoordinatorToken = None,
    as_json: Json = False,
) -> None:
    """Show what each tenant has on lease, may have, and has borrowed; to a tenant, its own.

    `aqua-coordinator quotas --json | jq '.[] | select(.borrowed_bytes > 0).tenant'`
    """
    from aqua_client import CoordinatorClient
    from aqua_coordinator.status import TIMEOUT_S, quota_row

    with CoordinatorClient(url, token, timeout_s=TIMEOUT_S) as client:
        views = [*client.list_quotas()]
    if as_json:
        print_json([view.model_dump(mode="json") for view in views])
        return
    columns = ("tenant", "cohort", "leased", "borrowed", "nominal", "could borrow", "available")
    print_table("Quotas", columns, [quota_row(view) for view in views])


FileOption = Annotated[
    Path, typer.Option("--file", envvar="AQUA_TOKENS_FILE", help="The tokens file.")
]


@token_app.callback(invoke_without_command=True)
def token(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Option("--file", envvar="AQUA_TOKENS_FILE", help="The tokens file; made if missing."),
    ] = None,
    role: Annotated[
        list[Role] | None, typer.Option(help="What it may do; may be repeated.")
    ] = None,
    member: Annotated[
        str | None, typer.Option(help="Bind it to this producer or consumer.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Whose members it sees and speaks for; see the quotas.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Time until it expires: 90s, 12h, 30d. Default: never.")
    ] = None,
    note: Annotated[str, typer.Option(help="What it is for, for people.")] = "",
) -> None:
    """Make a token and print it: this once, since the file keeps only its hash.

    `aqua-coordinator token --file tokens.json --role operator`

    `aqua-coordinator token --file tokens.json --role consumer --member llm-0.node-3 --expires 30d`

    Coordinators that use the file notice within a second. The token goes to standard output, its
    id to standard error.
    """
    if context.invoked_subcommand is not None:
        return
    if file is None:
        raise ConfigError("no tokens file", remedy="Add --file tokens.json or AQUA_TOKENS_FILE.")
    if not role:
        raise ConfigError("a token needs a role", remedy=f"Add --role, one of {', '.join(Role)}.")
    made, entry = create_token(
        file,
        roles=role,
        member=member,
        tenant=tenant,
        expires_in_s=None if expires is None else parse_duration(expires),
        note=note,
    )
    print(made)  # noqa: T201 - what the command is for
    say(f"token {entry.token_id} added to {file}")


@token_app.command("list")
def list_tokens(file: FileOption, as_json: Json = False) -> None:
    """List the tokens of a file: ids, roles, members, expiry. Never the tokens themselves."""
    entries = read_tokens(file).tokens
    if as_json:
        print_json([entry.model_dump(mode="json", exclude={"sha256"}) for entry in entries])
        return
    rows = []
    for entry in entries:
        expires = "never"
        if entry.expires_s is not None:
            expires = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.expires_s))
        roles = ", ".join(entry.roles)
        whose = entry.member or "any", entry.tenant or ""
        rows.append((entry.token_id, roles, *whose, expires, entry.note))
    print_table("Tokens", ("id", "roles", "member", "tenant", "expires", "note"), rows)


@token_app.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(help="Id of the token.")], file: FileOption
) -> None:
    """Revoke a token; coordinators refuse it within a second."""
    revoke_token(file, token_id)
