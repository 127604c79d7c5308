"""Paged KV memory of one engine: blocks, what free blocks still remember, and the store beyond.

Owns counts, not places. A block belongs to one running request, or to a prefix chunk that several
may use, or it is free. Free blocks queue up for reuse, least recently freed first, and remember
their contents until then: a chunk that is asked for again, or a preempted request that comes back,
takes its blocks out of the queue and need not compute them. Within a request the last blocks are
reused first, because a prefix without its tail is useful and a tail without its prefix is not.

What does not fit is the engine's decision (preempt whom), not the memory's.

Where a preempted request's context goes is a `PageStore`, host memory or a peer's HBM, where an
engine has Aqua; vLLM drops the context and computes it again.

Source: vLLM V1, `BlockPool` and its free queue; there block by block, here run by run. Aqua
sections 3 and 7.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from aqua_protocol.errors import ConfigError
from aqua_schedulers.cfs import PagingTier
from aqua_simulator.serving.request import Job

RunKey = tuple[str, int | str]
"""What a run of free blocks remembers: a chunk, a preempted job, or nothing of use."""


@dataclass(slots=True)
class PagedMemory:
    """Blocks of `block_tokens` tokens each.

    Attributes:
        free_count: Blocks without a user, remembered contents or not.
        hit_tokens, asked_tokens: Prompt tokens found cached, and prompt tokens looked up, both at
            the first admission of a request.
    """

    block_count: int
    block_tokens: int = 16
    free_count: int = field(init=False)
    hit_tokens: int = field(default=0, init=False)
    asked_tokens: int = field(default=0, init=False)
    _free: OrderedDict[RunKey, int] = field(default_factory=OrderedDict, init=False, repr=False)
    _chunk_users: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _run_count: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.block_count < 1 or self.block_tokens < 1:
            raise ConfigError("memory needs at least one block of at least one token")
        self.free_count = 0
        self._give(self.block_count)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def fits(self, job: Job) -> bool:
        """Whether all known tokens of a job outside would find room; changes nothing.

        What is cached of it is free memory that it would occupy again, so it does not help here.
        """
        shared = sum(
            self.blocks_for(job.arrival.prefix_chunk_tokens)
            for identity in self._leading_chunks(job)
            if self._chunk_users[identity] > 0
        )
        return self.blocks_for(job.known_tokens) - shared <= self.free_count

    def hold_cached(self, job: Job) -> None:
        """Give the job what is left of its prompt and context; it counts as computed.

        Never everything: the last token must be computed to sample the next one.
        """
        for identity in self._leading_chunks(job):
            if self._chunk_users[identity] == 0:
                self.free_count -= self._free.pop(("chunk", identity))
            self._chunk_users[identity] += 1
            job.shared_chunks += 1
        job.computed_tokens = job.shared_chunks * job.arrival.prefix_chunk_tokens
        if job.preemption_count == 0:
            self.hit_tokens += job.computed_tokens
            self.asked_tokens += job.arrival.prompt_tokens
        # Of no use behind chunks that other requests have published since.
        left = self._free.pop(("job", job.arrival.request_id), 0)
        self.free_count -= left
        if job.shared_chunks == job.retired_chunks:
            useful = (job.known_tokens - 1 - job.computed_tokens) // self.block_tokens
            job.block_count = min(left, useful)
            job.computed_tokens += job.block_count * self.block_tokens
        self._give(left - job.block_count)

    def _leading_chunks(self, job: Job) -> list[int]:
        """Leading prefix chunks of the job that are in memory, short of its last token."""
        size = job.arrival.prefix_chunk_tokens
        found: list[int] = []
        for identity in job.arrival.prefix:
            if identity not in self._chunk_users or (len(found) + 1) * size >= job.known_tokens:
                break
            found.append(identity)
        return found

    def grow(self, job: Job, tokens: int) -> bool:
        """Make the job hold blocks for `tokens` in all; False, and no change, if it cannot."""
        private = tokens - job.shared_chunks * job.arrival.prefix_chunk_tokens
        need = self.blocks_for(private) - job.block_count
        if need <= 0:
            return True
        if need > self.free_count:
            return False
        self._take(need)
        job.block_count += need
        return True

    def publish_prefix(self, job: Job) -> None:
        """Turn the job's computed private blocks into shared chunks where its prompt has them."""
        size = job.arrival.prefix_chunk_tokens
        while job.shared_chunks < len(job.arrival.prefix):
            end = (job.shared_chunks + 1) * size
            identity = job.arrival.prefix[job.shared_chunks]
            if end > min(job.computed_tokens, job.arrival.prompt_tokens):
                return
            if identity in self._chunk_users or size % self.block_tokens:
                # Computed by another job meanwhile (keep the private copy), or not whole blocks.
                return
            self._chunk_users[identity] = 1
            job.block_count -= size // self.block_tokens
            job.shared_chunks += 1

    def release(self, job: Job, *, remember: bool = False) -> None:
        """Take everything from the job; free blocks remember its chunks and, if asked, its rest."""
        if remember:
            whole = job.computed_tokens // self.block_tokens
            whole -= job.shared_chunks * job.arrival.prefix_chunk_tokens // self.block_tokens
            whole = max(0, min(whole, job.block_count))
            self._give(job.block_count - whole)
            self._give(whole, ("job", job.arrival.request_id))
        else:
            self._give(job.block_count)
        job.retired_chunks = job.shared_chunks
        # Last chunk first, so that the queue never reuses a parent before its child.
        for identity in reversed(job.arrival.prefix[: job.shared_chunks]):
            self._chunk_users[identity] -= 1
            if self._chunk_users[identity] == 0:
                blocks = self.blocks_for(job.arrival.prefix_chunk_tokens)
                self._give(blocks, ("chunk", identity))
        job.block_count = 0
        job.shared_chunks = 0
        job.computed_tokens = 0

    def lend(self, blocks: int) -> bool:
        """Give free blocks away; False, and no change, if there are not so many."""
        if blocks > self.free_count:
            return False
        self._take(blocks)
        self.block_count -= blocks
        return True

    def take_back(self, blocks: int) -> None:
        """Have lent blocks again; they remember nothing."""
        self.block_count += blocks
        self._give(blocks)

    def _give(self, blocks: int, key: RunKey | None = None) -> None:
        """Append a run to the queue of free blocks."""
        if blocks == 0:
            return
        self._run_count += 1
        self._free[key or ("nothing", self._run_count)] = blocks
        self.free_count += blocks

    def _take(self, need: int) -> None:
        """Reuse the least recently freed blocks; what they remembered is gone."""
        assert need <= self.free_count, (need, self.free_count)
        self.free_count -= need
        while need:
            key, blocks = next(iter(self._free.items()))
            taken = min(need, blocks)
            need -= taken
            if key[0] == "chunk":
                del self._chunk_users[int(key[1])]
                del self._free[key]
                if blocks > taken:
                    self._free["nothing", -self._run_count] = blocks - taken
                    self._free.move_to_end(("nothing", -self._run_count), last=False)
                    self._run_count += 1
            elif blocks == taken:
                del self._free[key]
            else:
                self._free[key] = blocks - taken


