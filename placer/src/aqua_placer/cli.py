"""`aqua-place`: solve, replan, explain, render, check, bench, serve, push, drift, apply.

Imports numpy, HiGHS and the rest inside commands, so that `--help` answers at once. What a script
may read goes to standard output (`--json`), what a person watches (progress, errors with their
remedy) to standard error. Ctrl-C during a solve ends it with the best plan so far and its bound; a
second one stops at once. Errors, exit codes and files are those of all commands (`aqua_cli`); exit
code 1 says that a check failed or a target was missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from aqua_cli import (
    CoordinatorToken,
    CoordinatorUrl,
    ExitCode,
    Json,
    Output,
    print_json,
    print_table,
    progress,
    say,
    write_json,
)
from aqua_cli import main as run
from aqua_cli.program import DEFAULT_COORDINATOR_URL
from aqua_placer.rollout.cli import MappingFile, PlanFile, apply, drift

if TYPE_CHECKING:
    from aqua_placer.budget import Budget, Progress
    from aqua_placer.plan.explanation import Explainer
    from aqua_protocol.plan import Plan

app = typer.Typer(
    name="aqua-place",
    help="Put memory producers next to the consumers that need them, with a proven bound.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

# As `aqua_protocol.plan` and `problem.request` have them, whose import would take half a second.
ObjectiveName = Literal["coverage", "abs", "signed"]
MatchingName = Literal["stable", "best-fit", "exact", "links"]

ProblemFile = Annotated[Path, typer.Argument(help="Problem: YAML or JSON, .gz or not.")]
ObjectiveOption = Annotated[ObjectiveName, typer.Option("--objective", help="What to optimise.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds, at most.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same plan.")]
MatchingOption = Annotated[
    MatchingName, typer.Option("--matching", help="Who gets which producer.")
]


@app.command()
def solve(  # noqa: PLR0917 - a command has as many arguments as options
    file: ProblemFile,
    objective: ObjectiveOption = "coverage",
    time_limit: TimeLimit = 60.0,
    seed: Seed = 0,
    solver: Annotated[
        Literal["auto", "milp"], typer.Option(help="milp: the paper's program.")
    ] = "auto",
    backend: Annotated[
        Literal["highs", "gurobi", "cbc"], typer.Option(help="Who takes that program.")
    ] = "highs",
    matching: MatchingOption = "stable",
    threads: Annotated[int, typer.Option(min=1, max=1, help="Solvers run on one thread.")] = 1,
    profile: Annotated[
        list[Path] | None, typer.Option(help="Profiles to add as models, one replica each.")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Place models on servers and match producers to consumers."""
    from aqua_placer.problem.parser import read_problem
    from aqua_placer.problem.request import Backend, Request, Solver
    from aqua_placer.solve.placement import place
    from aqua_protocol.plan import MatchingMode, Objective

    del threads  # One is the promise: the same seed gives the same plan.
    request = Request(
        Objective(objective), Solver(solver), Backend(backend), MatchingMode(matching), seed
    )
    instance = read_problem(file, profile or ())
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
    from aqua_placer.plan.files import read_plan
    from aqua_placer.problem.parser import read_problem
    from aqua_placer.problem.request import Request
    from aqua_placer.relocate.relocation import Relocation, relocate
    from aqua_protocol.plan import MatchingMode, Objective

    instance = read_problem(file)
    today = None if current is None else read_plan(current)
    request = Request(Objective(objective), matching=MatchingMode(matching), seed=seed)
    with _budget(time_limit, quiet=as_json) as budget:
        plan, result = relocate(instance, today, request, Relocation(epsilon, max_moves), budget)
    _deliver(plan, output, as_json=as_json)
    if not as_json:
        for move in plan.moves:
            source = f"{move.from_server} {move.from_gpus}" if move.from_server else "-"
            goal = f"{move.to_server} {move.to_gpus}" if move.to_server else "-"
            typer.echo(f"{move.step:5d} {move.kind:6s} {move.group}: {source} -> {goal}")
    if not result.reached:
        say(
            f"The target (within {epsilon:g}) is not reached with {plan.migrations} migrations; "
            "raise --max-moves or --epsilon."
        )
        raise typer.Exit(ExitCode.FAILED)


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
    from dataclasses import asdict

    explainer = _explainer(file, plan_file)
    plan = explainer.plan
    names = groups or [entry.group for entry in plan.unmatched[:20]]
    told = [explainer.explain(name) for name in names]
    if as_json:
        print_json({"summary": explainer.summary(), "groups": [asdict(entry) for entry in told]})
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
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .svg or .png file; for Kubernetes a folder.")
    ],
    as_what: Annotated[
        Literal["picture", "kubernetes"], typer.Option("--format", help="What to make of it.")
    ] = "picture",
    mapping_file: MappingFile = None,
    after_step: Annotated[
        int | None, typer.Option(help="Kubernetes: the state after so many steps of a replan.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="Picture: first server to draw.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Picture: servers to draw, up to 48.")] = 48,
) -> None:
    """Draw a plan, or make it values of the chart helm/aqua and ResourceClaims.

    A picture has servers as columns, producers above, consumers below, matches joined. With
    --format kubernetes, the folder gets values.yaml and resourceclaims.yaml; --mapping names what
    the plan does not know: images, ports, nodes.
    """
    from aqua_placer.plan.picture import render as draw
    from aqua_placer.rollout.kubernetes import render_plan
    from aqua_placer.rollout.mapping import read_mapping

    explainer = _explainer(file, plan_file)
    if as_what == "kubernetes":
        mapping = read_mapping(mapping_file)
        made = render_plan(explainer.instance, explainer.plan, mapping, after_step)
        for path in made.write(output):
            say(str(path))
        return
    drawn = draw(explainer, output, first=first, count=count)
    say(f"{output}: {drawn} of {explainer.instance.servers.count} servers")


@app.command()
def check(file: ProblemFile, plan_file: PlanFile, as_json: Json = False) -> None:
    """Verify a plan independently of the solvers."""
    from aqua_placer.plan.files import read_plan
    from aqua_placer.plan.verification import check_plan
    from aqua_placer.problem.parser import read_problem

    verdicts = check_plan(read_problem(file), read_plan(plan_file))
    if as_json:
        print_json(verdicts)
    else:
        for problem in verdicts.problems:
            typer.echo(problem)
        typer.echo("passed" if verdicts.passed else f"{len(verdicts.problems)} problems")
    if not verdicts.passed:
        raise typer.Exit(ExitCode.FAILED)


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
    from aqua_placer.benchmark import COLUMNS, measure, sources
    from aqua_protocol.plan import Objective

    problems = list(sources(folder, family or [], gpus or [128, 1024], seeds))
    rows: list[dict[str, object]] = []
    with progress("Solving", total=len(problems), quiet=as_json) as shown:
        for label, make in problems:
            shown.update(done=len(rows), note=label)
            rows.append(measure(label, make(), Objective(objective), time_limit))
    if as_json:
        print_json({"objective": objective, "rows": rows})
        return
    told = [[row[name] for name in COLUMNS] for row in rows]
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in told]
    print_table(f"Solved for {objective}", COLUMNS, cells)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 7710,
    token: Annotated[
        str | None, typer.Option(envvar="AQUA_PLACER_TOKEN", help="Bearer token callers need.")
    ] = None,
) -> None:
    """Serve the placer over HTTP."""
    import uvicorn

    from aqua_cli.service import is_loopback
    from aqua_placer.service import create_app
    from aqua_protocol import ConfigError

    if token is None and not is_loopback(host):
        raise ConfigError(
            f"refusing to serve {host} to anyone",
            remedy="Set AQUA_PLACER_TOKEN, or bind a loopback address.",
        )
    uvicorn.run(create_app(token), host=host, port=port, log_level="info")


