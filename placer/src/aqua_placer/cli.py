"""`aqua-place`: solve, replan, explain, render, check, bench, serve, push.

Imports numpy, HiGHS and the rest inside commands, so that `--help` answers at once. What a script
may read goes to standard output (`--json`), what a person watches (progress, errors with their
remedy) to standard error. Ctrl-C during a solve ends it with the best plan so far and its bound; a
second one stops at once. Exit codes: 0 done, 1 a check failed or a target was missed, 2 the input
or a setting is wrong, 3 a service or solver is not available.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from aqua_placer.budget import Budget, Progress
    from aqua_placer.problem.instance import Instance
    from aqua_placer.solvers.solving import Request
    from aqua_protocol.plan import Plan

app = typer.Typer(
    name="aqua-place",
    help="Put memory producers next to the consumers that need them, with a proven bound.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Choice = TypeVar("Choice", bound=StrEnum)

EXIT_MISSED, EXIT_WRONG, EXIT_UNAVAILABLE = 1, 2, 3

ProblemFile = Annotated[Path, typer.Argument(help="Problem: YAML or JSON, .gz or not.")]
PlanFile = Annotated[Path, typer.Argument(help="Plan, as written by --output.")]
ObjectiveOption = Annotated[str, typer.Option("--objective", help="coverage, abs or signed.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds, at most.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same plan.")]
MatchingOption = Annotated[
    str, typer.Option("--matching", help="stable, best-fit, exact or links.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan here.")]


@app.command()
def solve(  # noqa: PLR0917 - a command has as many arguments as options
    file: ProblemFile,
    objective: ObjectiveOption = "coverage",
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    solver: Annotated[str, typer.Option(help="auto, or milp for the paper's program.")] = "auto",
    backend: Annotated[str, typer.Option(help="For milp: highs, gurobi or cbc.")] = "highs",
    matching: MatchingOption = "stable",
    threads: Annotated[int, typer.Option(min=1, max=1, help="Solvers run on one thread.")] = 1,
    profile: Annotated[
        list[Path] | None, typer.Option(help="Profiles to add as models, one replica each.")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Place models on servers and match producers to consumers."""
    from aqua_placer.solvers.solving import place

    del threads  # one is the promise: the same seed gives the same plan
    instance = _problem(file, profile or [])
    request = _request(objective, seed, solver, backend, matching)
    with _budget(time_limit, quiet=as_json) as budget:
        plan = place(instance, request, budget)
    _deliver(plan, output, as_json=as_json)


