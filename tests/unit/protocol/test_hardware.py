"""The catalogues of GPU models and decoder shapes: published numbers, groups, configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aqua_protocol.decoders import DECODERS, DecoderModel, decoder_named, read_config
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GPUS, gpu_named

LLAMA_3_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_a_group_of_gpus_adds_up_what_it_shares_and_keeps_its_links() -> None:
    one, group = GPUS["A100-80GB"], GPUS["A100-80GB"].group(8)
    assert group.name == "8xA100-80GB"
    assert group.flops_per_s == 8 * one.flops_per_s
    assert group.hbm_bytes == 8 * one.hbm_bytes
    assert group.nvlink_bytes_per_s == one.nvlink_bytes_per_s


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="A100-80GB, H100-80GB"):
        gpu_named("H900")


def test_parameter_counts_are_the_published_ones() -> None:
    published = {
        "Llama-2-7B": 6.74e9,
        "Llama-2-70B": 68.98e9,
        "Llama-3-8B": 8.03e9,
        "Llama-3-70B": 70.55e9,
    }
    for name, count in published.items():
        assert DECODERS[name].parameter_count == pytest.approx(count, rel=0.001)
    assert DECODERS["Llama-3-8B"].kv_bytes_per_token == 131_072


def test_any_llama_like_configuration_becomes_a_model(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    model = DecoderModel.from_config(config, name="tiny")
    assert model.kv_head_count == 4
    assert model.parameter_count == 2 * (64 * 64 * 4 + 3 * 64 * 128 + 2 * 64) + 100 * 64 + 64
    with pytest.raises(ConfigError, match="lacks"):
        DecoderModel.from_config({"hidden_size": 1}, name="broken")
    with pytest.raises(ConfigError, match="no model named"):
        decoder_named(str(tmp_path / "nowhere"))


def test_a_model_configuration_gives_the_parameters_of_its_name() -> None:
    shape = DecoderModel.from_config(LLAMA_3_8B, name="llama")
    assert shape.parameter_count == DECODERS["Llama-3-8B"].parameter_count
    assert shape.kv_bytes_per_token == 131_072
    short = {key: value for key, value in LLAMA_3_8B.items() if key != "vocab_size"}
    with pytest.raises(ConfigError, match="vocab_size"):
        DecoderModel.from_config(short, name="x")


def test_a_folder_and_its_config_file_name_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert decoder_named(str(folder)) == decoder_named(str(folder / "config.json"))
    assert decoder_named(str(folder)).name == "my-llama"
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_config(folder)
