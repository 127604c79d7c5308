"""From a batch file to a prepared pool: tokenise, collect lengths, order.

Where lengths come from, best first: the request fixes them (`known_length`); an earlier output
file names the same custom_id, or enough others to serve as the sample; the limit of the request.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aqua_batch.hardware import Target
from aqua_batch.records import (
    BatchFile,
    Entry,
    Rejection,
    RejectionCode,
    known_length,
    output_limit,
)
from aqua_batch.tokens import Tokenizer, prompt_tokens
from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve import (
    UNKNOWN,
    PrefixTree,
    PreparedPool,
    RequestPool,
    prepare,
)

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, eq=False)
class TokenizedBatch:
    """Requests as token ids.

    Attributes:
        entries: Requests that can run, in order of the file; index i below is entry i.
        tokens: All prompts, one after another.
        offsets: Where each prompt starts, and the end of the last.
        known: Output lengths that requests fix, UNKNOWN elsewhere.
        limit: Most output tokens of each request.
        rejections: All lines that cannot run, those of the file included.
    """

    entries: list[Entry]
    tokens: Int32s
    offsets: Int64s
    known: Int32s
    limit: Int32s
    rejections: list[Rejection]

    def prompt(self, index: int) -> list[int]:
        """Token ids of one request."""
        prompt: list[int] = self.tokens[self.offsets[index] : self.offsets[index + 1]].tolist()
        return prompt

    def keep(self, indices: Int64s) -> TokenizedBatch:
        """Only these requests, in this order."""
        lengths = np.diff(self.offsets)[indices]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.empty(int(offsets[-1]), np.int32)
        for place, index in enumerate(indices.tolist()):
            start, end = self.offsets[index], self.offsets[index + 1]
            tokens[offsets[place] : offsets[place + 1]] = self.tokens[start:end]
        return replace(
            self,
            entries=[self.entries[index] for index in indices.tolist()],
            tokens=tokens,
            offsets=offsets,
            known=self.known[indices],
            limit=self.limit[indices],
        )

    def pool(self, lengths: Mapping[str, int]) -> RequestPool:
        """The pool, with lengths that are known from elsewhere, by custom_id."""
        sampled = np.array(
            [lengths.get(entry.custom_id, UNKNOWN) for entry in self.entries], dtype=np.int32
        )
        tree = PrefixTree.from_tokens(self.tokens, self.offsets)
        return RequestPool(tree, self.known, sampled, self.limit)


def tokenize(
    batch: BatchFile,
    tokenizer: Tokenizer,
    *,
    longest_tokens: int | None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> TokenizedBatch:
    """Tokenise a batch, and reject what the model cannot hold.

    Args:
        longest_tokens: Tokens of prompt and output that fit in the model; None for no limit.
        on_progress: Called with the number of requests done.

    Raises:
        ConfigError: No request is left.
    """
    entries: list[Entry] = []
    rejections = list(batch.rejections)
    flat = array("i")
    ends, known, limits = [0], [], []
    for done, (entry, body) in enumerate(
        zip(batch.entries, batch.bodies(batch.entries), strict=True), start=1
    ):
        on_progress(done)
        try:
            tokens = prompt_tokens(tokenizer, entry.url, body)
        except ValueError as error:
            rejections.append(
                Rejection(entry.line, RejectionCode.INVALID_REQUEST, str(error), entry.custom_id)
            )
            continue
        limit = output_limit(body)
        if longest_tokens is not None and len(tokens) >= longest_tokens:
            message = f"the prompt has {len(tokens)} tokens, the model holds {longest_tokens}"
            rejections.append(
                Rejection(entry.line, RejectionCode.CONTEXT_LENGTH, message, entry.custom_id)
            )
            continue
        if not tokens:
            message = "the prompt has no tokens"
            rejections.append(
                Rejection(entry.line, RejectionCode.INVALID_REQUEST, message, entry.custom_id)
            )
            continue
        room = NO_LIMIT if longest_tokens is None else longest_tokens - len(tokens)
        flat.extend(tokens)
        ends.append(len(flat))
        entries.append(entry)
        fixed = known_length(body)
        known.append(UNKNOWN if fixed is None else min(fixed, room))
        limits.append(room if limit is None else min(limit, room))
    if not entries:
        first = min(rejections, key=lambda rejection: rejection.line)
        raise ConfigError(
            f"{batch.path}: none of {len(rejections)} lines can be run; "
            f"line {first.line}: {first.message}",
            remedy="Mend the lines; the errors file names each.",
        )
    rejections.sort(key=lambda rejection: rejection.line)
    return TokenizedBatch(
        entries,
        np.frombuffer(flat, dtype=np.int32),
        np.array(ends, dtype=np.int64),
        np.array(known, dtype=np.int32),
        np.array(limits, dtype=np.int32),
        rejections,
    )


def read_lengths(path: Path) -> dict[str, int]:
    """Output lengths by custom_id from an earlier output file.

    Lines without `usage.completion_tokens` (errors, other formats) are passed over: this is a
    hint, and any part of it helps.

    Raises:
        ConfigError: The file cannot be read.
    """
    lengths: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for raw in file:
                try:
                    record = json.loads(raw)
                    tokens = record["response"]["body"]["usage"]["completion_tokens"]
                    if isinstance(tokens, int) and tokens > 0:
                        lengths[record["custom_id"]] = tokens
                except (ValueError, KeyError, TypeError):
                    continue
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", remedy="Check the path.") from error
    return lengths


def plan(tokenized: TokenizedBatch, target: Target, lengths: Mapping[str, int]) -> PreparedPool:
    """Order the batch for the target."""
    return prepare(tokenized.pool(lengths), target.cost)
