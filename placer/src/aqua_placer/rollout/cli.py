"""`aqua place drift` and `aqua place apply`: what runs, and how it becomes what is planned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aqua_cli import CoordinatorToken, CoordinatorUrl, ExitCode, Json, print_json, progress, say
from aqua_cli.program import DEFAULT_COORDINATOR_URL

if TYPE_CHECKING:
    from aqua_placer.problem.instance import Instance
    from aqua_protocol.plan import Plan

PlanFile = Annotated[Path, typer.Argument(help="Plan, as written by --output.")]
MappingFile = Annotated[
    Path | None,
    typer.Option("--mapping", help="Images, nodes and GPUs of the cluster: YAML or JSON."),
]
ProblemOption = Annotated[
    Path | None,
    typer.Option("--problem", help="The plan's problem: tells roles of groups without a match."),
]
DEFAULT_STEP_TIMEOUT_S = 1800.0
"""Seconds for a hook, and again for its result: loading a large model takes up to twenty minutes.
Doubled, a hook that hangs is noticed half an hour later."""


def drift(
    plan_file: PlanFile,
    url: CoordinatorUrl = DEFAULT_COORDINATOR_URL,
    token: CoordinatorToken = None,
    mapping_file: MappingFile = None,
    problem: ProblemOption = None,
    after_step: Annotated[
        int | None, typer.Option(help="Compare places in the state after so many steps.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a plan with what the coordinator sees; exit code 1 says that they differ.

    Differences have a kind: plan_not_in_force, pairing_differs, member_absent, member_misplaced,
    member_unplanned, role_differs, lease_off_plan. Members are known by their names (AQUA_MEMBER).
    Without --mapping, servers are told by their members: what matters is who is together.
    """
    from aqua_client import CoordinatorClient
    from aqua_placer.plan.files import read_plan
    from aqua_placer.rollout.drift import find_drift
    from aqua_placer.rollout.mapping import read_mapping

    plan = read_plan(plan_file)
    mapping, instance = read_mapping(mapping_file), _problem_of(plan, plan_file, problem)
    with CoordinatorClient(url, token) as client:
        found = find_drift(plan, client, mapping, instance, after_step)
    if as_json:
        print_json(found)
    else:
        for one in found.differences:
            typer.echo(f"{one.kind}  {one.subject}: planned {one.planned}; seen {one.seen}")
            typer.echo(f"  {one.remedy}")
        count = len(found.differences)
        typer.echo(
            f"{count} differences" if count else f"as planned: {found.members_planned} members"
        )
    if found.differences:
        raise typer.Exit(ExitCode.FAILED)


def apply(  # noqa: PLR0917 - as above
    plan_file: PlanFile,
    hook: Annotated[
        str, typer.Option("--hook", help="Command that carries one step out, for /bin/sh -c.")
    ],
    url: CoordinatorUrl = DEFAULT_COORDINATOR_URL,
    token: CoordinatorToken = None,
    mapping_file: MappingFile = None,
    problem: ProblemOption = None,
    journal: Annotated[
        Path | None, typer.Option(help="Where progress is kept; default: PLAN.journal.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds for the hook of one step.")
    ] = DEFAULT_STEP_TIMEOUT_S,
    confirm_timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds until the coordinator sees its result.")
    ] = DEFAULT_STEP_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Carry out a re-placement, step by step: hook, look, next; ctrl-C stops, a rerun resumes.

    The hook finds its step in AQUA_STEP, AQUA_STEP_KIND (move, park, resume, start, stop),
    AQUA_GROUP, AQUA_FROM_SERVER, AQUA_FROM_GPUS, AQUA_TO_SERVER, AQUA_TO_GPUS, with a mapping
    AQUA_FROM_NODE and AQUA_TO_NODE, and as JSON on standard input; AQUA_STEPS_DONE is what
    `render --after-step` takes. It has to end well where its step is done already. A step counts
    when the coordinator sees it. After the last one the plan's matches are pushed.
    """
    from aqua_client import CoordinatorClient
    from aqua_placer.plan.files import read_plan
    from aqua_placer.rollout.drift import DriftKind, find_drift
    from aqua_placer.rollout.hook import Hook
    from aqua_placer.rollout.interrupts import Interrupts
    from aqua_placer.rollout.journal import open_journal
    from aqua_placer.rollout.mapping import read_mapping
    from aqua_placer.rollout.walk import Walk

    plan = read_plan(plan_file)
    mapping, instance = read_mapping(mapping_file), _problem_of(plan, plan_file, problem)
    quiet: set[str] = set()
    if instance is not None:
        signs = zip(instance.names, instance.sign, strict=True)
        quiet = {name for name, sign in signs if not sign.any()}
    place = journal or plan_file.with_name(f"{plan_file.name}.journal")
    with (
        Interrupts() as interrupts,
        open_journal(place, plan) as kept,
        CoordinatorClient(url, token) as client,
        progress("Applying", total=len(plan.moves), quiet=as_json) as shown,
    ):

        def on_step(done: int, note: str) -> None:
            shown.update(done=done, note=note)
            if not as_json and done < len(plan.moves):
                say(note)

        command = Hook(hook, timeout, interrupts=interrupts)
        walk = Walk(plan, client, mapping, command, kept, confirm_timeout, quiet, on_step)
        try:
            done = walk.run()
        except KeyboardInterrupt:
            if not as_json:
                say(
                    f"stopped after {kept.confirmed_count} of {len(plan.moves)} steps; run the "
                    "same command again to go on"
                )
            raise
        found = find_drift(plan, client, mapping, instance)
    # Leases of before are used until they end: nothing is wrong with the steps.
    left = [one for one in found.differences if one.kind is not DriftKind.LEASE_OFF_PLAN]
    if as_json:
        result = {"steps": len(plan.moves), "steps_done_now": done, "journal": str(place)}
        print_json({**result, "drift": found.model_dump(mode="json")})
    else:
        say(f"{done} steps done now, {len(plan.moves)} in all; matches pushed")
        if found.differences:
            say(f"{len(found.differences)} differences are left: `aqua place drift` lists them")
    if left:
        raise typer.Exit(ExitCode.FAILED)


def _problem_of(plan: Plan, plan_file: Path, problem: Path | None) -> Instance | None:
    from aqua_placer.plan.files import require_problem
    from aqua_placer.problem.parser import read_problem

    if problem is None:
        return None
    instance = read_problem(problem)
    require_problem(plan, instance, plan_file, problem)
    return instance
