"""A re-placement is walked step by step on a real coordinator, stopped anywhere, and resumed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from aqua_client import CoordinatorClient
from aqua_placer.budget import Budget
from aqua_placer.errors import (
    RolloutJournalError,
    StartDiffersError,
    StepFailedError,
    StepUnconfirmedError,
)
from aqua_placer.problem.instance import Instance
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.relocate.relocation import Relocation, relocate
from aqua_placer.rollout.drift import find_drift
from aqua_placer.rollout.hook import Hook
from aqua_placer.rollout.journal import open_journal
from aqua_placer.rollout.mapping import ClusterMapping
from aqua_placer.rollout.walk import Walk
from aqua_protocol.plan import MoveKind, Plan
from harness.bounds import HANG_S
from harness.paper_fleet import PaperFleet, gpu_of, node_of

# Lenders on one server, borrowers on the other, and no GPU is free: one has to be parked.
PROBLEM: Final[dict[str, Any]] = {
    "servers": [{"name": "dgx", "count": 2, "gpus": 3, "hbm_gb": 80}],
    "models": [
        {"name": "image", "replicas": 3, "spare_gb": 40, "current": ["dgx/0"] * 3},
        {"name": "llama", "tp": 2, "need_gb": 30, "current": ["dgx/1"]},
        {"name": "small", "need_gb": 30, "current": ["dgx/1"]},
    ],
}
EXACT: Final = {
    "servers": {
        f"dgx/{number}": {
            "node": node_of(f"dgx/{number}"),
            "gpus": [gpu_of(f"dgx/{number}", gpu) for gpu in range(3)],
        }
        for number in range(2)
    }
}
NOTHING: Final = ClusterMapping()
LONG_S: Final = HANG_S


@pytest.fixture(scope="module")
def replanned() -> tuple[Instance, Plan]:
    instance = instance_from(PROBLEM)
    plan, _ = relocate(instance, None, Request(), Relocation(), Budget(30))
    kinds = {move.kind for move in plan.moves}
    assert kinds == {MoveKind.PARK, MoveKind.MOVE, MoveKind.RESUME}
    return instance, plan


@pytest.fixture
def fleet(client: CoordinatorClient, replanned: tuple[Instance, Plan]) -> Iterator[PaperFleet]:
    """Everyone where the plan begins."""
    roles = {"image": "producer", "llama": "consumer", "small": "consumer"}
    groups = [entry.group for entry in replanned[1].assignments]
    fleet = PaperFleet(client, {group: roles[group.split(".")[0]] for group in groups})
    fleet.go_to(replanned[1], 0)
    yield fleet
    for group in [*fleet.running]:
        fleet.stop(group)


def walk(
    plan: Plan,
    client: CoordinatorClient,
    hook: str,
    journal: Path,
    *,
    mapping: ClusterMapping = NOTHING,
    confirm_s: float = LONG_S,
    timeout_s: float = LONG_S,
) -> int:
    with open_journal(journal, plan) as kept:
        command = Hook(hook, timeout_s, grace_s=0.05)
        return Walk(plan, client, mapping, command, kept, confirm_s).run()


@pytest.mark.parametrize("exact", [False, True], ids=["by members", "by mapping"])
def test_a_walk_takes_every_step_in_order_and_ends_without_drift(
    fleet: PaperFleet,
    client: CoordinatorClient,
    replanned: tuple[Instance, Plan],
    tmp_path: Path,
    exact: bool,
) -> None:
    instance, plan = replanned
    mapping = ClusterMapping.model_validate(EXACT) if exact else NOTHING
    with fleet.hook(tmp_path) as hook:
        assert walk(plan, client, hook, tmp_path / "j", mapping=mapping) == len(plan.moves)
        assert walk(plan, client, "false", tmp_path / "j", mapping=mapping) == 0
    assert fleet.steps == [move.step for move in plan.moves]
    found = find_drift(plan, client, mapping, instance)
    assert found.in_step, found.differences


@pytest.mark.parametrize("arrived", [False, True], ids=["before", "after"])
def test_a_walk_that_ends_before_or_after_any_hooks_work_goes_on_there(
    fleet: PaperFleet,
    client: CoordinatorClient,
    replanned: tuple[Instance, Plan],
    tmp_path: Path,
    arrived: bool,
) -> None:
    instance, plan = replanned
    for broken in range(len(plan.moves)):
        fleet.go_to(plan, 0)
        fleet.steps.clear()
        place = tmp_path / f"{broken}"
        place.mkdir()
        with fleet.hook(place) as hook:
            fails = f"{hook} && exit 7" if arrived else "exit 7"
            broken_hook = f'if [ "$AQUA_STEP" = {broken} ]; then {fails}; else {hook}; fi'
            with pytest.raises(StepFailedError, match=f"step {broken} of .* status 7") as told:
                walk(plan, client, broken_hook, place / "j")
            assert "again" in told.value.remedy
            assert walk(plan, client, hook, place / "j") == len(plan.moves) - broken
        assert fleet.steps == [move.step for move in plan.moves], "each is carried out once"
        assert find_drift(plan, client, NOTHING, instance).in_step


def test_a_hook_that_says_it_is_done_when_it_is_not_stops_the_walk(
    fleet: PaperFleet, client: CoordinatorClient, replanned: tuple[Instance, Plan], tmp_path: Path
) -> None:
    _, plan = replanned
    with pytest.raises(StepUnconfirmedError, match="still reports"):
        walk(plan, client, "true", tmp_path / "j", confirm_s=0.01)
    assert not fleet.steps


def test_a_member_on_the_wrong_server_or_in_parts_does_not_confirm_a_step(
    fleet: PaperFleet, client: CoordinatorClient, replanned: tuple[Instance, Plan], tmp_path: Path
) -> None:
    _, plan = replanned
    move = next(move for move in plan.moves if move.kind is MoveKind.MOVE)
    fleet.lost.add(move.group)  # It stays where it is, whatever the hook says.
    with fleet.hook(tmp_path) as hook, pytest.raises(StepUnconfirmedError) as told:
        walk(plan, client, hook, tmp_path / "j", confirm_s=0.01)
    assert told.value.details["step"] == move.step
    fleet.lost.clear()
    second = tmp_path / "second"
    second.mkdir()
    with fleet.hook(second) as hook:
        walk(plan, client, hook, tmp_path / "j")
    assert fleet.steps[-1] == plan.moves[-1].step


def test_a_cluster_that_is_elsewhere_is_left_alone(
    fleet: PaperFleet, client: CoordinatorClient, replanned: tuple[Instance, Plan], tmp_path: Path
) -> None:
    _, plan = replanned
    fleet.go_to(plan)
    with pytest.raises(StartDiffersError, match="not where step 0 begins") as told:
        walk(plan, client, "false", tmp_path / "j")
    assert "replan" in told.value.remedy
    fleet.go_to(plan, 0)
    fleet.stop(plan.moves[0].group)
    with pytest.raises(StartDiffersError, match="does not report"):
        walk(plan, client, "false", tmp_path / "j")


def test_a_hook_that_takes_too_long_is_ended_with_all_that_it_started(
    fleet: PaperFleet, client: CoordinatorClient, replanned: tuple[Instance, Plan], tmp_path: Path
) -> None:
    del fleet
    _, plan = replanned
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    holder = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    stubborn = f"trap '' INT TERM; exec 3>{pipe}; sleep 600 & wait; sleep 600"
    with pytest.raises(StepFailedError, match=r"longer than 0\.5 s"):
        walk(plan, client, stubborn, tmp_path / "j", timeout_s=0.5)
    os.set_blocking(holder, True)
    assert os.read(holder, 1) == b"", "every process that held the pipe has ended"
    os.close(holder)


def test_a_journal_belongs_to_one_plan_and_one_process_and_survives_a_cut(
    replanned: tuple[Instance, Plan], tmp_path: Path
) -> None:
    _, plan = replanned
    path = tmp_path / "j"
    with open_journal(path, plan) as journal:
        journal.begin(0, {"small": "rack"})
        journal.confirm(0)
        with pytest.raises(RolloutJournalError, match="holds"), open_journal(path, plan):
            pass
    whole = path.read_bytes()
    for cut in range(1, len(whole) + 1):
        path.write_bytes(whole[:cut])
        with open_journal(path, plan) as journal:
            lines = whole[:cut].count(b"\n")
            assert journal.confirmed_count == (lines == 3)
            assert (journal.begun is not None) == (lines == 2)
            journal.begin(journal.confirmed_count, {})
        with open_journal(path, plan) as journal:
            assert journal.begun == {}, "what is written after a cut is read"
    other = plan.model_copy(update={"plan_hash": "f" * 64})
    with pytest.raises(RolloutJournalError, match="is the journal of plan"):
        open_journal(path, other).__enter__()
    for text in ("no journal\n", "somebody's notes", "[" * 100_000 + "\n", '{"journal": 1}\nnot'):
        path.write_text(text)
        with pytest.raises(RolloutJournalError, match="not a journal"):
            open_journal(path, plan).__enter__()
        assert path.read_text() == text


COMMAND: Final = [sys.executable, "-c", "from aqua_placer.cli import main; main()"]


def command(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, err


@pytest.mark.slow
def test_ctrl_c_ends_the_hook_and_the_same_command_goes_on(
    fleet: PaperFleet, client: CoordinatorClient, replanned: tuple[Instance, Plan], tmp_path: Path
) -> None:
    instance, plan = replanned
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(plan.model_dump_json())
    started = tmp_path / "started"
    os.mkfifo(started)
    with fleet.hook(tmp_path) as hook:
        waits = f'if [ "$AQUA_STEP" = 1 ]; then echo > {started}; sleep 600; else {hook}; fi'
        process = command("apply", plan_file, "--url", client.url, "--hook", waits)
        started.read_text()
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
        assert code == 130, err
        assert f"stopped after 1 of {len(plan.moves)} steps" in err
        code, out, err = ended(
            command("apply", plan_file, "--url", client.url, "--hook", hook, "--json")
        )
    assert code == 0, err
    told = json.loads(out)
    assert told["steps_done_now"] == len(plan.moves) - 1
    assert told["drift"]["differences"] == []
    assert fleet.steps == [move.step for move in plan.moves]
    assert find_drift(plan, client, NOTHING, instance).in_step
    code, out, _ = ended(command("drift", plan_file, "--url", client.url))
    assert (code, out.strip()) == (0, "as planned: 6 members")
    fleet.stop("small")
    code, out, _ = ended(command("drift", plan_file, "--url", client.url, "--json"))
    assert code == 1
    assert [one["kind"] for one in json.loads(out)["differences"]] == ["member_absent"]
    code, out, _ = ended(command("drift", plan_file, "--url", "http://127.0.0.1:1", "--json"))
    assert (code, json.loads(out)["error"]["code"]) == (3, "service_unavailable")


def test_a_hook_that_outlives_its_program_keeps_the_next_one_out(
    fleet: PaperFleet, client: CoordinatorClient, replanned: tuple[Instance, Plan], tmp_path: Path
) -> None:
    _, plan = replanned
    plan_file, journal = tmp_path / "plan.json", tmp_path / "plan.json.journal"
    plan_file.write_text(plan.model_dump_json())
    step, started, go, left = (tmp_path / name for name in ("step", "started", "go", "left"))
    os.mkfifo(started)
    os.mkfifo(go)
    with fleet.hook(tmp_path) as hook:
        waits = f"cat > {step}; echo > {started}; read word < {go}; cat {step} | ({hook})"
        process = command("apply", plan_file, "--url", client.url, "--hook", waits)
        started.read_text()
        process.kill()
        process.wait()
        again = command("apply", plan_file, "--url", client.url, "--hook", "exit 7", "--json")
        _, out, err = ended(again)
        assert json.loads(out)["error"]["code"] == "rollout_journal", err
        assert "the hook of one that was killed" in out
        go.write_text("on\n")
        ended(process)
        with journal.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # Once that hook has ended.
        leaves = f"{hook}; sleep 600 >/dev/null 2>&1 & echo $! >> {left}"
        walk(plan, client, leaves, journal)
        try:
            with open_journal(journal, plan) as kept:
                assert kept.is_pushed, "what a hook leaves running keeps nobody out"
        finally:
            for pid in left.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
    assert fleet.steps == [move.step for move in plan.moves]
