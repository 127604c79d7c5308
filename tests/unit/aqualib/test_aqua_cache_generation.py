"""AquaCache under stock `generate`: the same logits, bit for bit, within the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

import aqualib
from aqua_protocol import KIB, MIB, CapacityError, ChecksumMismatchError, ConfigError
from aqualib import Aqua
from aqualib.engines.transformers import AquaCache
from harness.tiny_models import LAYERS, gpt_neox, llama, prompt, qwen2

pytestmark = pytest.mark.slow

PROMPT = 45
NEW = 30
TOKENS = PROMPT + NEW
MODES: dict[str, tuple[int, dict[str, object]]] = {
    "greedy": (1, {}),
    "sampled": (1, {"do_sample": True, "top_k": 0}),
    "batch with padding": (3, {"do_sample": True}),
    "beams": (1, {"num_beams": 4}),
    "beams of a batch": (2, {"num_beams": 3, "num_return_sequences": 2}),
    "prefill in chunks": (1, {"prefill_chunk_size": 13}),
    "assisted, so tokens are taken back": (1, {"prompt_lookup_num_tokens": 5}),
}


@pytest.fixture
def aqua() -> Iterator[Aqua]:
    with aqualib.connect(
        is_offline=True, transport="memfd", slab_bytes=64 * KIB, host_bytes=32 * MIB, checksum=True
    ) as aqua:
        yield aqua
        assert aqua.stats().used_bytes == 0, "a closed cache leaves nothing in the store"


def _generate(
    model: PreTrainedModel, cache: Cache, batch: int = 1, **options: object
) -> GenerateDecoderOnlyOutput:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return model.generate(
            **prompt(batch, PROMPT),
            past_key_values=cache,
            max_new_tokens=NEW,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )


def _assert_same(ours: GenerateDecoderOnlyOutput, reference: GenerateDecoderOnlyOutput) -> None:
    assert torch.equal(ours.sequences, reference.sequences)
    assert len(ours.logits) == len(reference.logits)
    for step, (one, other) in enumerate(zip(ours.logits, reference.logits, strict=True)):
        assert torch.equal(one, other), f"logits differ at step {step}"


@pytest.mark.parametrize(
    ("build", "mode", "resident_layers"),
    [
        *((llama, mode, resident_layers) for mode in MODES for resident_layers in (2, 4)),
        *((build, mode, 2) for build in (qwen2, gpt_neox) for mode in ("greedy", "beams")),
    ],
)
def test_logits_equal_those_of_a_cache_that_keeps_everything(
    aqua: Aqua, build: Callable[[], PreTrainedModel], mode: str, resident_layers: int
) -> None:
    model = build()
    batch, options = MODES[mode]
    reference = _generate(model, DynamicCache(config=model.config), batch, **options)
    with AquaCache(
        model.config, max_tokens=TOKENS, resident_layers=resident_layers, aqua=aqua, block_tokens=8
    ) as cache:
        _assert_same(_generate(model, cache, batch, **options), reference)
        assert cache.statistics.paged_in_bytes > cache.statistics.paged_out_bytes > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_kernels_see_no_difference(
    aqua: Aqua, attention: str, dtype: torch.dtype
) -> None:
    model = llama(attn_implementation=attention).to(dtype)
    reference = _generate(model, DynamicCache(config=model.config), 2)
    with AquaCache(model.config, max_tokens=TOKENS, resident_layers=2, aqua=aqua) as cache:
        _assert_same(_generate(model, cache, 2), reference)


def test_a_cache_with_room_for_all_layers_pages_nothing(aqua: Aqua) -> None:
    model = llama()
    with AquaCache(model.config, max_tokens=TOKENS, resident_layers=LAYERS, aqua=aqua) as cache:
        _assert_same(_generate(model, cache), _generate(model, DynamicCache(config=model.config)))
        assert cache.statistics.paged_out_bytes == 0


def test_a_conversation_goes_on_over_several_calls(aqua: Aqua) -> None:
    model = llama()
    turns = [prompt(1, tokens, seed=tokens)["input_ids"] for tokens in (21, 9, 14)]
    answers = []
    with AquaCache(
        model.config, max_tokens=120, resident_layers=2, aqua=aqua, block_tokens=8
    ) as ours:
        for cache in (ours, DynamicCache(config=model.config)):
            text = torch.empty((1, 0), dtype=torch.long)
            for turn in turns:
                text = torch.cat([text, turn], dim=1)
                mask = torch.ones_like(text)
                text = model.generate(
                    text, attention_mask=mask, past_key_values=cache, max_new_tokens=20
                )
            answers.append(text)
    assert torch.equal(*answers)


def test_the_default_instance_is_used_when_none_is_given(aqua: Aqua) -> None:
    model = llama()
    with AquaCache(model.config, max_tokens=TOKENS, resident_layers=2) as cache:
        _generate(model, cache)
        assert aqua.stats().paged_out_bytes == cache.statistics.paged_out_bytes > 0


# --- The budget --------------------------------------------------------------------------------


def _key_value_bytes(except_for: tuple[torch.Tensor, ...] = ()) -> int:
    """Memory of tensors made since `gc.freeze` that look like keys and values; views count once."""
    mine = {tensor.untyped_storage().data_ptr() for tensor in except_for}
    storages = {}
    for thing in gc.get_objects():
        # Queries have as many dimensions, but four heads.
        if issubclass(type(thing), torch.Tensor) and thing.dim() >= 4 and thing.shape[-3] == 2:
            storage = thing.untyped_storage()
            if storage.data_ptr() not in mine:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_keys_and_values_never_exceed_the_budget(
    aqua: Aqua, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    seen: list[int] = []

    def watched(
        cache: AquaCache, keys: torch.Tensor, values: torch.Tensor, *rest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        all_keys, all_values = update(cache, keys, values, *rest)
        seen.append(_key_value_bytes(except_for=(keys, values)))
        return all_keys, all_values

    update = AquaCache.update
    monkeypatch.setattr(AquaCache, "update", watched)
    budget_bytes = 80_000
    gc.freeze()
    with AquaCache(
        model.config, max_tokens=TOKENS, budget_bytes=budget_bytes, aqua=aqua, block_tokens=8
    ) as cache:
        _generate(model, cache)
        gc.unfreeze()
        assert cache.offload_plan is not None
        assert len(cache.offload_plan.resident) == 1
        statistics = cache.statistics
        whole = 2 * LAYERS * TOKENS * 2 * 16 * 4
        assert statistics.resident_bytes == max(seen) < budget_bytes < whole
        assert statistics.peak_resident_bytes <= cache.offload_plan.resident_bytes <= budget_bytes


def test_reordering_beams_stays_within_the_budget(aqua: Aqua) -> None:
    model = llama()
    with AquaCache(
        model.config, max_tokens=TOKENS, budget_bytes=250_000, aqua=aqua, block_tokens=8
    ) as cache:
        _generate(model, cache, num_beams=4)
        assert cache.offload_plan is not None
        statistics = cache.statistics
        assert statistics.resident_bytes < statistics.peak_resident_bytes <= 250_000


def test_a_budget_too_small_says_how_much_is_needed(aqua: Aqua) -> None:
    model = llama()
    with (
        AquaCache(model.config, max_tokens=TOKENS, budget_bytes=1000, aqua=aqua) as cache,
        pytest.raises(ConfigError, match="cannot hold two layers") as caught,
    ):
        _generate(model, cache)
    needed_bytes = caught.value.details["needed_bytes"]
    with AquaCache(model.config, max_tokens=TOKENS, budget_bytes=needed_bytes, aqua=aqua) as cache:
        _generate(model, cache)


def test_decoding_pages_out_full_blocks_only_and_each_once(aqua: Aqua) -> None:
    model = llama()
    block = 8 * 2 * 2 * 16 * 4  # Tokens, keys and values, heads, elements, bytes.
    with AquaCache(
        model.config, max_tokens=64, resident_layers=2, aqua=aqua, block_tokens=8
    ) as cache:
        model(**prompt(1, 10), past_key_values=cache)
        cache._storage.drain()  # type: ignore[union-attr]  # all layers are offloaded
        for length in range(11, 40):
            before = cache.statistics
            model(torch.tensor([[5]]), past_key_values=cache)
            cache._storage.drain()  # type: ignore[union-attr]  # all layers are offloaded
            moved = cache.statistics.paged_out_bytes - before.paged_out_bytes
            assert moved == (LAYERS * block if length % 8 == 0 else 0)
        assert cache.statistics.stored_bytes == aqua.stats().used_bytes == LAYERS * 4 * block


# --- Faults ------------------------------------------------------------------------------------


def _flip_a_stored_bit(aqua: Aqua) -> None:
    store = aqua._store
    frame = next(frame for frame in store._table.frames.values() if frame.used_bytes)
    memory = store.pin(frame)
    memory.tensor[frame.used_ranges()[0].start] ^= 1
    store.unpin(frame)


def test_a_changed_bit_raises_and_after_a_reset_the_cache_works_again(aqua: Aqua) -> None:
    model = llama()
    reference = _generate(model, DynamicCache(config=model.config))
    with AquaCache(
        model.config, max_tokens=TOKENS, resident_layers=2, aqua=aqua, block_tokens=8
    ) as cache:
        model(**prompt(1, 20), past_key_values=cache)
        _flip_a_stored_bit(aqua)
        with pytest.raises(ChecksumMismatchError):
            _generate(model, cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        _assert_same(_generate(model, cache), reference)


def test_a_store_without_room_is_refused_before_anything_is_paged() -> None:
    model = llama()
    with (
        aqualib.connect(
            is_offline=True, transport="memfd", slab_bytes=64 * KIB, host_bytes=64 * KIB
        ) as aqua,
        AquaCache(model.config, max_tokens=TOKENS, resident_layers=2, aqua=aqua) as cache,
        pytest.raises(CapacityError, match="host memory"),
    ):
        _generate(model, cache)


def test_more_tokens_than_the_cache_was_made_for_are_refused(aqua: Aqua) -> None:
    model = llama()
    with AquaCache(
        model.config, max_tokens=PROMPT + 10, resident_layers=2, aqua=aqua, block_tokens=8
    ) as cache:
        with pytest.raises(ConfigError, match="57 tokens exceed the 56"):
            _generate(model, cache)
        assert cache.get_seq_length() == 56


def test_another_batch_needs_another_cache(aqua: Aqua) -> None:
    model = llama()
    with AquaCache(model.config, max_tokens=TOKENS, resident_layers=2, aqua=aqua) as cache:
        model(**prompt(2, 10), past_key_values=cache)
        with pytest.raises(ConfigError, match="one cache per batch"):
            model(torch.tensor([[5]]), past_key_values=cache)
        with pytest.raises(ConfigError, match="planned for one batch"):
            cache.batch_repeat_interleave(2)
        with pytest.raises(ConfigError, match="planned for one batch"):
            cache.batch_select_indices(torch.tensor([0]))


def test_an_ambiguous_crop_is_refused(aqua: Aqua) -> None:
    model = llama()
    with AquaCache(model.config, max_tokens=TOKENS, resident_layers=2, aqua=aqua) as cache:
        model(**prompt(1, 10), past_key_values=cache)
        with pytest.raises(ConfigError, match="how many tokens to remove"):
            cache.crop(5)
