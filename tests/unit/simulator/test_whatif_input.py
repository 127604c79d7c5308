"""Input that no cluster or day can have: named, and nothing invented of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqua_protocol.errors import ConfigError
from aqua_simulator.whatif.answer import ask
from aqua_simulator.whatif.cluster import read_cluster
from aqua_simulator.whatif.recorded_day import RecordedLoad, read_day


def read(folder: Path, text: str, *models: str) -> RecordedLoad:
    path = folder / "trace.csv"
    path.write_text(text)
    return read_day([path], models)


@pytest.mark.parametrize("time_s", ["1e308", "1.7e12"])
def test_a_time_that_is_no_second_is_a_broken_line(tmp_path: Path, time_s: str) -> None:
    text = f"t_s,prompt_tokens,output_tokens\n1,10,5\n{time_s},10,5\n9,10,5\n"
    recorded = read(tmp_path, text, "a")
    assert [each.kind for each in recorded.findings if each.kind == "broken line"]
    assert recorded.span_s == 8.0


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="t_s is there twice"):
        read(tmp_path, "t_s,t_s,prompt_tokens,output_tokens\n1,7,10,5\n", "a")


@pytest.mark.parametrize(
    ("of_model", "rest", "words"),
    [
        ("kv_tokens: 99999999999999999999999", "", r"models\.0\.kv_tokens"),
        ("max_num_seqs: 99999999999999999999999", "", r"models\.0\.max_num_seqs"),
        ("replicas: 1", "host_gb: .inf", "host_gb"),
        ("replicas: 1", "gpu_hour: {A100-80GB: .inf}", "gpu_hour"),
        ("replicas: 1, replicas: 2", "", "'replicas' is there twice"),
        ("tp: 3", "", "32 heads of Llama-3.1-8B do not divide by tp 3"),
        ("tp: 4096", "", "do not divide"),
        (
            "replicas: 1",
            "lenders: [{name: b, gpu: A100-80GB, spare_gb: 500}]",
            "b has spare_gb 500, a A100-80GB has 8",
        ),
    ],
)
def test_a_list_that_no_cluster_has_is_refused(
    tmp_path: Path, of_model: str, rest: str, words: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"models: [{{name: a, model: Llama-3.1-8B, gpu: A100-80GB, {of_model}}}]\n{rest}\n"
    )
    with pytest.raises(ConfigError, match=words):
        read_cluster(path)


def test_what_has_no_price_is_named_and_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    models = "[{name: a, model: Llama-3.1-8B, gpu: A100-80GB}]"
    recorded = read(tmp_path, "t_s,prompt_tokens,output_tokens\n0,10,5\n9,10,5\n", "a")
    for price, is_priced in (("H100-80GB: 2.0", False), ("A100-80GB: 2.0", True)):
        path.write_text(f"models: {models}\ngpu_hour: {{{price}}}\n")
        cluster, _ = read_cluster(path)
        found = ask(cluster, recorded, [], seeds=0, sample_count=1, sample_s=1, sensitivities=())
        assert ("no price" not in {each.kind for each in found.findings}) == is_priced
        assert any("money_per_day" in each.numbers for each in found.outlooks) == is_priced
