"""The picture of a plan: it names every model, and the same plan gives the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqua_placer.budget import Budget
from aqua_placer.errors import PlanInvalidError
from aqua_placer.plan.explanation import Explainer
from aqua_placer.plan.picture import MAX_BOXES, render
from aqua_placer.problem.families import generate
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.solve.placement import place
from aqua_protocol import ConfigError


def explainer(gpus: int, server_gpus: int = 8) -> Explainer:
    instance = instance_from(generate("tpmix", gpus, 0, server_gpus=server_gpus))
    return Explainer(instance, place(instance, Request(), Budget(30)))


def test_every_model_is_named_and_the_same_plan_gives_the_same_file(tmp_path: Path) -> None:
    plan = explainer(16)
    drawn = [tmp_path / name for name in ("a.svg", "b.svg")]
    assert [render(plan, path) for path in drawn] == [2, 2]
    first, second = (path.read_text() for path in drawn)
    assert first == second
    for name in plan.instance.names:
        assert name in first


@pytest.mark.slow
def test_racks_are_drawn_a_few_at_a_time(tmp_path: Path) -> None:
    assert render(explainer(576, 72), tmp_path / "racks.png") == MAX_BOXES // 72


def test_servers_that_do_not_exist_and_other_formats_are_refused(tmp_path: Path) -> None:
    plan = explainer(16)
    with pytest.raises(PlanInvalidError, match="servers 0 to 1"):
        render(plan, tmp_path / "a.svg", first=2)
    with pytest.raises(ConfigError, match=r"a\.pdf"):
        render(plan, tmp_path / "a.pdf")
