"""What a command to evict may say, and which requests it means."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from aqualib.engines.vllm.operations.evictions import MAX_HOLD_S, EvictionRequest, ids_of

IDS = [
    "cmpl-mine-0-0a1b2c3d",
    "cmpl-mine-1-0a1b2c3e",
    "0_chatcmpl-theirs-0a1b2c3f",
    "1_chatcmpl-theirs-0a1b2c40",
    "minecraft-0a1b2c41",
    "cmpl-mine-2-0-0a1b2c42",
    "chatcmpl-theirs-2-0a1b2c43",
    "generate-tokens-ids-0a1b2c44",
    "resp_parts_1-0a1b2c45",
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mine", IDS[:2]),
        ("cmpl-mine", IDS[:2]),
        ("cmpl-mine-1", IDS[1:2]),
        ("theirs", IDS[2:4]),
        ("chatcmpl-theirs", IDS[2:4]),
        ("mine-2", IDS[5:6]),
        ("theirs-2", IDS[6:7]),
        ("chatcmpl-theirs-2", IDS[6:7]),
        ("ids", IDS[7:8]),
        ("resp_parts", IDS[8:]),
        (IDS[0], IDS[:1]),
        ("min", []),
        (".*", []),
        ("", []),
    ],
)
def test_a_request_is_named_as_its_client_or_vllm_knows_it(name: str, found: list[str]) -> None:
    assert ids_of(name, IDS) == found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"count": 1, "request_ids": ["a"]},
        {"count": 0},
        {"request_ids": []},
        {"count": 1, "hold_s": 0},
        {"count": 1, "hold_s": MAX_HOLD_S + 1},
        {"count": 1, "hold": 5},
    ],
)
def test_what_names_nothing_or_too_much_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EvictionRequest.model_validate(given)
