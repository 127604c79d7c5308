"""Turns a batch file into a prepared pool: tokenise, collect lengths, order.

Where lengths come from, best first: the request fixes them (`known_length`); an earlier output
file names the same custom_id, or enough others to serve as the sample, by prefix or by kind
(`kinds`); the limit of the request.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from aqua_batch.bodies import Problem, known_length, output_limit, run_problem, sampling
from aqua_batch.kinds import Kinds, KindTable
from aqua_batch.outputs import output_tokens
from aqua_batch.records import BatchFile, Entry, Rejection, RejectionCode
from aqua_batch.target import PlanTarget
from aqua_batch.tokens import Tokenizer, prompt_tokens
from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve import UNKNOWN, PrefixTree, PreparedPool, RequestPool, prepare

NO_LIMIT = 2**31 - 1
"""Fixed: the largest 32-bit integer stands for no limit."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """Rows as token ids: one prompt and one answer each.

    Attributes:
        tokens: All prompts, one after another.
        offsets: Where each prompt starts, and the end of the last.
        known: Output lengths that requests fix, UNKNOWN elsewhere.
        limit: Most output tokens of each row.
        kinds: What rows are alike in.
    """

    tokens: Int32[np.ndarray, " tokens"]
    offsets: Int64[np.ndarray, " rows+1"]
    known: Int32[np.ndarray, " rows"]
    limit: Int32[np.ndarray, " rows"]
    kinds: Kinds = ()

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.known)

    def prompt(self, row: int) -> list[int]:
        """Token ids of one row."""
        prompt: list[int] = self.tokens[self.offsets[row] : self.offsets[row + 1]].tolist()
        return prompt

    def keep(self, rows: Int64[np.ndarray, " kept"]) -> Prompts:
        """Only these rows, in this order."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.empty(int(offsets[-1]), np.int32)
        for place, row in enumerate(rows.tolist()):
            start, end = self.offsets[row], self.offsets[row + 1]
            tokens[offsets[place] : offsets[place + 1]] = self.tokens[start:end]
        kinds = tuple(kind[rows] for kind in self.kinds)
        return Prompts(tokens, offsets, self.known[rows], self.limit[rows], kinds)

    def pool(self, sampled: Int32[np.ndarray, " rows"] | None = None) -> RequestPool:
        """The pool, with lengths that were observed, if any."""
        tree = PrefixTree.from_tokens(self.tokens, self.offsets)
        if sampled is None:
            sampled = np.full(self.count, UNKNOWN, np.int32)
        return RequestPool(tree, self.known, sampled, self.limit, self.kinds)


@dataclass(frozen=True, eq=False)
class TokenizedBatch:
    """Requests as token ids.

    Attributes:
        entries: Requests that can run, in order of the file.
        prompts: Their rows: as many as each wants answers, one entry's after another's.
        owner: Entry of each row, as an index.
        sampling: Sampling fields of each entry, equal ones shared; empty of a batch not to be run.
        rejections: All lines that cannot run, those of the file included.
    """

    entries: list[Entry]
    prompts: Prompts
    owner: Int32[np.ndarray, " rows"]
    sampling: list[Mapping[str, Any]]
    rejections: list[Rejection]

    def first_rows(self) -> Int64[np.ndarray, " entries"]:
        """First row of each entry."""
        return np.searchsorted(self.owner, np.arange(len(self.entries))).astype(np.int64)

    def lengths(self, total_tokens: Mapping[str, int]) -> Int32[np.ndarray, " rows"]:
        """Observed output lengths by row, UNKNOWN elsewhere.

        Args:
            total_tokens: What requests generated in all their answers together, by custom_id.
        """
        by_entry = np.full(len(self.entries), UNKNOWN, np.int32)
        for index, entry in enumerate(self.entries):
            total = total_tokens.get(entry.custom_id, 0)
            if total > 0:
                by_entry[index] = max(1, round(total / entry.part_count))
        return np.asarray(by_entry[self.owner])


