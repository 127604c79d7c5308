"""The co-serving demo's claims and figures, on runs made up for them; no engine runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from pathlib import Path

import pytest

from aqua_demo.co_serving.report import figures_of, judge
from aqua_demo.engines.online_load import (
    OnlineLoad,
    busy_s,
    draw_lengths,
    read_offline_file,
    write_offline_file,
)
from aqua_demo.engines.race import Order, Run, ServedEngine, serve
from aqua_demo.engines.report import PREEMPTIONS, VICTIMS
from aqua_demo.processes import DemoError

Spoil = Callable[[dict[str, Run], dict[str, Run]], object]


def row(name: str, arrival_s: float, *token_s: float) -> Run:
    """A request of two prompt tokens that was answered at these seconds."""
    return {
        "name": name,
        "arrival_s": arrival_s,
        "prompt_tokens": 2,
        "output_tokens": len(token_s),
        "tokens": list(range(len(token_s))),
        "token_s": list(token_s),
        "end_s": token_s[-1],
    }


def run(online: list[Run], offline: list[Run], **counted: float) -> Run:
    return {"online": online, "offline": offline, "seconds": 10.0, "counted": counted}


@pytest.fixture
def runs() -> dict[str, Run]:
    """Online requests take four seconds of ten; in the gaps `ours` computes half of what it could.

    One offline answer goes on beyond the last online one.
    """
    people = [row("", 0.0, 1.0, 2.0), row("", 5.0, 6.0, 7.0)]
    slower = [row("", 0.0, 1.5, 2.5), row("", 5.0, 6.5, 7.5)]
    documents = [row("offline-0", 0.0, 3.0, 4.0, 8.0), row("offline-1", 8.0, 9.0, 11.0)]
    alone = [row(f"offline-{at}", at, at + 0.1, at + 0.2, at + 0.3, at + 0.4) for at in range(10)]
    counted = {PREEMPTIONS: 3.0, VICTIMS: 0.0}
    return {
        "online": run(people, []),
        "control": run(deepcopy(people), []),
        "ours": run(slower, documents, **counted),
        "offline": run([], alone),
    }


@pytest.fixture
def stock(runs: dict[str, Run]) -> dict[str, Run]:
    return {each["name"]: deepcopy(each) for each in runs["ours"]["offline"]}


def test_all_claims_hold_of_a_run_that_lost_nothing(
    runs: dict[str, Run], stock: dict[str, Run]
) -> None:
    claims = judge(runs, stock)
    assert [claim.reason for claim in claims if not claim.holds] == []
    assert len(claims) == 5


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda runs, _: runs["ours"]["online"][0]["tokens"].pop(), "1 answers are short"),
        (lambda runs, _: runs["ours"]["offline"][1]["tokens"].pop(), "1 answers are short"),
        (
            lambda runs, _: runs["ours"]["offline"].append(runs["ours"]["offline"][0]),
            "1 came twice",
        ),
        (
            lambda runs, _: runs["ours"]["online"][1]["tokens"].__setitem__(1, 7),
            "1 online and 0 offline ones differ",
        ),
        (
            lambda _, stock: stock["offline-1"]["tokens"].__setitem__(0, 7),
            "0 online and 1 offline ones differ",
        ),
        (lambda _, stock: stock.pop("offline-1"), "1 not compared"),
        (
            lambda runs, _: [each.update(token_s=[11.0]) for each in runs["ours"]["offline"]],
            "none of 2 offline requests had a token",
        ),
        (lambda runs, _: runs["ours"]["counted"].update({PREEMPTIONS: 0.0}), "never wanted"),
        (lambda runs, _: runs["ours"]["counted"].update({VICTIMS: 2.0}), "2 did"),
    ],
)
def test_what_goes_wrong_fails_its_claim_and_no_other(
    runs: dict[str, Run], stock: dict[str, Run], spoil: Spoil, reason: str
) -> None:
    spoil(runs, stock)
    (failed,) = [claim for claim in judge(runs, stock) if not claim.holds]
    assert reason in failed.reason


def test_figures_are_ratios_to_engines_with_online_requests_alone(runs: dict[str, Run]) -> None:
    found = figures_of(runs)
    assert found.ttft_p99_ratio == pytest.approx(1.5)
    assert found.tpot_p99_ratio == pytest.approx(1.0)
    assert found.control_ttft_p99_ratio == pytest.approx(1.0)
    assert found.online_busy_share == pytest.approx(0.4)
    # Prompts and answers of both, but for the token after the last online one.
    assert found.offline_tokens == 2 + 3 + 2 + 1
    # 60 tokens in ten seconds, of which six are left.
    assert found.offline_ideal_tokens == pytest.approx(36.0)
    assert found.offline_share_of_ideal == pytest.approx(8 / 36)
    assert found.offline_preemptions == 3


def test_where_online_requests_leave_no_time_there_is_no_share_of_it(runs: dict[str, Run]) -> None:
    for name in ("online", "control"):
        runs[name]["online"].append(row("", 0.0, 10.0))
    found = figures_of(runs)
    assert found.offline_ideal_tokens == 0.0
    assert found.offline_share_of_ideal is None


def test_the_same_seed_gives_the_same_load_and_file(tmp_path: Path) -> None:
    lengths = draw_lengths(50, seed=3)
    loads = [OnlineLoad.on_off(lengths, 2.0, seed=3, on_requests=5) for _ in range(2)]
    assert loads[0] == loads[1]
    assert len(loads[0].arrivals) == 50
    assert loads[0].length_s == max(at_s for at_s, _, _ in loads[0].arrivals)
    for name in ("a", "b"):
        write_offline_file(tmp_path / name, 20, seed=3, longest_prompt=64)
    first = read_offline_file(tmp_path / "a")
    assert first == read_offline_file(tmp_path / "b")
    assert len({line["custom_id"] for line in first}) == 20
    assert max(len(line["body"]["prompt"]) for line in first) == 64
    write_offline_file(tmp_path / "c", 20, seed=4, longest_prompt=64)
    assert first != read_offline_file(tmp_path / "c")


def test_an_on_off_load_has_the_rate_it_was_asked_for_and_its_requests_in_bursts() -> None:
    lengths = draw_lengths(4000, seed=0)
    load = OnlineLoad.on_off(lengths, 2.0, seed=0, on_requests=10)
    assert len(load.arrivals) / load.length_s == pytest.approx(2.0, rel=0.1)
    # Spread evenly, 86 % of the seconds would hold one.
    seconds = {int(at_s) for at_s, _, _ in load.arrivals}
    assert len(seconds) / load.length_s < 0.5


def test_overlapping_spans_are_busy_once() -> None:
    assert busy_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0


def test_an_answer_that_comes_spoilt_ends_the_race_instead_of_being_waited_for(
    tmp_path: Path,
) -> None:
    program = tmp_path / "engine"
    answers = "echo 'answer \"ready\"'; read order; echo 'answer {\"online\": [1,'; read end"
    program.write_text(f"#!/bin/sh\n{answers}\n")
    program.chmod(0o755)
    with closing(ServedEngine(tmp_path / "ours", tmp_path, {}, python=str(program))) as engine:
        engine.await_ready()
        with pytest.raises(DemoError, match="ours ended early"):
            serve(engine, Order(OnlineLoad([])))
