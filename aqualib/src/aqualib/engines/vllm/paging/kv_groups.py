"""How each group of a model's layers keeps the KV of a request.

vLLM gives layers that keep different things (all tokens, a window of them, a state) block tables of
their own. A table has an entry for each block of tokens from the first on; entries behind what the
next token reads are freed as the request grows, and name the null block from then on. All groups
draw from one pool, so a number is a block of one group at a time and its bytes are moved without
knowing which.

What a group reads is written down here by the name of vLLM's specification, because a subclass
that frees blocks in another way would be paged wrongly in silence. A name that is not in the table
is refused when the engine starts.

Source: vLLM's `get_num_skipped_tokens` of each cache manager; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import lcm
from typing import Any, Final, NamedTuple

from aqua_protocol import ConfigError

NULL_BLOCK: Final = 0
"""Number of vLLM's null block, the first that its pool ever hands out: it holds nothing. Fixed by
vLLM; any other number is a block with contents."""

TAIL: Final = "tail"
"""Marks the key of a request's partial last block, beside the number of its tokens."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One group of layers.

    Attributes:
        block_tokens: Tokens of a block.
        skipped: How many tokens the next one does not read, once so many are computed.
        is_state: It keeps what the last computed token left, and nothing of those before.
    """

    block_tokens: int
    skipped: Callable[[int], int] | None = None
    is_state: bool = False

    def first(self, tokens: int) -> int:
        """Index of the first block that is read after so many tokens."""
        return 0 if self.skipped is None else self.skipped(tokens) // self.block_tokens

    def read(self, start: int, tokens: int) -> range:
        """Indices of blocks that are read after so many tokens and do not end by `start`."""
        first = start // self.block_tokens
        if self.skipped is not None:
            first = max(first, self.first(tokens))
        return range(first, -(-tokens // self.block_tokens))


class BlockRun(NamedTuple):
    """Places of neighbouring blocks of one group, from the block with index `first` on."""

    first: int
    places: list[int]

    @property
    def end(self) -> int:
        """Index after the last block's."""
        return self.first + len(self.places)


