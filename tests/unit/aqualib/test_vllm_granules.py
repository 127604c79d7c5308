from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqualib.engines.vllm.lending.granules import GranuleMap
from aqualib.ranges import Range, runs_of

GRANULE = 16
BASE = 1 << 20


def layers(count: int, *, blocks: int, piece: int, granule: int = GRANULE) -> GranuleMap:
    """Rows of `blocks` pieces, one after the other in one region, as vLLM lays them out."""
    row_bytes = blocks * piece
    whole = -(-count * row_bytes // granule) * granule
    rows = [Range(BASE + at * row_bytes, row_bytes) for at in range(count)]
    return GranuleMap([Range(BASE, whole)], rows, block_count=blocks, granule_bytes=granule)


def mask(size: int, *index: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found = np.zeros(size, np.bool_)
    found[list(index)] = True
    return found


def test_a_granule_is_free_when_no_block_in_it_is_in_use() -> None:
    granules = layers(1, blocks=8, piece=4)
    assert granules.count == 2
    assert list(granules.free(mask(8, 4, 5, 6, 7))) == [False, True]
    assert list(granules.free(mask(8, 4, 5, 6))) == [False, False]


def test_a_granule_between_two_layers_needs_blocks_of_both() -> None:
    granules = layers(2, blocks=6, piece=4)  # Rows of 24 bytes: the second granule holds both.
    assert granules.count == 3
    assert not granules.free(mask(6, 4, 5)).any()
    assert list(granules.free(mask(6, 0, 1, 4, 5))) == [False, True, False]


def test_bytes_of_others_are_never_given_up() -> None:
    region = Range(BASE, 3 * GRANULE)
    row = Range(BASE + 8, 32)  # Something else is before and behind.
    granules = GranuleMap([region], [row], block_count=8, granule_bytes=GRANULE)
    assert list(granules.free(np.ones(8, np.bool_))) == [False, True, False]
    assert granules.bytes_above(0) == GRANULE


def test_the_limit_is_as_high_as_the_bytes_allow() -> None:
    granules = layers(2, blocks=8, piece=8)
    assert granules.limit_for(0) == 8
    assert granules.limit_for(1) == 6
    assert granules.limit_for(2 * GRANULE) == 6
    assert granules.limit_for(2 * GRANULE + 1) == 4
    assert granules.limit_for(1 << 30) == 0
    assert granules.bytes_above(4) == 4 * GRANULE


def test_the_highest_granules_leave_first() -> None:
    granules = layers(2, blocks=8, piece=8)
    chosen = granules.highest(np.ones(granules.count, np.bool_), 3)
    assert set(np.flatnonzero(granules.blocks_of(chosen))) == {4, 5, 6, 7}


def test_regions_are_numbered_one_after_the_other() -> None:
    regions = [Range(BASE, 2 * GRANULE), Range(BASE + (1 << 16), 2 * GRANULE)]
    rows = [Range(region.start, region.size) for region in regions]
    granules = GranuleMap(regions, rows, block_count=8, granule_bytes=GRANULE)
    assert list(granules.free(mask(8, 4, 5, 6, 7))) == [False, True, False, True]


def test_a_row_outside_every_region_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="lies in none"):
        GranuleMap([Range(0, 64)], [Range(32, 64)], block_count=8, granule_bytes=GRANULE)


def test_runs_are_found_in_a_mask() -> None:
    assert runs_of(mask(6, 0, 1, 3, 5)) == [Range(0, 2), Range(3, 1), Range(5, 1)]
    assert runs_of(mask(6)) == []


@given(
    layer_count=st.integers(1, 4),
    blocks=st.integers(1, 24),
    piece=st.integers(1, 40),
    out=st.data(),
)
def test_free_granules_and_their_blocks_are_what_a_look_at_every_byte_finds(
    layer_count: int, blocks: int, piece: int, out: st.DataObject
) -> None:
    granules = layers(layer_count, blocks=blocks, piece=piece)
    is_out = np.array(out.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)))
    owner = np.tile(np.repeat(np.arange(blocks), piece), layer_count)
    padded = np.full(granules.count * GRANULE, -1)
    padded[: len(owner)] = owner
    by_granule = padded.reshape(-1, GRANULE)
    free = [bool((row >= 0).all() and is_out[row].all()) for row in by_granule]
    assert list(granules.free(is_out)) == free
    for index in np.flatnonzero(free):
        found = granules.blocks_of(mask(granules.count, int(index)))
        assert set(np.flatnonzero(found)) == set(by_granule[index])
