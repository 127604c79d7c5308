"""Profiles for people, for the placer, for Kubernetes, and beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from aqua_placer.problem.parser import instance_from
from aqua_profiler.errors import ProfileInvalidError
from aqua_profiler.measure.kv_cache import cache_of, parse_metrics, token_bytes
from aqua_profiler.report.files import command_line, read_profile, write_profile
from aqua_profiler.report.plot import draw
from aqua_profiler.report.text import differences, kubernetes, lines_of, placer_input, sentence
from aqua_protocol.profile import ModelProfile, ProfileLabel, label_of

GB = 10**9


def _producer(**changes: object) -> ModelProfile:
    fields = {
        "model": "org/sd-3",
        "label": ProfileLabel.PRODUCER,
        "spare_bytes": 38 * GB,
        "hbm_bytes": 80 * GB,
        "stable_rate_per_s": 5.0,
        "batches": [{"size": 1, "items_per_s": 2.0, "free_bytes": 38 * GB}],
    }
    return ModelProfile.model_validate(fields | changes)


def _consumer() -> ModelProfile:
    return ModelProfile(model="llama", label=ProfileLabel.CONSUMER, needed_bytes=15 * GB)


@pytest.mark.parametrize(
    ("spare", "needed", "label"),
    [
        (10 * GB, 0, "producer"),
        (10 * GB - 1, 0, "neutral"),
        (10 * GB - 1, 1, "consumer"),
        (None, None, "unknown"),
        (None, 5, "consumer"),
        (5, None, "unknown"),
    ],
)
def test_labels_follow_the_threshold_and_never_guess(
    spare: int | None, needed: int | None, label: str
) -> None:
    assert label_of(spare, needed, 10 * GB) == label


def test_the_sentence_says_what_the_profile_comes_to() -> None:
    assert sentence(_producer()) == ("org/sd-3 can lend 35.4 GiB at its peak rate of 5 requests/s")
    partial = _producer(label="unknown", partial=True)
    assert "no label yet" in sentence(partial)
    assert lines_of(partial)


@pytest.mark.parametrize("name", ["profile.json", "profile.yaml"])
def test_a_written_profile_is_read_back_whole(tmp_path: Path, name: str) -> None:
    write_profile(_producer(), tmp_path / name)
    assert read_profile(tmp_path / name) == _producer()


def test_a_file_that_is_no_profile_is_refused_with_the_field(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"model": "x", "label": "lender"}')
    with pytest.raises(ProfileInvalidError, match="label"):
        read_profile(path)


def test_the_placer_takes_what_is_printed_for_it() -> None:
    problem = placer_input([_producer(), _producer(), _consumer()], 1, 4, None)
    instance = instance_from(yaml.safe_load(problem))
    assert list(instance.names) == ["sd-3.0", "sd-3.1", "llama"]
    assert [float(size) for size in instance.r_gb[:, 0]] == [38.0, 38.0, -15.0]


def test_kubernetes_gets_a_role_to_select_by() -> None:
    metadata = kubernetes(_producer())
    assert metadata["labels"] == {"aqua.dev/role": "producer", "aqua.dev/model": "sd-3"}
    assert metadata["annotations"]["aqua.dev/spare-bytes"] == str(38 * GB)
    assert kubernetes(_producer(partial=True))["labels"]["aqua.dev/role"] == "unknown"


def test_profiles_differ_in_what_matters_and_by_how_much() -> None:
    assert differences(_producer(), _producer()) == {}
    found = differences(_producer(), _producer(spare_bytes=19 * GB, batches=[]))
    assert found == {"spare_bytes": {"old": 38 * GB, "new": 19 * GB, "ratio": 0.5}}


def test_a_profile_with_measurements_is_drawn_and_one_without_refused(tmp_path: Path) -> None:
    draw(_producer(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    with pytest.raises(ProfileInvalidError):
        draw(_consumer(), tmp_path / "none.png")


def test_the_command_in_the_provenance_has_no_secret() -> None:
    shown = command_line(["/bin/aqua-profile", "run", "--token", "s3cret", "--token=also", "x y"])
    assert shown == "aqua-profile run --token '***' '--token=***' 'x y'"


def test_the_cache_is_read_from_metrics_and_sized_by_the_models_configuration(
    tmp_path: Path,
) -> None:
    page = (
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:num_requests_waiting{engine="0"} 3.0\n'
        'vllm:num_requests_waiting{engine="1"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 9.0\n'
        "vllm:other_total this line of another metric is never read\n"
        'vllm:kv_cache_usage_perc{engine="1"} 0.75\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",cache_dtype="auto"} 1.0\n'
    )
    usage, waiting, config = parse_metrics(page)
    assert usage == 0.75
    assert waiting == 3.0
    assert cache_of(config, None, None).nbytes is None
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,'
        ' "hidden_size": 64, "torch_dtype": "bfloat16"}'
    )
    assert token_bytes(tmp_path, "auto") == 2 * 2 * 2 * 8 * 2
    assert cache_of(config, tmp_path, None).nbytes == 1600 * 128
    assert cache_of(config, tmp_path, 7).nbytes == 7