class KvGroups(tuple[KvGroup, ...]):  # noqa: SLOT001 - cached properties need a dictionary
    """The groups of a model, and what follows from them together."""

    @cached_property
    def loses_all(self) -> bool:
        """Whether a request that has lost a block begins again, and so does not go back to it.

        With full attention alone what comes before a block is there. vLLM itself looks for the
        block where there is one group only.
        """
        return len(self) > 1 or any(group.skipped for group in self)

    @cached_property
    def has_state(self) -> bool:
        """Whether a request can go on after the last of its computed tokens only."""
        return any(group.is_state for group in self)

    @cached_property
    def hit_tokens(self) -> int:
        """Unit in which vLLM counts hits: blocks that end blocks of all groups."""
        return lcm(*(group.block_tokens for group in self))

    def wanted(self, tables: Sequence[Sequence[int]], tokens: int) -> list[range]:
        """Indices of the blocks, by group, that a request needs to go on after so many tokens."""
        found = []
        for group, block_ids in zip(self, tables, strict=True):
            first, end = 0, min(-(-tokens // group.block_tokens), len(block_ids))
            if group.skipped is not None:
                # vLLM may compute the last token again.
                first = group.first(tokens if group.is_state else max(0, tokens - 1))
            while first < end and block_ids[first] == NULL_BLOCK:
                first += 1
            found.append(range(first, end))
        return found

    def reach(self, runs: Sequence[BlockRun], tokens: int, most: int) -> int:
        """After how many tokens, at most `most`, a request that had so many can go on."""
        total = min(most, tokens)
        for group, run in zip(self, runs, strict=True):
            total = min(total, (run.first + len(run.places)) * group.block_tokens)
        if not self.loses_all:
            return total
        if self.has_state and total < tokens:
            return 0
        for group, run in zip(self, runs, strict=True):
            if run.first > group.first(total):
                return 0
        return total

    def longest(
        self, find: Callable[[int, range], list[int]], start: int, most: int
    ) -> tuple[int, list[BlockRun]]:
        """Tokens of the longest prefix, at most so many, that all groups have; and its places.

        Args:
            find: Looks blocks of a group up, from the first on as far as they are there.
            start: Tokens that need not be looked up; ends blocks of all groups.
            most: Tokens at most.
        """
        unit = self.hit_tokens
        total = most // unit * unit
        runs = [BlockRun(0, [])] * len(self)
        # One group shortens what all have; the others then look again.
        at = agreed = 0
        while agreed < len(self) and total > start:
            needed = self[at].read(start, total)
            if runs[at].first != needed.start or runs[at].end < needed.stop:
                runs[at] = BlockRun(needed.start, find(at, needed))
            if runs[at].end < needed.stop:
                total, agreed = runs[at].end * self[at].block_tokens // unit * unit, 0
            else:
                at, agreed = (at + 1) % len(self), agreed + 1
        return total, runs

    def cut(self, runs: Sequence[BlockRun], start: int, total: int) -> list[BlockRun]:
        """The part of `runs` that is read after `total` tokens and does not end by `start`."""
        cut = []
        for group, run in zip(self, runs, strict=True):
            needed = group.read(start, total)
            places = run.places[needed.start - run.first : needed.stop - run.first]
            cut.append(BlockRun(needed.start, places))
        return cut


class BlockKeys:
    """Names of blocks, under which requests find them.

    Args:
        groups: Of the model.
        hash_tokens: Tokens of one of a request's `block_hashes`; None gives each request names of
            its own, so that none finds another's blocks.
    """

    def __init__(self, groups: KvGroups, hash_tokens: int | None) -> None:
        if hash_tokens is not None:
            assert not any(group.block_tokens % hash_tokens for group in groups), groups
        self._groups = groups
        self._hash_tokens = hash_tokens

    def full(self, request: Any, index: int, blocks: range) -> Iterable[Hashable]:
        """Keys of full blocks of a group, or of as many as have one."""
        if self._hash_tokens is None:
            return ((request.request_id, at, index) for at in blocks)
        step = self._groups[index].block_tokens // self._hash_tokens
        hashes = request.block_hashes[(blocks.start + 1) * step - 1 : blocks.stop * step : step]
        return [(each, index) for each in hashes] if index else hashes

    def prefix(self, request: Any) -> tuple[int, list[Hashable]]:
        """Tokens that a request beginning with all of this one would find, and keys of them."""
        tokens = request.num_tokens // self._groups.hit_tokens * self._groups.hit_tokens
        blocks = [group.read(0, tokens) for group in self._groups]
        runs = (self.full(request, index, each) for index, each in enumerate(blocks))
        return tokens, list(chain.from_iterable(runs))

    def upto(self, request: Any, index: int, blocks: range, tokens: int) -> list[Hashable]:
        """Keys of blocks of a group that so many tokens end in."""
        group = self._groups[index]
        # A state is what that many tokens left, and is never finished.
        end = blocks.start if group.is_state else min(tokens // group.block_tokens, blocks.stop)
        keys = [*self.full(request, index, range(blocks.start, end))]
        if end < blocks.stop and len(keys) == end - blocks.start:
            keys.append((request.request_id, TAIL, tokens, index))
        return keys


def _full(spec: Any, block_tokens: int) -> KvGroup:
    del spec
    return KvGroup(block_tokens)


def _window(spec: Any, block_tokens: int) -> KvGroup:
    # Until 0.30 no more is kept than the window.
    behind = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
    return KvGroup(block_tokens, lambda tokens: max(0, tokens - behind))


def _chunks(spec: Any, block_tokens: int) -> KvGroup:
    size = spec.attention_chunk_size
    return KvGroup(block_tokens, lambda tokens: tokens // size * size)


def _state(spec: Any, block_tokens: int) -> KvGroup:
    if spec.num_speculative_blocks:
        raise ConfigError(
            "layers with a state (Mamba, linear attention) cannot be paged while drafting",
            remedy='Drop --speculative-config, or set "mode": "recompute".',
        )
    return KvGroup(block_tokens, lambda tokens: max(0, tokens - 1), is_state=True)


KINDS: Final[dict[str, Callable[[Any, int], KvGroup]]] = {
    "FullAttentionSpec": _full,
    "MLAAttentionSpec": _full,
    "SlidingWindowSpec": _window,
    "ChunkedLocalAttentionSpec": _chunks,
    "MambaSpec": _state,
}
"""What can be paged, by the name of vLLM's specification."""


def kv_groups(kv_cache_config: Any) -> KvGroups:
    """The groups of an engine's KV cache, in vLLM's order.

    Raises:
        ConfigError: One keeps its blocks in a way that is not in `KINDS`.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    unknown = {type(each).__name__ for spec in specs for each in _layers(spec)} - KINDS.keys()
    if unknown:
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: layers that keep their KV so cannot be paged",
            remedy='Set "mode": "recompute".',
        )
    # A worker's group may name each layer's specification; they read alike.
    firsts = [next(_layers(spec)) for spec in specs]
    return KvGroups(KINDS[type(spec).__name__](spec, spec.block_size) for spec in firsts)


def _layers(spec: Any) -> Iterator[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is None:
        yield spec
    else:
        yield from inner.values()
