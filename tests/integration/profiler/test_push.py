"""A pushed profile reaches the informer of the model's engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aqua_profiler.cli import app
from aqua_profiler.errors import ProfileInvalidError
from aqua_profiler.report.files import push, write_profile
from aqua_protocol import UnavailableError
from aqua_protocol.profile import ModelProfile
from aqualib.producer.profile import Profile
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.patience import patient_client

PRODUCER = ModelProfile.model_validate(
    {
        "model": "org/llama",
        "kind": "llm",
        "label": "producer",
        "spare_bytes": 38 * 10**9,
        "stable_rate_per_s": 2.5,
        "runs": [{"rate_per_s": 1.0}],
    }
)


def test_a_pushed_profile_is_what_the_informer_starts_from(tmp_path: Path) -> None:
    write_profile(PRODUCER, tmp_path / "profile.json")
    with data_dir() as path, CoordinatorProcess(path) as coordinator:
        result = CliRunner().invoke(
            app, ["push", str(tmp_path / "profile.json"), "--url", coordinator.url]
        )
        assert result.exit_code == 0, result.output
        with patient_client(coordinator.url, None) as link:
            (measured,) = link.get_profiles("org/llama")
            assert link.get_profiles("nobody") == []
    assert measured is not None
    informed = Profile.measured(measured, 64 << 20)
    assert (informed.spare_bytes, informed.steady_requests_per_s) == (38 * 10**9, 2.5)


def test_a_partial_profile_is_not_pushed() -> None:
    partial = ModelProfile.model_validate({"model": "m", "label": "unknown", "partial": True})
    with pytest.raises(ProfileInvalidError, match="partial"):
        push(partial, "http://127.0.0.1:9", None)


def test_nobody_listening_is_said_with_the_address() -> None:
    with pytest.raises(UnavailableError, match="no answer from the coordinator"):
        push(PRODUCER, "http://127.0.0.1:9", None)
