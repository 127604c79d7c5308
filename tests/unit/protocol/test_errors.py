from __future__ import annotations

import pytest

from aqua_protocol import AquaError, CapacityError, ErrorBody, errors
from aqua_protocol.errors import ERRORS_BY_CODE, error_from_body

KINDS = sorted(ERRORS_BY_CODE.values(), key=lambda kind: kind.code)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_comes_back_as_the_same_type(kind: type[AquaError]) -> None:
    sent = kind("what happened", remedy="do this", retry_after_s=1.5, lease_id="lease-1")
    back = error_from_body(ErrorBody.model_validate_json(sent.to_body().model_dump_json()))
    assert type(back) is kind
    assert (back.message, back.remedy, back.retry_after_s, back.details) == (
        "what happened",
        "do this",
        1.5,
        {"lease_id": "lease-1"},
    )


def test_every_error_has_a_code_of_its_own() -> None:
    public = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert {kind for kind in public if issubclass(kind, AquaError)} == set(KINDS)


def test_a_code_of_a_newer_peer_is_still_an_aqua_error() -> None:
    back = error_from_body(ErrorBody(code="not_invented_yet", message="m"))
    assert type(back) is AquaError


def test_details_that_collide_with_arguments_do_not_crash_the_reader() -> None:
    body = ErrorBody(code="capacity_exhausted", message="m", details={"message": 1, "remedy": 2})
    assert isinstance(error_from_body(body), CapacityError)


def test_the_text_of_an_error_names_its_code_and_the_next_step() -> None:
    text = str(CapacityError("no producer has 64 MiB"))
    assert "no producer has 64 MiB" in text
    assert "capacity_exhausted" in text
    assert "Spill to host memory" in text