def tokenize(
    batch: BatchFile,
    tokenizer: Tokenizer,
    *,
    longest_tokens: int | None,
    capacity_tokens: int = NO_LIMIT,
    to_run: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
) -> TokenizedBatch:
    """Tokenise a batch, and reject what the model or its memory cannot hold.

    Args:
        longest_tokens: Tokens of prompt and output that fit in the model; None for no limit.
        capacity_tokens: KV tokens that fit in memory.
        to_run: Reject what the engine cannot do, too, and keep the sampling fields.
        on_progress: Called with the number of requests done.
    """
    entries: list[Entry] = []
    rejections = list(batch.rejections)
    flat = array("i")
    ends, known, limits, owner = [0], [], [], []
    samplings: list[Mapping[str, Any]] = []
    shared: dict[str, Mapping[str, Any]] = {}
    kinds = KindTable()
    longest = min(longest_tokens or NO_LIMIT, capacity_tokens)
    holder = "memory" if longest == capacity_tokens else "model"
    for done, (entry, body) in enumerate(
        zip(batch.entries, batch.bodies(batch.entries), strict=True), start=1
    ):
        on_progress(done)
        found = _prompts_of(entry, body, tokenizer, to_run=to_run)
        if isinstance(found, list):
            size = max(map(len, found))
            if size < longest:
                fixed, limit = known_length(entry.url, body), output_limit(entry.url, body)
                for prompt in found:
                    room = longest - len(prompt)
                    for _ in range(entry.answer_count):
                        flat.extend(prompt)
                        ends.append(len(flat))
                        owner.append(len(entries))
                        kinds.add(body, len(prompt))
                        known.append(UNKNOWN if fixed is None else min(fixed, room))
                        limits.append(room if limit is None else min(limit, room))
                entries.append(entry)
                if to_run:
                    fields = sampling(body)
                    samplings.append(shared.setdefault(json.dumps(fields), fields))
                continue
            message = f"the prompt has {size} tokens, the {holder} holds {longest}"
            found = Rejection(entry.line, RejectionCode.CONTEXT_LENGTH, message, entry.custom_id)
        rejections.append(found)
    rejections.sort(key=lambda rejection: rejection.line)
    return TokenizedBatch(
        entries,
        Prompts(
            np.asarray(flat, dtype=np.int32),
            np.array(ends, dtype=np.int64),
            np.array(known, dtype=np.int32),
            np.array(limits, dtype=np.int32),
            kinds.kinds(),
        ),
        np.array(owner, dtype=np.int32),
        samplings,
        rejections,
    )


def _prompts_of(
    entry: Entry, body: dict[str, Any], tokenizer: Tokenizer, *, to_run: bool
) -> list[list[int]] | Rejection:
    """Token ids of each prompt of a request, or what is wrong with it."""
    problem = run_problem(entry.url, body) if to_run else None
    if problem is None:
        try:
            prompts = prompt_tokens(tokenizer, entry.url, body)
        except ValueError as error:
            problem = Problem(str(error), "body")
        else:
            if all(prompts):
                return prompts
            problem = Problem("the prompt has no tokens", "body")
    code = RejectionCode.INVALID_REQUEST
    return Rejection(entry.line, code, problem.message, entry.custom_id, problem.param)


def read_lengths(path: Path) -> dict[str, int]:
    """Output lengths by custom_id from an earlier output file.

    Lines of other formats are passed over: this is a hint, and any part of it helps.

    Raises:
        ConfigError: The file cannot be read.
    """
    lengths: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for raw in file:
                try:
                    record = json.loads(raw)
                    lengths[record["custom_id"]] = output_tokens(record)
                except (ValueError, KeyError, TypeError):
                    continue
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", remedy="Check the path.") from error
    return lengths


def plan(tokenized: TokenizedBatch, target: PlanTarget, lengths: Mapping[str, int]) -> PreparedPool:
    """Order the batch for the target."""
    return prepare(tokenized.prompts.pool(tokenized.lengths(lengths)), target.cost)
