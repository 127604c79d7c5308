"""A profile is found by model, engine and GPU, and one of something else is never used."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqua_protocol.errors import ConfigError
from aqua_schedulers.conserve import StepTimeKey, StepTimeProfile, find_profile

KEY = StepTimeKey("meta/Llama-3 8B", "vLLM 0.32.0, bfloat16, TP 2", "NVIDIA H100 80GB HBM3")
PROFILE = StepTimeProfile(**KEY._asdict(), floor_s=0.01, token_s=1e-4, max_tokens=2048)


def test_a_profile_is_found_in_a_folder_and_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / KEY.file_name
    path.write_text(PROFILE.model_dump_json())
    assert find_profile(tmp_path, KEY) == PROFILE
    assert find_profile(path, KEY) == PROFILE
    assert path.name.startswith("meta-Llama-3-8B-")


@pytest.mark.parametrize("field", StepTimeKey._fields)
def test_a_profile_of_another_model_engine_or_gpu_is_not_taken(tmp_path: Path, field: str) -> None:
    other = KEY._replace(**{field: "another"})
    (tmp_path / KEY.file_name).write_text(PROFILE.model_dump_json())
    with pytest.raises(ConfigError, match="no step-time profile") as caught:
        find_profile(tmp_path, other)
    assert "aqua-profile steps" in caught.value.remedy
    # The same under the name that it is looked for by.
    (tmp_path / other.file_name).write_text(PROFILE.model_dump_json())
    with pytest.raises(ConfigError, match="not of"):
        find_profile(tmp_path, other)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / KEY.file_name).write_text("{}")
    with pytest.raises(ConfigError, match="not a step-time profile"):
        find_profile(tmp_path, KEY)