@app.command()
def replan(  # noqa: PLR0917 - as above
    file: ProblemFile,
    current: Annotated[Path | None, typer.Option(help="Today's plan.")] = None,
    epsilon: Annotated[float, typer.Option(help="Distance to the optimum allowed.")] = 0.01,
    max_moves: Annotated[int | None, typer.Option(help="Most shards to migrate.")] = None,
    objective: ObjectiveOption = "coverage",
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    matching: MatchingOption = "stable",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Reach the target again with few migrations, as steps that can be executed in order."""
    from aqua_placer.plans.files import read_plan
    from aqua_placer.replan.replacing import Relocation, relocate

    instance = _problem(file, [])
    today = None if current is None else read_plan(current)
    request = _request(objective, seed, "auto", "highs", matching)
    with _budget(time_limit, quiet=as_json) as budget:
        plan, result = relocate(instance, today, request, Relocation(epsilon, max_moves), budget)
    _deliver(plan, output, as_json=as_json)
    if not as_json:
        for move in plan.moves:
            source = f"{move.from_server} {move.from_gpus}" if move.from_server else "-"
            goal = f"{move.to_server} {move.to_gpus}" if move.to_server else "-"
            typer.echo(f"{move.step:5d} {move.kind:6s} {move.group}: {source} -> {goal}")
    if not result.reached:
        _say(
            f"The target (within {epsilon:g}) is not reached with {plan.migrations} migrations; "
            "raise --max-moves or --epsilon."
        )
        raise typer.Exit(EXIT_MISSED)


@app.command()
def explain(
    file: ProblemFile,
    plan_file: PlanFile,
    groups: Annotated[
        list[str] | None, typer.Argument(help="Groups; all unmatched if none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say in words why a consumer has this producer or none, and what would fix it."""
    from aqua_placer.plans.explaining import Explainer

    plan = _plan_for(file, plan_file)
    explainer = Explainer(_problem(file, []), plan)
    names = groups or [entry.group for entry in plan.unmatched[:20]]
    told = [explainer.explain(name) for name in names]
    if as_json:
        _print_json(
            {
                "summary": explainer.summary(),
                "groups": [
                    {"group": t.group, "server": t.server, "role": t.role, "lines": list(t.lines)}
                    for t in told
                ],
            }
        )
        return
    for line in explainer.summary():
        typer.echo(line)
    for entry in told:
        typer.echo(f"\n{entry.group} ({entry.role})")
        for line in entry.lines:
            typer.echo(f"  {line}")
    if not groups and len(plan.unmatched) > len(names):
        typer.echo(
            f"\n... and {len(plan.unmatched) - len(names)} more unmatched; name them to ask."
        )


@app.command()
def render(
    file: ProblemFile,
    plan_file: PlanFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .svg or .png file.")],
    first: Annotated[int, typer.Option(min=0, help="First server to draw.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Servers to draw, up to 48.")] = 48,
) -> None:
    """Draw servers as columns, producers above, consumers below, matches joined."""
    from aqua_placer.plans.explaining import Explainer
    from aqua_placer.plans.rendering import render as draw

    plan = _plan_for(file, plan_file)
    explainer = Explainer(_problem(file, []), plan)
    drawn = draw(explainer, output, first=first, count=count)
    _say(f"{output}: {drawn} of {explainer.instance.servers.count} servers")


@app.command()
def check(file: ProblemFile, plan_file: PlanFile, as_json: Json = False) -> None:
    """Verify a plan independently of the solvers."""
    from aqua_placer.plans.checking import check_plan
    from aqua_placer.plans.files import read_plan

    verdicts = check_plan(_problem(file, []), read_plan(plan_file))
    if as_json:
        _print_json(
            {
                "passed": verdicts.passed,
                "problems": verdicts.problems,
                "facts": verdicts.facts,
                "blocking_pairs": verdicts.blocking_pairs,
            }
        )
    else:
        for problem in verdicts.problems:
            typer.echo(problem)
        typer.echo("passed" if verdicts.passed else f"{len(verdicts.problems)} problems")
    if not verdicts.passed:
        raise typer.Exit(EXIT_MISSED)


@app.command()
def bench(
    folder: Annotated[Path | None, typer.Argument(help="Problem files; default: families.")] = None,
    family: Annotated[list[str] | None, typer.Option(help="Families; default: all five.")] = None,
    gpus: Annotated[list[int] | None, typer.Option(help="Sizes; default: 128 and 1024.")] = None,
    objective: ObjectiveOption = "coverage",
    seeds: Annotated[int, typer.Option(min=1, max=100)] = 1,
    time_limit: TimeLimit = 60.0,
    as_json: Json = False,
) -> None:
    """Solve a folder of problems, or seeded families, and tabulate gap, coverage and CPU time."""
    from aqua_placer.benching import as_table, measure, sources

    rows = []
    with _bar(quiet=as_json) as advance:
        for label, make in sources(folder, family or [], gpus or [128, 1024], seeds):
            rows.append(measure(label, make(), _objective(objective), time_limit))
            advance(label)
    if as_json:
        _print_json({"objective": objective, "rows": rows})
    else:
        typer.echo(as_table(rows))


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 7710,
    token: Annotated[
        str | None, typer.Option(envvar="AQUA_PLACER_TOKEN", help="Bearer token callers need.")
    ] = None,
) -> None:
    """Serve the placer over HTTP."""
    import ipaddress

    import uvicorn

    from aqua_placer.service import create_app
    from aqua_protocol import ConfigError

    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(f"{host!r} is not an address", remedy="Use an IP address.") from error
    if token is None and not loopback:
        raise ConfigError(
            f"refusing to serve {host} to anyone",
            remedy="Set AQUA_PLACER_TOKEN, or bind a loopback address.",
        )
    uvicorn.run(create_app(token), host=host, port=port, log_level="info")