@dataclass(slots=True)
class PageStore:
    """A bounded store behind a link, which works beside the GPU.

    Attributes:
        capacity_tokens: Tokens of KV cache that fit.
        link_bytes_per_s: Rate of the link, the same both ways.
        location: As the policy is told.
        is_overlapped: Whether a step lasts as long as the longer of copies and computation; else
            the copies come on top.
        lost_s_per_byte: By how much a step is longer for each byte copied beside it.
        peak_tokens: The most it has held.
    """

    name: str
    capacity_tokens: int
    link_bytes_per_s: float
    is_overlapped: bool = True
    location: PagingTier = PagingTier.PEER
    used_tokens: int = 0
    paged_out_tokens: int = 0
    paged_in_tokens: int = 0
    peak_tokens: int = 0
    lost_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.link_bytes_per_s <= 0:
            raise ConfigError(f"{self.name}: the link rate must be positive")

    def put(self, tokens: int) -> bool:
        """Take a context in; False, and no change, if it does not fit."""
        if self.used_tokens + tokens > self.capacity_tokens:
            return False
        self.used_tokens += tokens
        self.peak_tokens = max(self.peak_tokens, self.used_tokens)
        self.paged_out_tokens += tokens
        return True

    def take(self, tokens: int, *, keep: bool = False) -> None:
        """Give a context back; one to keep is a cached prefix, which takes no room of the store."""
        if not keep:
            assert tokens <= self.used_tokens, (tokens, self.used_tokens)
            self.used_tokens -= tokens
        self.paged_in_tokens += tokens
