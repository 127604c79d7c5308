"""Until when an offline request is wanted, from its sender to the co-serving policy."""

from __future__ import annotations

import json
import reprlib
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest

from aqua_protocol.errors import RequestInvalidError
from aqua_schedulers.conserve import StepTimeKey
from aqualib.engines.vllm.co_serving.scheduler import CoServing
from aqualib.engines.vllm.options import read_options
from aqualib.engines.vllm.requests.body import with_xargs
from aqualib.engines.vllm.requests.deadline import (
    HEADER,
    MAX_FINISH_IN_S,
    XARG,
    deadline_choice,
    finish_in_s_of,
)
from harness.vllm_middleware import through

CO_SERVING: dict[str, Any] = {"co_serving": {"ttft_s": 1.0, "tpot_s": 0.1}}
NO_NUMBERS = [True, "600", "soon", [600], {}, 0, -1, nan, inf, MAX_FINISH_IN_S + 1, 10**400]


def request(name: str, **xargs: object) -> Any:  # noqa: ANN401 - a request of vLLM's
    return SimpleNamespace(
        request_id=name,
        sampling_params=SimpleNamespace(extra_args=xargs or None),
        priority=0,
        arrival_time=0.0,
        num_tokens=100,
        num_output_tokens=0,
        num_output_placeholders=0,
        max_tokens=20,
    )


@pytest.mark.parametrize(
    ("content", "headers", "sent"),
    [
        ({"vllm_xargs": {XARG: 600}}, {}, {XARG: 600.0}),
        ({}, {"x_aqua_finish_in": "0.5"}, {XARG: 0.5}),
        ({"vllm_xargs": {XARG: 600, "n": 1}}, {"x_aqua_finish_in": "60"}, {XARG: 60.0, "n": 1}),
        ({"vllm_xargs": {XARG: None, "n": 1}}, {}, {"n": 1}),
    ],
)
def test_a_deadline_reaches_vllm_from_the_header_before_the_body(
    content: dict[str, Any], headers: dict[str, str], sent: dict[str, float]
) -> None:
    assert through(content, CO_SERVING, **headers)["vllm_xargs"] == sent


def test_token_ids_have_a_deadline_in_their_sampling_parameters() -> None:
    got = through({"sampling_params": {}}, CO_SERVING, x_aqua_finish_in="60")
    assert got["sampling_params"] == {"extra_args": {XARG: 60.0}}


def test_an_engine_that_does_not_co_serve_is_told_of_no_deadline() -> None:
    assert through({}, {}, x_aqua_finish_in="soon") == {}


@pytest.mark.parametrize("header", ["soon", "1,5", "0", "-1", "nan", "inf", "1e9"])
def test_a_header_that_is_no_deadline_is_refused(header: str) -> None:
    refusal = through({}, CO_SERVING, x_aqua_finish_in=header)
    assert refusal["code"] == "request_invalid"
    assert refusal["message"].startswith(f"{HEADER}: ")
    assert "number of seconds" in refusal["remedy"]


@pytest.mark.parametrize("claimed", NO_NUMBERS, ids=reprlib.repr)
def test_a_body_that_claims_no_deadline_is_refused_unless_the_header_says_one(
    claimed: object,
) -> None:
    body = json.dumps({"vllm_xargs": {XARG: claimed}}).encode()
    with pytest.raises(RequestInvalidError, match=f"{XARG}: .* is no deadline"):
        with_xargs(body, {XARG: deadline_choice("")})
    assert json.loads(with_xargs(body, {XARG: deadline_choice("5")}))["vllm_xargs"] == {XARG: 5.0}


def test_a_refusal_is_no_longer_for_a_long_claim() -> None:
    body = json.dumps({"vllm_xargs": {XARG: "soon" * 1000}}).encode()
    with pytest.raises(RequestInvalidError) as refused:
        with_xargs(body, {XARG: deadline_choice("")})
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("claimed", "found"),
    [(600, 600.0), (0.5, 0.5), (MAX_FINISH_IN_S, MAX_FINISH_IN_S), *((c, inf) for c in NO_NUMBERS)],
    ids=reprlib.repr,
)
def test_the_scheduler_goes_by_numbers_of_seconds_alone(claimed: object, found: float) -> None:
    assert finish_in_s_of(request("a", **{XARG: claimed})) == found


def test_a_request_without_parameters_has_no_deadline() -> None:
    assert finish_in_s_of(request("a")) == inf
    assert finish_in_s_of(SimpleNamespace(sampling_params=None)) == inf


def test_an_offline_request_keeps_its_deadline_from_when_it_arrived_until_it_ends() -> None:
    served = CoServing(
        read_options(CO_SERVING),
        StepTimeKey("m", "e", "g"),
        block_tokens=16,
        is_load_async=True,
    )
    wanted = request("a", aqua_class="offline", **{XARG: 600})
    online = request("b", **{XARG: 600})
    for each in (wanted, online, request("c", aqua_class="offline")):
        served.arrived(each, 5.0)
    assert [each.finish_by_s for each in served.policy.waiting] == [605.0, inf]
    served.admitted("a")
    assert served.view(wanted, computed_tokens=96, held_blocks=6).finish_by_s == 605.0
    served.preempted(wanted, None, 400.0)
    assert [each.finish_by_s for each in served.policy.waiting] == [605.0, inf]
    assert served.view(online).finish_by_s == inf
    served.removed("a", 1.0)
    assert served.view(wanted).finish_by_s == inf
