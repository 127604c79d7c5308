"""vLLM's pool of KV blocks, as far as lending uses it, for tests without vLLM.

`tests/engine` walks it and the real one side by side and compares what they say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final


@dataclass(slots=True)
class PaperBlock:
    """A block; `block_hash` is the prefix that it answers."""

    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    block_hash: str | None = None


@dataclass
class PaperPool:
    """Free blocks are used from the front; those that answer a prefix, last."""

    num_gpu_blocks: int
    blocks: Final[list[PaperBlock]] = field(init=False)
    free: list[PaperBlock] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = [PaperBlock(index) for index in range(self.num_gpu_blocks)]  # type: ignore[misc] # once
        self.free = self.blocks[1:]
        self.blocks[0].is_null = True

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_usage(self) -> float:
        return 1.0 - len(self.free) / (self.num_gpu_blocks - 1)

    def get_new_blocks(self, num_blocks: int) -> list[PaperBlock]:
        assert num_blocks <= len(self.free)
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block in taken:
            assert block.ref_cnt == 0, block
            block.ref_cnt, block.block_hash = 1, None
        return taken

    def touch(self, blocks: Sequence[PaperBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free.remove(block)
            block.ref_cnt += 1

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self.blocks[block_id].block_hash = None

    def free_blocks(self, ordered_blocks: Iterable[PaperBlock]) -> None:
        first: list[PaperBlock] = []
        last: list[PaperBlock] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, block
            if block.ref_cnt == 0 and not block.is_null:
                (first if block.block_hash is None else last).append(block)
        self.free = [*first, *self.free, *last]
