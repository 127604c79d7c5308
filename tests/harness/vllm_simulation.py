"""vLLM's real scheduler and ours, driven as an engine drives them, over a model of arithmetic.

Everything that decides is real: the scheduler (with asynchronous scheduling where asked), its
block manager with prefix caching, `AquaConnector`'s half and `KvPagingScheduler`. What an engine
has in addition is simulated: a runner whose KV cache is a table of numbers, and the link to the
store, which is slow, loses blocks and answers late as the seed says.

A token's KV is a number made of the token and of the KV before it, in each group of layers, and the
next token is made of all KV that the groups read. So one slot with anything but what belongs there
changes an output, and what an engine would have answered that was never preempted is known
beforehand (`SimulatedEngine.expected`).

The runner executes steps in the order in which they were scheduled and hands their outputs over
up to `depth - 1` steps later, as vLLM's queue of batches does.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from aqualib.engines.vllm.co_serving.safepoints import SafepointOrder
from aqualib.engines.vllm.paging.kv_groups import NULL_BLOCK
from aqualib.engines.vllm.paging.plan import PagingPlan, WorkerReport, WorkerStore
from harness.vllm_shapes import (
    BLOCK_TOKENS,
    Shape,
    block_tokens,
    first_read,
    hash_tokens,
    is_state,
    make_scheduler,
)

VOCABULARY: Final = 97
LONGEST_HISTORY: Final = 40


def kv_of(kind: str, slots: list[int], token: int, weights: int) -> int:
    """What a token leaves in its slot of a group, after those before it."""
    is_read = bool(slots) and (is_state(kind) or first_read(kind, len(slots)) < len(slots))
    return hash((slots[-1] if is_read else 0, token, weights))


def next_of(kinds: Sequence[str], kv: list[list[int]]) -> int:
    """The token that follows, of the slots of each group up to the last token's."""
    pairs = zip(kinds, kv, strict=True)
    read = [tuple(slots[first_read(kind, len(slots) - 1) :]) for kind, slots in pairs]
    return hash(tuple(read)) % VOCABULARY


def continuation(kinds: Sequence[str], prompt: list[int], count: int, weights: int) -> list[int]:
    """What the model answers."""
    kv: list[list[int]] = [[] for _ in kinds]
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        for token in tokens[len(kv[0]) :]:
            for kind, slots in zip(kinds, kv, strict=True):
                slots.append(kv_of(kind, slots, token, weights))
        tokens.append(next_of(kinds, kv))
    return tokens[len(prompt) :]