@app.command()
def push(
    plan_file: PlanFile,
    url: CoordinatorUrl = DEFAULT_COORDINATOR_URL,
    token: CoordinatorToken = None,
    as_json: Json = False,
) -> None:
    """Send a plan's matches to the coordinator, which obeys them."""
    from aqua_placer.plan.files import push as send
    from aqua_placer.plan.files import read_plan

    plan = read_plan(plan_file)
    count = send(plan, url, token)
    if as_json:
        print_json({"pairings": count, "plan_hash": plan.plan_hash, "url": url})
    else:
        say(f"{url}: {count} pairings of plan {plan.plan_hash[:12]}")


app.command()(drift)
app.command()(apply)


def _explainer(file: Path, plan_file: Path) -> Explainer:
    """Plan and problem, if they belong together and the plan is sound."""
    from aqua_placer.errors import PlanInvalidError
    from aqua_placer.plan.explanation import Explainer
    from aqua_placer.plan.files import read_plan, require_problem
    from aqua_placer.plan.verification import check_plan
    from aqua_placer.problem.parser import read_problem

    plan, instance = read_plan(plan_file), read_problem(file)
    require_problem(plan, instance, plan_file, file)
    if problems := check_plan(instance, plan).problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise PlanInvalidError(
            f"{plan_file}: {problems[0]}{more}",
            remedy="Solve again; `aqua place check` lists all that is wrong.",
        )
    return Explainer(instance, plan)


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
        with progress("starting", quiet=quiet) as shown:

            def show(now: Progress) -> None:
                gap = "" if now.gap is None else f"  gap {now.gap:.2%}"
                value = "" if now.value is None else f"{now.value:.1f} GB"
                bound = "" if now.bound is None else f"  bound {now.bound:.1f} GB"
                shown.update(title=now.stage, note=f"{value}{bound}{gap}")

            yield Budget(limit_s, listener=show, interrupt=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)


def _deliver(plan: Plan, output: Path | None, *, as_json: bool) -> None:
    if output is not None:
        write_json(output, plan)
    if as_json:
        print_json(plan)
        return
    share = plan.coverage_gb / plan.demand_gb if plan.demand_gb else 1.0
    typer.echo(f"objective    {plan.objective}: {plan.value:g} GB, bound {plan.bound:g} GB")
    typer.echo(f"gap          {plan.gap:.4%}{' (proven optimal)' if plan.proven else ''}")
    typer.echo(f"coverage     {plan.coverage_gb:g} of {plan.demand_gb:g} GB ({share:.1%})")
    typer.echo(f"balance      {plan.max_abs_mem_gb:g} GB and {plan.max_abs_cnt} models at most")
    typer.echo(f"matches      {len(plan.matches)} shards, {len(plan.unmatched)} groups unmatched")
    if plan.moves:
        typer.echo(f"migrations   {plan.migrations} shards, {len(plan.moves)} steps")
    typer.echo(f"seconds      {plan.solve_seconds:.3f} ({plan.cpu_seconds:.3f} CPU), {plan.solver}")


def main() -> None:
    """The console script."""
    run(app, "aqua-place")
