from __future__ import annotations

from dataclasses import dataclass, field

from aqualib.engines.vllm.paging.async_page_out import AsyncPageOut
from aqualib.engines.vllm.paging.block_table import BlockTable
from aqualib.engines.vllm.paging.plan import PagingPlan


@dataclass
class Block:
    ref_cnt: int = 1


@dataclass
class Pool:
    """vLLM's, of blocks that a request holds each."""

    blocks: list[Block] = field(default_factory=lambda: [Block() for _ in range(40)])

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1


def page_outs(
    capacity: int = 40, most: int = 8, part: int = 4
) -> tuple[AsyncPageOut, BlockTable, Pool]:
    table, pool = BlockTable(capacity), Pool()
    saves = AsyncPageOut(table, pool, most)
    saves.part_blocks = part
    return saves, table, pool


def preempt(
    saves: AsyncPageOut, pool: Pool, blocks: list[int], plan: PagingPlan
) -> tuple[list[int], set[int], int]:
    """A request's blocks are paged out, and it gives them up."""
    found = saves.swap([("r", block) for block in blocks], blocks, len(blocks), plan)
    pool.free_blocks([pool.blocks[block] for block in blocks])
    return found


def test_memory_comes_free_when_every_worker_has_acknowledged() -> None:
    saves, table, pool = page_outs()
    places, parts, _ = preempt(saves, pool, [1, 2, 3], PagingPlan())
    assert saves.freeing_blocks == 3
    (number,) = parts
    saves.acknowledged(number, 2, worker_count=3)
    assert [pool.blocks[block].ref_cnt for block in (1, 2, 3)] == [1, 1, 1]
    assert not saves.is_done(parts)
    assert not table.find([("r", 1)]), "not to be found before it is there"
    saves.acknowledged(number, 1, worker_count=3)
    assert [pool.blocks[block].ref_cnt for block in (1, 2, 3)] == [0, 0, 0]
    assert saves.freeing_blocks == 0
    assert saves.is_done(parts)
    assert table.find([("r", 1), ("r", 2), ("r", 3)]) == places
    table.audit()


def test_blocks_of_a_step_share_parts_of_a_staging_buffer() -> None:
    saves, _, pool = page_outs(part=4)
    plan = PagingPlan()
    _, first, _ = preempt(saves, pool, [1, 2, 3], plan)
    _, second, _ = preempt(saves, pool, [4, 5, 6, 7, 8, 9], plan)
    assert [blocks for _, blocks in plan.async_saves.values()] == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert first < second
    assert plan.urgent_saves == list(plan.async_saves)
    saves.plan_taken()
    later = PagingPlan()
    preempt(saves, pool, [10], later)
    assert [blocks for _, blocks in later.async_saves.values()] == [[10]]


def test_what_has_memory_waiting_for_it_is_not_bounded_and_the_rest_is() -> None:
    saves, _, pool = page_outs(most=2)
    plan = PagingPlan()
    assert saves.save(["a", "b", "c"], [20, 21, 22], plan) == (2, 2)
    assert saves.save(["d"], [23], plan) == (0, 0)
    places, *_ = preempt(saves, pool, [1, 2, 3, 4, 5], plan)
    assert len(places) == 5


def test_a_checkpoint_under_way_becomes_urgent_and_is_not_made_twice() -> None:
    saves, table, pool = page_outs()
    plan = PagingPlan()
    assert saves.save([("r", 1), ("r", 2)], [1, 2], plan) == (2, 2)
    (checkpoint,) = plan.async_saves
    assert plan.urgent_saves == []
    assert saves.freeing_blocks == 0
    saves.plan_taken()
    later = PagingPlan()
    places, parts, new_count = preempt(saves, pool, [1, 2, 3], later)
    assert new_count == 1
    assert checkpoint in parts
    assert checkpoint in later.urgent_saves
    assert saves.freeing_blocks == 3
    for number in parts:
        saves.acknowledged(number, 1, worker_count=1)
    assert saves.freeing_blocks == 0
    assert table.find([("r", 1), ("r", 2), ("r", 3)]) == places
    table.release(places)
    table.audit()
    assert table.held_count == 0


def test_blocks_that_another_request_holds_do_not_come_free() -> None:
    saves, _, pool = page_outs()
    pool.touch([pool.blocks[1]])
    preempt(saves, pool, [1, 2], PagingPlan())
    assert saves.freeing_blocks == 1


def test_a_full_store_takes_the_first_blocks() -> None:
    saves, table, pool = page_outs(capacity=2)
    places, _, new_count = preempt(saves, pool, [1, 2, 3], PagingPlan())
    assert (len(places), new_count) == (2, 2)
    assert pool.blocks[3].ref_cnt == 0, "what is not paged out is free at once"
    table.audit()


def test_what_is_let_go_is_free_at_once_and_never_found() -> None:
    saves, table, pool = page_outs()
    places, parts, _ = preempt(saves, pool, [1, 2], PagingPlan())
    saves.let_go()
    table.release(places)
    table.clear()
    assert [pool.blocks[block].ref_cnt for block in (1, 2)] == [0, 0]
    for number in parts:
        saves.acknowledged(number, 1, worker_count=1)
    assert not table.find([("r", 1)])
    assert table.room == 40
