"""A plan pushed to a real coordinator, and the service over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from aqua_placer.budget import Budget
from aqua_placer.errors import PlanInvalidError
from aqua_placer.plan.files import pairings_of, push
from aqua_placer.problem.families import generate
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request
from aqua_placer.service import create_app
from aqua_placer.solve.placement import place
from aqua_protocol import UnavailableError
from aqua_protocol.plan import Plan
from harness.bounds import HANG_S
from harness.changed_problems import churned
from harness.coordinator_process import CoordinatorProcess, data_dir


def solved(problem: dict[str, Any]) -> Plan:
    return place(instance_from(problem), Request(), Budget(30))


@pytest.fixture
async def service() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app("secret"))
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://placer", headers=headers
    ) as client:
        yield client


def test_the_coordinator_takes_the_matches_and_a_later_plan_replaces_them() -> None:
    first, second = (solved(generate("tpmix", 32, seed)) for seed in (0, 1))
    with data_dir() as path, CoordinatorProcess(path) as coordinator:
        for plan in (first, second):
            assert push(plan, coordinator.url, None) == len(plan.matches)
            held = coordinator.get("placements")
            assert held["plan_hash"] == plan.plan_hash
            assert {pair["consumer_id"] for pair in held["pairings"]} == {
                pair.consumer_id for pair in pairings_of(plan).pairings
            }


def test_nobody_at_the_address_is_an_error_with_a_remedy() -> None:
    with pytest.raises(UnavailableError):
        push(solved(generate("ref50", 16, 0)), "http://127.0.0.1:1", None)


def test_a_name_that_no_member_may_have_is_refused_before_anything_is_sent() -> None:
    problem = {
        "servers": [{"count": 1, "gpus": 2, "hbm_gb": 80}],
        "groups": {"name": ["a b", "c"], "tp": [1, 1], "r_gb": [10.0, -5.0]},
    }
    with pytest.raises(PlanInvalidError, match="'a b'"):
        pairings_of(solved(problem))


async def test_the_service_solves_replaces_and_checks(service: httpx.AsyncClient) -> None:
    problem = generate("tpmix", 64, 0)
    answer = await service.post("/v1/plans", json={"problem": problem, "seed": 3})
    assert answer.status_code == 200, answer.text
    plan = Plan.model_validate(answer.json())
    checked = await service.post("/v1/checks", json={"problem": problem, "plan": answer.json()})
    assert checked.json()["passed"]
    later = churned(problem, [entry.server_index for entry in plan.assignments], 0.1, 1)
    moved = await service.post(
        "/v1/replacements", json={"problem": later, "current": answer.json(), "max_moves": 4}
    )
    assert moved.status_code == 200, moved.text
    assert Plan.model_validate(moved.json()).migrations <= 4


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"problem": {}}, 422, "problem_invalid"),
        ({"problem": {"servers": []}}, 422, "problem_invalid"),
        ({"problem": {}, "time_limit_s": 1e9}, 422, "request_invalid"),
        ({"problem": {}, "surprise": 1}, 422, "request_invalid"),
        ({}, 422, "request_invalid"),
    ],
)
async def test_bad_requests_are_typed(
    service: httpx.AsyncClient, body: dict[str, Any], status: int, code: str
) -> None:
    answer = await service.post("/v1/plans", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


async def test_without_its_token_nobody_is_served(service: httpx.AsyncClient) -> None:
    answer = await service.post("/v1/plans", json={}, headers={"Authorization": "Bearer other"})
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")


async def test_a_body_without_a_length_is_refused(service: httpx.AsyncClient) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{}"

    answer = await service.post("/v1/plans", content=parts())
    assert answer.json()["code"] == "request_invalid"


async def test_a_full_house_answers_when_to_come_back(service: httpx.AsyncClient) -> None:
    body = {"problem": generate("tpmix-cont", 1024, 0), "time_limit_s": 3}
    answers = await asyncio.gather(
        *(service.post("/v1/plans", json=body, timeout=HANG_S) for _ in range(4))
    )
    refused = [answer for answer in answers if answer.status_code == 503]
    assert 1 <= len(refused) <= 2
    assert all(answer.json()["retry_after_s"] for answer in refused)