class SimulatedEngine:
    """One engine; `step` until `is_done`."""

    def __init__(self, shape: Shape, seed: int, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.shape = shape
        self.rng = random.Random(seed)
        self.scheduler = make_scheduler(vllm_config, shape)
        self.runner = Runner(shape, self.rng, self.expected_at)
        self._under_way: deque[tuple[Any, Any]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_tokens(shape), sha256)
        self._late: deque[Any] = deque()
        shared = [self.rng.randrange(VOCABULARY) for _ in range(3 * BLOCK_TOKENS)]
        for index in range(shape.requests):
            own = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(2, 14))]
            common = shared[: self.rng.randrange(len(shared))] if shape.caches_prefixes else []
            prompt = common + own
            if self.expected and self.rng.random() < shape.turns:
                # A user answers: what was asked and said before comes first.
                earlier = self.rng.choice(list(self.expected))
                said = list(self.runner.requests[earlier].prompt_token_ids) + self.expected[earlier]
                prompt = said[:LONGEST_HISTORY] + own
            count = self.rng.randrange(8, 32)
            name = f"r{index}"
            told: dict[str, Any] = {"aqua_tenant": "ab"[index % 2]}
            if shape.offline:
                told["aqua_class"] = "offline" if self.rng.random() < shape.offline else "online"
            if name in shape.finish_in_s:
                told["aqua_finish_in_s"] = shape.finish_in_s[name]
            self.ask(prompt, count, told)
        self.add(1 + shape.requests // 2)

    def ask(
        self,
        prompt: list[int],
        count: int,
        told: dict[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Have one more request arrive some time, which wants so many tokens."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        index = len(self.outputs)
        name = f"r{index}"
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, extra_args=told)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(index),
            block_hasher=self._hasher,
            cache_salt=cache_salt,
        )
        self.runner.requests[name] = request
        self.outputs[name] = []
        self.expected[name] = continuation(self.shape.groups, prompt, count, self.runner.weights)
        self._late.append(request)

    def add(self, count: int) -> None:
        """Let so many of the requests arrive that have not."""
        for _ in range(min(count, len(self._late))):
            self.scheduler.add_request(self._late.popleft())

    def expected_at(self, name: str, position: int) -> int:
        """The right token at a position; what a draft guesses."""
        request = self.runner.requests[name]
        index = position - request.num_prompt_tokens
        answer = self.expected[name]
        return answer[index] if 0 <= index < len(answer) else 0

    @property
    def is_done(self) -> bool:
        """Whether every request has come and gone."""
        return not (self._late or self._under_way or self.scheduler.has_unfinished_requests())

    def step(self) -> None:
        """Schedule a step and take in an output, as vLLM's engine core does."""
        if self._late and self.rng.random() < 0.2:
            self.add(1)
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._under_way.append((output, self.runner.execute(output)))
            is_idle = not output.total_num_scheduled_tokens
            if len(self._under_way) < self.shape.depth and not is_idle:
                return
        if self._under_way:
            self._take_output()

    def abort(self, name: str) -> None:
        """Have a request end here, whatever it is doing, if it has not ended."""
        from vllm.v1.request import RequestStatus

        if self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
            self.expected[name] = self.outputs[name]

    def drain(self) -> None:
        """Take in the outputs of all steps under way."""
        while self._under_way:
            self._take_output()

    def settle(self) -> None:
        """Make the steps that an engine makes after its last request."""
        while self.scheduler.has_requests():
            self.step()
        self.drain()

    def require_rest(self) -> None:
        """The books of paging are right now and, when all has settled, nothing is held."""
        paging = self.scheduler.paging
        paging.table.audit()
        self.settle()
        paging.table.audit()
        assert paging.table.held_count == 0
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "the null block alone is used"

    def change_weights(self) -> None:
        """Have the model answer otherwise from here on."""
        self.runner.weights += 1
        for name, tokens in self.outputs.items():
            prompt = list(self.runner.requests[name].prompt_token_ids)
            left = len(self.expected[name]) - len(tokens)
            rest = continuation(self.shape.groups, prompt + tokens, left, self.runner.weights)
            self.expected[name] = tokens + rest

    def _take_output(self) -> None:
        output, answer = self._under_way.popleft()
        self.runner.taken(output)
        for core_outputs in self.scheduler.update_from_output(output, answer).values():
            for each in core_outputs.outputs:
                self.outputs[each.request_id] += each.new_token_ids
        if self.shape.drafts and self.shape.depth == 1 and output.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(self.runner.drafted())


@dataclass(slots=True)
class _State:
    blocks: list[list[int]]
    tokens: list[int]
    computed: int
    rejected: dict[int, int] = field(default_factory=dict)


class Runner:
    """The worker's side: a KV cache of numbers, and a store of its blocks."""

    def __init__(self, shape: Shape, rng: random.Random, expected_at: Any) -> None:  # noqa: ANN401
        self.shape = shape
        self.rng = rng
        self.requests: dict[str, Any] = {}
        self._expected_at = expected_at
        self._most_tokens = max(map(block_tokens, shape.groups))
        self._cache = [[-1] * self._most_tokens for _ in range(shape.blocks)]
        self._places: dict[int, list[int]] = {}
        self._states: dict[str, _State] = {}
        self._loading: dict[str, tuple[list[int], list[int]]] = {}
        self._saving: dict[int, tuple[list[int], list[int]]] = {}
        self._unacknowledged: dict[int, int] = {}
        self._late: set[int] = set()
        self._step = 0
        self._taken = 0
        self._drafts: dict[str, list[int]] = {}
        self._is_told = False
        self._loses_all = shape.groups != ("full",)
        self.weights = 0
        self.zeroes_loads = False
        self.aborted_steps = 0
        self.loaded_blocks = self.lost_blocks = self.saved_blocks = self.paged_out_blocks = 0

    # --- A step ---------------------------------------------------------------------------

    def execute(self, output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Run a step and answer as a runner does."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        plan, wrap = _plan_of(output.kv_connector_metadata)
        self._step += 1
        self._page_out(plan)
        self._update(output)
        invalid: set[int] = set()
        lost: set[int] = set()
        self._load(plan.in_places, plan.in_blocks, invalid, lost)
        self._late = set(plan.in_blocks) - set(plan.written_blocks)
        for name, job in plan.async_loads.items():
            self._loading[name] = job
        names = list(output.num_scheduled_tokens)
        order = plan.safepoints
        aborted = order.step if order is not None and self.rng.random() < self.shape.aborts else 0
        forward = self._leave_unfinished if aborted else self._forward
        sampled = [forward(output, name) for name in names]
        arrived = {name for name in list(self._loading) if self.rng.random() < self.shape.speed}
        for name in sorted(arrived):
            self._load(*self._loading.pop(name), invalid, lost)
        connector = KVConnectorOutput(
            finished_recving=arrived or None,
            invalid_block_ids=set() if self._loses_all else invalid,
            kv_connector_worker_meta=wrap(self._report(lost, aborted, plan.safepoints)),
        )
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=connector,
        )

    def taken(self, output: Any) -> None:  # noqa: ANN401 - vLLM's
        """The scheduler sees this step's output now."""
        self._taken += 1
        for name in output.num_scheduled_tokens:
            state = self._states.get(name)
            if state is not None:
                state.rejected.pop(self._taken, None)

    def drafted(self) -> Any:  # noqa: ANN401 - vLLM's
        """Drafts after the last step, for a scheduler that waits for them."""
        from vllm.v1.outputs import DraftTokenIds

        names = list(self._drafts)
        return DraftTokenIds(names, [self._drafts[name] for name in names])

    def _update(self, output: Any) -> None:  # noqa: ANN401 - vLLM's
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._states.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = list(self.requests[new.req_id].all_token_ids)
            tables = [list(blocks) for blocks in new.block_ids]
            self._states[new.req_id] = _State(tables, tokens, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            state = self._states.get(name)
            if name in cached.resumed_req_ids or state is None:
                tokens = list(self.requests[name].all_token_ids)
                assert blocks is not None
                computed = cached.num_computed_tokens[index]
                self._states[name] = _State([list(each) for each in blocks], tokens, computed)
                continue
            if blocks is not None:
                for table, more in zip(state.blocks, blocks, strict=True):
                    table.extend(more)
            # The second runner keeps count by itself, and neither number of its ever falls.
            if not self.shape.is_second_runner:
                rejected = sum(state.rejected.values())
                state.computed = cached.num_computed_tokens[index] - rejected
                prompt_tokens = self.requests[name].num_prompt_tokens
                del state.tokens[prompt_tokens + cached.num_output_tokens[index] :]

    def _forward(self, output: Any, name: str) -> list[int]:  # noqa: ANN401 - vLLM's
        state = self._states[name]
        count = output.num_scheduled_tokens[name]
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        known = len(state.tokens)
        start = state.computed
        inputs = state.tokens[start : start + count - len(drafts)]
        guesses = self._drafts.get(name, []) if -1 in drafts else list(drafts)
        inputs += (guesses + [0] * len(drafts))[: len(drafts)]
        # A scheduler that is out of step asks for tokens that there are none of.
        inputs += [0] * (count - len(inputs))
        kv = [
            [self._slot(state, group, position) for position in range(start)]
            for group in range(len(self.shape.groups))
        ]
        sampled: list[int] = []
        is_good = True
        for offset, token in enumerate(inputs):
            for group, slots in enumerate(kv):
                slots.append(kv_of(self.shape.groups[group], slots, token, self.weights))
                is_last = offset + 1 == len(inputs)
                if is_last or not is_state(self.shape.groups[group]):
                    self._set_slot(state, group, start + offset, slots[-1])
            position = start + offset
            if position + 1 < known or not is_good:
                continue
            sampled.append(next_of(self.shape.groups, kv))
            is_last = offset + 1 == len(inputs)
            is_good = not is_last and inputs[offset + 1] == sampled[-1]
        if not sampled:
            state.computed = start + count
            return []
        state.tokens += sampled
        rejected = len(drafts) - (len(sampled) - 1)
        state.computed = start + count - rejected
        if rejected and self.shape.depth > 1:
            state.rejected[self._step] = rejected
        self._drafts[name] = [
            self._expected_at(name, len(state.tokens) + ahead)
            if self.rng.random() < 0.6
            else self.rng.randrange(VOCABULARY)
            for ahead in range(self.shape.drafts)
        ]
        return sampled

    def _leave_unfinished(self, output: Any, name: str) -> list[int]:  # noqa: ANN401 - vLLM's
        """A step stops here: some of what it was to write is written, all of it is of no use."""
        state = self._states[name]
        count = output.num_scheduled_tokens[name]
        for group in range(len(self.shape.groups)):
            for position in range(state.computed, state.computed + count):
                self._set_slot(state, group, position, -4)
        return []

    def _at(self, group: int, position: int) -> tuple[int, int]:
        """Index of the block of a position, and of the slot in it."""
        kind = self.shape.groups[group]
        index, slot = divmod(position, block_tokens(kind))
        return index, 0 if is_state(kind) else slot

    def _slot(self, state: _State, group: int, position: int) -> int:
        """What is in a slot; of one that no token from here on reads, anything."""
        index, slot = self._at(group, position)
        # Beyond its blocks a request that is out of step reads and writes anything.
        blocks = state.blocks[group]
        return self._cache[blocks[index]][slot] if index < len(blocks) else -3

    def _set_slot(self, state: _State, group: int, position: int, value: int) -> None:
        index, slot = self._at(group, position)
        blocks = state.blocks[group]
        if index < len(blocks):
            assert blocks[index] != NULL_BLOCK, "what is computed has no block"
            assert blocks[index] not in self._late, "what comes layer by layer is written to"
            self._cache[blocks[index]][slot] = value

    # --- The store ------------------------------------------------------------------------

    def _page_out(self, plan: PagingPlan) -> None:
        for place in plan.drops:
            self._places.pop(place, None)
        for place, block in zip(plan.out_places, plan.out_blocks, strict=True):
            assert place < min(self.shape.store_blocks), "a place that a worker does not have"
            assert block != NULL_BLOCK, "what was freed is paged out"
            self._places[place] = list(self._cache[block])
            self.paged_out_blocks += 1
        for number, (places, blocks) in plan.async_saves.items():
            for place in places:
                assert place < min(self.shape.store_blocks), "a place that a worker does not have"
                self._places.pop(place, None)
            self._saving[number] = (places, blocks)

    def _save(self, lost: set[int]) -> Counter[int]:
        """Some of the saves under way end, at a worker after the other."""
        for number in [number for number in self._saving if self.rng.random() < self.shape.speed]:
            self._unacknowledged.setdefault(number, len(self.shape.store_blocks))
        acknowledged: Counter[int] = Counter()
        for number, left in list(self._unacknowledged.items()):
            acknowledged[number] = self.rng.randrange(left + 1)
            self._unacknowledged[number] -= acknowledged[number]
            if self._unacknowledged[number]:
                continue
            del self._unacknowledged[number]
            # What the last worker reads is what counts here: before that, nothing may change.
            for place, block in zip(*self._saving.pop(number), strict=True):
                assert block != NULL_BLOCK, "what was freed is paged out"
                self.saved_blocks += 1
                self._places[place] = list(self._cache[block])
                if self.rng.random() < self.shape.loss:
                    del self._places[place]
                    lost.add(place)
        return +acknowledged

    def lose_all(self) -> None:
        """What is in the store is gone, as when a producer dies."""
        self._places.clear()

    def _load(
        self, places: list[int], blocks: list[int], invalid: set[int], lost: set[int]
    ) -> None:
        assert NULL_BLOCK not in blocks, "what was freed is loaded"
        for place, block in zip(places, blocks, strict=True):
            if self.rng.random() < self.shape.loss:
                self._places.pop(place, None)
            if place in self._places:
                found = self._places[place]
                self._cache[block] = [0] * len(found) if self.zeroes_loads else list(found)
                self.loaded_blocks += 1
            else:
                self._cache[block] = [-2] * self._most_tokens
                invalid.add(block)
                lost.add(place)
                self.lost_blocks += 1

    def _report(self, lost: set[int], aborted: int, order: SafepointOrder | None) -> Any:  # noqa: ANN401 - of a class that needs vLLM
        from aqua_schedulers.cfs import PagingTier
        from aqualib.engines.vllm.connector import AquaWorkerReport

        saved = self._save(lost)
        self.aborted_steps += aborted > 0
        has_page = None if order is None or order.step else True
        if self._is_told and not (lost or saved or aborted or has_page):
            return None
        reports = [
            AquaWorkerReport(
                location=PagingTier.HOST,
                has_page=has_page,
                link_bytes_per_s=self.shape.link_bytes_per_s,
                store=None if self._is_told else WorkerStore(capacity_blocks=blocks, block_bytes=1),
            )
            for blocks in self.shape.store_blocks
        ]
        self._is_told = True
        reports[0].lost_places, reports[-1].saved = lost, saved
        reports[0].aborted.update([aborted] if aborted else [])
        report: WorkerReport = reports.pop()
        for other in reports:
            report = report.aggregate(other)
        return AquaWorkerReport(*(getattr(report, each.name) for each in fields(report)))


def _plan_of(metadata: Any) -> tuple[PagingPlan, Any]:  # noqa: ANN401 - vLLM's
    """Our plan in a step's metadata, and how a report of ours goes back."""
    if isinstance(metadata, PagingPlan):
        return metadata, lambda report: report
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiKVConnectorWorkerMetadata,
    )

    plans = metadata.metadata
    (at,) = [index for index, each in enumerate(plans) if isinstance(each, PagingPlan)]

    def wrap(report: Any) -> Any:  # noqa: ANN401 - as above
        if report is None:
            return None
        return MultiKVConnectorWorkerMetadata(
            tuple(report if index == at else None for index in range(len(plans)))
        )

    return plans[at], wrap
