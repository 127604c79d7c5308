"""AquaCache and DynamicCache through the same history of updates hold the same keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig

import aqualib
from aqua_protocol import KIB, MIB
from aqualib import Aqua
from aqualib.engines.transformers import AquaCache

LAYERS = 5
HEADS = 2
HEAD_DIM = 4
MAX_TOKENS = 60


@dataclass(frozen=True)
class Append:
    tokens: int


@dataclass(frozen=True)
class Crop:
    tokens: int


@dataclass(frozen=True)
class Reorder:
    beams: tuple[int, ...]


@dataclass(frozen=True)
class Reset:
    pass


def _histories(batch: int) -> st.SearchStrategy[list[Append | Crop | Reorder | Reset]]:
    beams = st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)
    appends = st.builds(Append, st.integers(1, 9))
    crops = st.builds(Crop, st.integers(1, 12))
    reorders = st.builds(Reorder, beams.map(tuple))
    # Something to change first, and then mostly changes: an empty cache shows little.
    changes = st.one_of(appends, crops, reorders, crops, reorders, st.builds(Reset))
    rounds = st.lists(st.tuples(appends, changes), min_size=2, max_size=10)
    return rounds.map(lambda pairs: [act for pair in pairs for act in pair])


@pytest.fixture(scope="module")
def aqua() -> Iterator[Aqua]:
    with aqualib.connect(
        is_offline=True, transport="memfd", slab_bytes=64 * KIB, host_bytes=4 * MIB, checksum=True
    ) as aqua:
        yield aqua


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    batch_and_history=st.integers(1, 3).flatmap(
        lambda batch: st.tuples(st.just(batch), _histories(batch))
    ),
    resident_layers=st.integers(2, LAYERS),
    block_tokens=st.sampled_from([1, 3, 4, 8, 64]),
)
def test_any_history_leaves_the_same_keys_and_values(
    aqua: Aqua,
    batch_and_history: tuple[int, list[Append | Crop | Reorder | Reset]],
    resident_layers: int,
    block_tokens: int,
) -> None:
    batch, history = batch_and_history
    config = LlamaConfig(num_hidden_layers=LAYERS)
    reference = DynamicCache(config=config)
    generator = torch.Generator().manual_seed(0)
    with AquaCache(
        config,
        max_tokens=MAX_TOKENS,
        resident_layers=resident_layers,
        aqua=aqua,
        block_tokens=block_tokens,
    ) as cache:
        for act in [*history, Append(1)]:
            length = reference.get_seq_length()
            match act:
                case Append(tokens=tokens) if length + tokens <= MAX_TOKENS:
                    for layer in range(LAYERS):
                        shape = (batch, HEADS, tokens, HEAD_DIM)
                        states = [torch.randn(shape, generator=generator) for _ in range(2)]
                        expected = reference.update(*states, layer)
                        for ours, theirs in zip(
                            cache.update(*states, layer), expected, strict=True
                        ):
                            assert torch.equal(ours, theirs)
                case Crop(tokens=tokens) if 0 < tokens < length:
                    reference.crop(-tokens)
                    cache.crop(-tokens)
                case Reorder(beams=beams) if length:
                    reference.reorder_cache(torch.tensor(beams))
                    cache.reorder_cache(torch.tensor(beams))
                case Reset() if length:
                    reference = DynamicCache(config=config)
                    cache.reset()
                case _:
                    continue
            assert cache.get_seq_length() == reference.get_seq_length()
            if cache.offload_plan is not None:
                assert cache.statistics.peak_resident_bytes <= cache.offload_plan.resident_bytes
    aqua.audit()
    assert aqua.stats().used_bytes == 0, "no block is left behind"
