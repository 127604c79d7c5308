"""AquaCache on borrowed memory: taken back, lent again and lost while a model generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from aqualib import Aqua
from aqualib.engines.transformers import AquaCache
from aqualib.producer.producer import Producer
from harness.bounds import HANG_S
from harness.consumers import await_rest, consuming, grant
from harness.producers import SLAB, lending
from harness.raw_consumer import TokenIssuer
from harness.tiny_models import llama, prompt

PROMPT = 60
NEW = 40
SLABS = 24


class AtTokens(LogitsProcessor):  # type: ignore[misc] # transformers is not typed
    """Does things when so many new tokens have been made, in the middle of `generate`."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        self._actions = dict(actions)
        self._count = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._count += 1
        action = self._actions.pop(self._count, None)
        if action is not None:
            action()
        return scores

    def assert_all_done(self) -> None:
        assert not self._actions, f"never reached: {sorted(self._actions)}"


@pytest.fixture
def producer(issuer: TokenIssuer) -> Iterator[Producer]:
    with lending(issuer, SLABS) as producer:
        yield producer


@pytest.fixture
def aqua(issuer: TokenIssuer, producer: Producer) -> Iterator[Aqua]:
    with consuming(SLABS, is_checking=True) as aqua:
        aqua.attach(grant(issuer, producer.endpoint, SLABS))
        yield aqua


def _generate(
    model: PreTrainedModel, cache: object, **options: object
) -> GenerateDecoderOnlyOutput:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return model.generate(
            **prompt(1, PROMPT),
            past_key_values=cache,
            max_new_tokens=NEW,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )


def _cache(model: PreTrainedModel, aqua: Aqua) -> AquaCache:
    return AquaCache(
        model.config, max_tokens=PROMPT + NEW, resident_layers=2, aqua=aqua, block_tokens=8
    )


def _assert_same(ours: GenerateDecoderOnlyOutput, reference: GenerateDecoderOnlyOutput) -> None:
    assert torch.equal(ours.sequences, reference.sequences)
    for step, (one, other) in enumerate(zip(ours.logits, reference.logits, strict=True)):
        assert torch.equal(one, other), f"logits differ at step {step}"


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["sampled", "beams"])
def test_memory_taken_back_and_lent_again_mid_generation_changes_no_logit(
    producer: Producer, aqua: Aqua, issuer: TokenIssuer, options: dict[str, object]
) -> None:
    model = llama()
    reference = _generate(model, DynamicCache(config=model.config), **options)
    half = SLABS // 2 * SLAB

    def lend_again() -> None:
        producer.offer(half)
        aqua.attach(grant(issuer, producer.endpoint, SLABS // 2))

    acts = AtTokens(
        {
            8: lambda: producer.reclaim(half),
            14: lambda: producer.reclaim(producer.offered_bytes),
            22: lend_again,
            32: lambda: producer.reclaim(producer.offered_bytes),
        }
    )
    with _cache(model, aqua) as cache:
        _assert_same(_generate(model, cache, logits_processor=[acts], **options), reference)
        acts.assert_all_done()
        await_rest(aqua)
        stats = aqua.stats()
        assert stats.drained_bytes > 0
        assert stats.promoted_bytes > 0
        assert stats.spilled_bytes == stats.used_bytes > 0
    assert producer.leased_bytes == producer.quarantined_bytes == 0


def test_pages_go_to_borrowed_memory_first(producer: Producer, aqua: Aqua) -> None:
    model = llama()
    with _cache(model, aqua) as cache:
        _generate(model, cache)
        stats = aqua.stats()
        assert stats.used_bytes == cache.statistics.stored_bytes > 0
        assert stats.spilled_bytes == 0


def test_every_slab_is_back_when_a_reclaim_is_done_although_the_model_goes_on(
    producer: Producer, aqua: Aqua
) -> None:
    model = llama()

    def take_back() -> None:
        ticket = producer.reclaim(SLABS * SLAB)
        assert ticket.wait(HANG_S), ticket
        assert ticket.returned_bytes == SLABS * SLAB
        assert ticket.first_slab_ms is not None
        assert ticket.total_ms is not None
        assert ticket.first_slab_ms <= ticket.total_ms

    acts = AtTokens({12: take_back})
    with _cache(model, aqua) as cache:
        reference = _generate(model, DynamicCache(config=model.config))
        _assert_same(_generate(model, cache, logits_processor=[acts]), reference)
        acts.assert_all_done()
        assert aqua.stats().leased_bytes == 0
