"""AquaCache as transformers sees it, and what it refuses."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3NextConfig

import aqualib
from aqua_protocol import KIB, MIB, ConfigError
from aqualib import Aqua
from aqualib.engines.transformers import AquaCache
from harness.tiny_models import LAYERS, llama, prompt


@pytest.fixture
def aqua() -> Iterator[Aqua]:
    with aqualib.connect(
        is_offline=True, transport="memfd", slab_bytes=64 * KIB, host_bytes=32 * MIB
    ) as aqua:
        yield aqua


def _cache(aqua: Aqua | None) -> AquaCache:
    return AquaCache(llama().config, max_tokens=64, resident_layers=2, block_tokens=8, aqua=aqua)


def test_an_empty_cache_answers_like_an_empty_cache(aqua: Aqua) -> None:
    with _cache(aqua) as cache:
        assert len(cache) == LAYERS
        assert cache.get_seq_length() == 0
        assert cache.get_mask_sizes(7, 0) == (7, 0)
        assert not cache.is_initialized
        assert not cache.is_compileable
        assert cache.is_croppable
        assert cache.statistics.resident_bytes == 0
        cache.reset()
        cache.reorder_cache(torch.tensor([0]))
        assert "empty" in repr(cache)


def test_a_filled_cache_says_what_it_holds(aqua: Aqua) -> None:
    with _cache(aqua) as cache:
        llama()(**prompt(1, 20), past_key_values=cache)
        assert cache.is_initialized
        assert cache.get_seq_length() == 20
        assert cache.get_mask_sizes(3, 0) == (23, 0)
        assert "6 offloaded" in repr(cache)
        assert "20 tokens" in repr(cache)


def test_closing_twice_is_harmless_and_frees_everything(aqua: Aqua) -> None:
    cache = _cache(aqua)
    llama()(**prompt(1, 20), past_key_values=cache)
    assert aqua.stats().used_bytes > 0
    cache.close()
    cache.close()
    assert aqua.stats().used_bytes == 0


def test_a_cache_may_outlive_its_store() -> None:
    with aqualib.connect(
        is_offline=True, transport="memfd", slab_bytes=64 * KIB, host_bytes=32 * MIB
    ) as aqua:
        cache = _cache(aqua)
        llama()(**prompt(1, 20), past_key_values=cache)
    # What was on its way in before the end has arrived; what comes after it has not.
    with pytest.raises(ConfigError, match="closed"):
        llama()(prompt(1, 9)["input_ids"], past_key_values=cache)
    cache.close()


def test_a_dropped_cache_gives_its_blocks_and_its_thread_back(aqua: Aqua) -> None:
    cache = _cache(aqua)
    llama()(**prompt(1, 20), past_key_values=cache)
    del cache
    gc.collect()
    assert aqua.stats().used_bytes == 0
    assert not [thread for thread in threading.enumerate() if "aqua-cache" in thread.name]


def test_without_an_instance_the_user_is_told_to_connect() -> None:
    with _cache(None) as cache, pytest.raises(ConfigError, match=r"aqualib.connect\(\)"):
        llama()(**prompt(1, 20), past_key_values=cache)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(num_hidden_layers=2, sliding_window=32),
        Gemma2Config(num_hidden_layers=2),
        Qwen3NextConfig(num_hidden_layers=4),
    ],
    ids=lambda config: config.model_type,
)
def test_layers_that_are_not_full_attention_are_refused(config: PreTrainedConfig) -> None:
    with pytest.raises(ConfigError, match="pages full attention only") as caught:
        AquaCache(config, max_tokens=64, resident_layers=2)
    assert "DynamicCache" in caught.value.remedy


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(AquaCache, max_tokens=64), "exactly one limit"),
        (
            partial(AquaCache, max_tokens=64, resident_layers=2, budget_bytes=1),
            "exactly one limit",
        ),
        (partial(AquaCache, max_tokens=0, resident_layers=2), "max_tokens is 0"),
        (
            partial(AquaCache, max_tokens=64, resident_layers=2, block_tokens=-1),
            "block_tokens is -1",
        ),
    ],
)
def test_impossible_limits_are_refused_when_the_cache_is_made(
    make: Callable[[PreTrainedConfig], AquaCache], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(LlamaConfig())


def test_a_cache_cannot_be_copied(aqua: Aqua) -> None:
    with _cache(aqua) as cache, pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(cache)


def test_keys_and_values_of_different_shapes_are_refused(aqua: Aqua) -> None:
    with _cache(aqua) as cache:
        keys = torch.zeros(1, 2, 5, 16)
        with pytest.raises(ConfigError, match="values of layer 0"):
            cache.update(keys, torch.zeros(1, 2, 5, 8), 0)
        with pytest.raises(ConfigError, match="float64"):
            cache.update(keys, keys.double(), 0)
        assert cache.get_seq_length() == 0
