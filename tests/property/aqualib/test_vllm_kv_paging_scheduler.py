"""Random lives of requests on a small engine: what is loaded is always what was computed.

The world below is an engine reduced to what the scheduler's half sees: blocks that are freed and
given away within a step, steps that write after paging, a worker that keeps bytes by place and now
and then loses some. A block's bytes are its tokens with all before them, so a wrong block is a
wrong value.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqualib.engines.vllm.options import AquaOptions, LoadMode, PagingMode
from aqualib.engines.vllm.paging.kv_groups import KvGroup, KvGroups
from aqualib.engines.vllm.paging.plan import PagingPlan, WorkerReport, WorkerStore
from aqualib.engines.vllm.paging.scheduler import KvPagingScheduler

BLOCK = 4
Bytes = tuple[int, ...]


@dataclass
class Request:
    request_id: str
    tokens: list[int]
    goal: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_inside: bool = False
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_computed_tokens(self) -> int:
        return 0

    @property
    def block_hashes(self) -> list[Bytes]:
        return [tuple(self.tokens[:end]) for end in range(BLOCK, len(self.tokens) + 1, BLOCK)]

    def bytes_of(self, index: int, computed: int) -> Bytes:
        return tuple(self.tokens[: min(computed, (index + 1) * BLOCK)])


class World:
    def __init__(self, rng: random.Random, options: AquaOptions, *, is_sharing: bool) -> None:
        self.rng = rng
        self.paging = KvPagingScheduler(
            options,
            groups=KvGroups([KvGroup(BLOCK)]),
            hash_tokens=BLOCK,
            is_sharing=is_sharing,
        )
        self.paging.note(WorkerReport(store=WorkerStore(rng.randrange(1, 30), block_bytes=1)))
        self.free = list(range(1, 25))
        self.cache: dict[int, Bytes] = {}
        self.places: dict[int, Bytes] = {}
        self.requests: dict[str, Request] = {}
        self.loading: dict[str, tuple[list[int], list[int]]] = {}
        self.restored = self.lost = self.count = 0

    def step(self) -> None:
        rng, paging = self.rng, self.paging
        left = {
            request.request_id for request in list(self.requests.values()) if self.part(request)
        }
        if len(self.requests) < 6:
            self.count += 1
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            name = f"r{self.count}"
            self.requests[name] = Request(name, tokens, goal=len(tokens) + rng.randrange(1, 20))
        running = [r for r in self.requests.values() if r.is_inside]
        for request in running if paging.is_checkpointing else ():
            is_loading = request.request_id in self.loading
            if not is_loading and paging.is_behind(request.request_id, request.computed):
                paging.checkpoint(request, request.computed, [request.blocks])
        for request in self.requests.values():
            if not request.is_inside and request.request_id not in left and rng.random() < 0.5:
                self.admit(request)
        if rng.random() < 0.02:
            paging.reset()
            assert not any(map(paging.saved_tokens, self.requests))
        self.execute(paging.take_plan() or PagingPlan())
        self.compute()

    def part(self, request: Request) -> bool:
        """Let a request finish, be aborted or be preempted; whether it was preempted."""
        chance = self.rng.random()
        if not request.is_inside:
            if chance < 0.02:
                self.finish(request)
        elif request.request_id not in self.loading:
            if chance < 0.15:
                self.leave(request)
                return True
            if chance < 0.18 or len(request.tokens) >= request.goal:
                self.finish(request)
        return False

    def leave(self, request: Request) -> None:
        # Steps under way may have written drafts, of which the next owner of these blocks knows
        # nothing; none is accepted here.
        drafts = self.rng.choice((0, 0, 3))
        self.draft(request, drafts)
        written = request.computed + drafts
        saved = self.paging.preempting(request, [request.blocks], written)
        assert saved == self.paging.saved_tokens(request.request_id) <= written
        self.free += request.blocks
        request.blocks, request.computed, request.is_inside = [], 0, False

    def draft(self, request: Request, most: int) -> int:
        """Guess so many tokens, as far as there are blocks for them."""
        count = min(most, len(request.blocks) * BLOCK - request.computed)
        guessed = Request("", [*request.tokens, *[2] * count], 0)
        written = request.computed + count
        for index, block in enumerate(request.blocks):
            if count and index * BLOCK < written:
                self.cache[block] = guessed.bytes_of(index, written)
        return count

    def finish(self, request: Request) -> None:
        if request.request_id in self.loading:
            return  # vLLM keeps such a request until its load has ended.
        self.paging.finished(request, [request.blocks], request.computed)
        self.free += request.blocks
        del self.requests[request.request_id]

    def admit(self, request: Request) -> None:
        need = -(-(len(request.tokens) + 1) // BLOCK)
        if need > len(self.free):
            return
        count, is_async = self.paging.matched(request, 0)
        if count is None:
            return
        assert self.paging.matched(request, 0) == (count, is_async), "asking changes nothing"
        assert count < request.num_tokens
        self.rng.shuffle(self.free)
        request.blocks = [self.free.pop() for _ in range(need)]
        request.is_inside = True
        request.computed = count
        self.paging.allocated(request, [request.blocks], count)
        self.restored += count
        if is_async and count:
            self.loading[request.request_id] = ([], [])

    def execute(self, plan: PagingPlan) -> None:
        for place in plan.drops:
            self.places.pop(place, None)
        for place, block in zip(plan.out_places, plan.out_blocks, strict=True):
            self.places[place] = self.cache[block]
        report = WorkerReport()
        if self.places and self.rng.random() < 0.05:
            self.places.pop(self.rng.choice(sorted(self.places)))
        failed: set[int] = set()
        self.load(plan.in_places, plan.in_blocks, report, failed)
        self.check_written(plan)
        for name, job in plan.async_loads.items():
            assert name in self.loading
            self.loading[name] = job
        for name in [name for name in self.loading if self.rng.random() < 0.4]:
            self.load(*self.loading.pop(name), report, failed)
            self.paging.loads_ended([name])
        for request in self.requests.values():
            for index, block in enumerate(request.blocks):
                if block in failed:
                    request.computed = min(request.computed, index * BLOCK)
                    self.lost += 1
        if report.lost_places:
            self.paging.note(report)

    def check_written(self, plan: PagingPlan) -> None:
        """Blocks come late that the step does not write to, and no others."""
        written = set(plan.written_blocks)
        for request in self.requests.values():
            full = request.computed // BLOCK
            assert written.isdisjoint(request.blocks[:full]), "the step does not write to it"
            late = set(request.blocks[full:]) & set(plan.in_blocks) - written
            assert not late, "the step writes to what may come late"

    def load(
        self, places: list[int], blocks: list[int], report: WorkerReport, failed: set[int]
    ) -> None:
        for place, block in zip(places, blocks, strict=True):
            if place in self.places:
                self.cache[block] = self.places[place]
            else:
                failed.add(block)
                report.lost_places.add(place)

    def compute(self) -> None:
        for request in self.requests.values():
            if not request.is_inside or request.request_id in self.loading:
                continue
            for index in range(-(-request.computed // BLOCK)):
                expected = request.bytes_of(index, request.computed)
                found = self.cache[request.blocks[index]]
                assert found[: len(expected)] == expected, (request, index, found)
            while len(request.blocks) * BLOCK < len(request.tokens):
                if not self.free:
                    break
                request.blocks.append(self.free.pop())
            request.computed = min(len(request.tokens), len(request.blocks) * BLOCK)
            for index in range(-(-request.computed // BLOCK)):
                self.cache[request.blocks[index]] = request.bytes_of(index, request.computed)
            if request.computed == len(request.tokens):
                request.tokens.append(self.rng.randrange(2))


@pytest.mark.parametrize("is_sharing", [False, True])
@pytest.mark.parametrize("load", list(LoadMode))
@pytest.mark.parametrize("mode", [PagingMode.SWAP, PagingMode.CHECKPOINT])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_loaded_is_what_was_computed(
    mode: PagingMode, load: LoadMode, is_sharing: bool, seed: int
) -> None:
    rng = random.Random(seed)
    options = AquaOptions(mode=mode, load=load, max_loading_blocks=rng.randrange(1, 12))
    world = World(rng, options, is_sharing=is_sharing)
    for _ in range(120):
        world.step()
        world.paging.table.audit()
    for _ in range(200):  # Loads under way come to their end.
        world.execute(world.paging.take_plan() or PagingPlan())
        if not world.loading:
            break
    for request in list(world.requests.values()):
        world.finish(request)
    world.paging.take_plan()
    world.paging.table.audit()
    assert world.paging.table.held_count == 0


def test_the_histories_load_and_lose() -> None:
    """The property above would also hold of histories in which nothing happens."""
    restored = lost = 0
    for seed in range(20):
        world = World(random.Random(seed), AquaOptions(), is_sharing=seed % 2 == 0)
        for _ in range(120):
            world.step()
        restored += world.restored
        lost += world.lost
    assert restored > 500
    assert lost > 0