@app.command()
def push(
    plan_file: PlanFile,
    url: Annotated[
        str, typer.Option(envvar="AQUA_COORDINATOR_URL", help="The coordinator.")
    ] = "http://127.0.0.1:7700",
    token: Annotated[
        str | None, typer.Option(envvar="AQUA_TOKEN", help="A token of role operator.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send a plan's matches to the coordinator, which obeys them."""
    from aqua_placer.plans.files import read_plan
    from aqua_placer.plans.pushing import push as send

    plan = read_plan(plan_file)
    count = send(plan, url, token)
    if as_json:
        _print_json({"pairings": count, "plan_hash": plan.plan_hash, "url": url})
    else:
        _say(f"{url}: {count} pairings of plan {plan.plan_hash[:12]}")


def _choice(kind: type[Choice], value: str, option: str) -> Choice:
    from aqua_protocol import ConfigError

    try:
        return kind(value)
    except ValueError as error:
        raise ConfigError(
            f"{option} {value!r} is not known",
            remedy=f"Choose one of {', '.join(member.value for member in kind)}.",
        ) from error


def _objective(value: str) -> Any:  # noqa: ANN401 - an Objective; its module loads pydantic
    from aqua_protocol.plan import Objective

    return _choice(Objective, value, "--objective")


def _request(objective: str, seed: int, solver: str, backend: str, matching: str) -> Request:
    from aqua_placer.programs.milp import Backend
    from aqua_placer.solvers.solving import Request, Solver
    from aqua_protocol.plan import MatchingMode

    return Request(
        objective=_objective(objective),
        solver=_choice(Solver, solver, "--solver"),
        backend=_choice(Backend, backend, "--backend"),
        matching=_choice(MatchingMode, matching, "--matching"),
        seed=seed,
    )


def _problem(file: Path, profiles: list[Path]) -> Instance:
    from aqua_placer.problem.reading import (
        instance_from,
        models_of_profiles,
        read_document,
        read_problem,
    )

    if not profiles:
        return read_problem(file)
    document = read_document(file)
    models = models_of_profiles([read_document(path) for path in profiles])
    if isinstance(document, dict):
        document["models"] = [*(document.get("models") or []), *models]
    return instance_from(document, default_name=file.name.split(".")[0])


def _plan_for(file: Path, plan_file: Path) -> Plan:
    """The plan, if it was made for this problem."""
    from aqua_placer.errors import PlanInvalidError
    from aqua_placer.plans.files import read_plan
    from aqua_placer.problem.reading import read_problem

    plan, instance = read_plan(plan_file), read_problem(file)
    if plan.problem_hash != instance.digest:
        raise PlanInvalidError(
            f"{plan_file} was made for another problem than {file}",
            remedy="Give the file it was solved from, or solve again.",
        )
    return plan


@contextmanager
def _budget(limit_s: float, *, quiet: bool) -> Iterator[Budget]:
    """A budget that Ctrl-C interrupts and whose progress is shown on a terminal."""
    import signal
    import threading

    from aqua_placer.budget import Budget

    interrupt = threading.Event()

    def stop(_signal: int, _frame: object) -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt
        interrupt.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        with _live(quiet=quiet) as show:
            yield Budget(limit_s, listener=show, interrupt=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _live(*, quiet: bool) -> Iterator[Any]:
    """A line with stage, value, bound and gap, on a terminal; silence elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:

        def show(progress: Progress) -> None:
            gap = "" if progress.gap is None else f"  gap {progress.gap:.2%}"
            value = "" if progress.value is None else f"  {progress.value:.1f} GB"
            bound = "" if progress.bound is None else f"  bound {progress.bound:.1f} GB"
            status.update(f"{progress.stage}{value}{bound}{gap}  {progress.elapsed_s:.1f} s")

        yield show


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Any]:
    """A line per finished measurement on a terminal."""
    show = not quiet and sys.stderr.isatty()
    yield (lambda label: _say(f"done: {label}") if show else None)


def _deliver(plan: Plan, output: Path | None, *, as_json: bool) -> None:
    from aqua_placer.plans.files import write_plan

    if output is not None:
        write_plan(plan, output)
    if as_json:
        typer.echo(plan.model_dump_json())
        return
    share = plan.coverage_gb / plan.demand_gb if plan.demand_gb else 1.0
    typer.echo(f"objective    {plan.objective}: {plan.value:g} GB, bound {plan.bound:g} GB")
    typer.echo(f"gap          {plan.gap:.4%}{' (proven optimal)' if plan.proven else ''}")
    typer.echo(f"coverage     {plan.coverage_gb:g} of {plan.demand_gb:g} GB ({share:.1%})")
    typer.echo(f"balance      {plan.max_abs_mem_gb:g} GB and {plan.max_abs_cnt} models at most")
    typer.echo(f"matches      {len(plan.matches)} shards, {len(plan.unmatched)} groups unmatched")
    if plan.moves:
        least = plan.migrations_bound
        proven = f" (at least {least} are needed)" if least else ""
        if least == plan.migrations:
            proven = " (proven fewest)"
        typer.echo(f"migrations   {plan.migrations} shards{proven}, {len(plan.moves)} steps")
    typer.echo(f"seconds      {plan.solve_seconds:.3f} ({plan.cpu_seconds:.3f} CPU), {plan.solver}")


def _print_json(content: object) -> None:
    import json

    typer.echo(json.dumps(content))


def _say(text: str) -> None:
    typer.echo(text, err=True)


def main() -> None:
    """Entry point: typed errors become a line, a remedy and an exit code."""
    from aqua_protocol.errors import AquaError

    try:
        app()
    except AquaError as error:
        if "--json" in sys.argv:
            typer.echo(error.to_body().model_dump_json())
        _say(f"aqua-place: {error.message} [{error.code}]")
        if error.remedy:
            _say(f"  {error.remedy}")
        unavailable = 501
        sys.exit(EXIT_UNAVAILABLE if error.http_status >= unavailable else EXIT_WRONG)
