"""The order in which a batch's requests are given to engines: BlendServe's, in bounded memory.

`python -m aqua_batch.service.order.input_order` is a program of its own, which a service starts for
each batch worth ordering: it reads an `OrderTask` from stdin and writes the numbers of the input's
lines to stdout, as 32-bit integers. What it computes with and loads (numba, a tokenizer) is gone
with it, and it gives way to the service, whose event loop has answers to record.

Prompts are not kept but their *blocks*: a number for each 16 tokens, as engines' prefix caches hash
them. So 200 MB of input are a tree of 3 million blocks at most, and prefixes are found as far as an
engine can share them. All sizes that follow are in blocks, and the coefficients of cost are scaled
to them: a step of the forecast stands for 16 steps of an engine, so what a step computes has the
same number in blocks as in tokens. Without a tokenizer a block is 64 bytes of text, four bytes to a
token.

How long answers will be is learned from the first lines of earlier batches of the same tenant,
which are in the tree beside the input: by prefix, by task and by length of the prompt (`kinds`).

What no order can be found for (a line or body that is wrong) is left out; it keeps its place.

Source: BlendServe sections 3 and 4, "Offline prefix tree".
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Final

import numpy as np
from jaxtyping import Int32, Int64
from pydantic import ValidationError
from pydantic_core import from_json

from aqua_batch.bodies import (
    CHAT_URL,
    ChatBody,
    CompletionBody,
    known_length,
    output_limit,
    prompt_parts,
)
from aqua_batch.forecast import forecast
from aqua_batch.kinds import KindTable
from aqua_batch.outputs import output_tokens
from aqua_batch.policies import policy_for
from aqua_batch.records import UTF8_MARK, numbered_lines
from aqua_batch.service.files.objects import MissingObjectError, ObjectStore
from aqua_batch.service.order.order_task import OrderTask
from aqua_batch.target import describe
from aqua_batch.tokenization import NO_LIMIT
from aqua_batch.tokens import Tokenizer, load_tokenizer, plain_chat, prompt_tokens
from aqua_schedulers.blendserve import UNKNOWN, PrefixTree, RequestPool, ResourceCost, prepare
from aqua_schedulers.blendserve.lengths import DEFAULT_OUTPUT_TOKENS

BLOCK_TOKENS: Final = 16
"""Tokens of a block, vLLM's by default. Doubled, half the memory, and prefixes are found in steps
twice as long."""
BLOCK_BYTES: Final = 4 * BLOCK_TOKENS
"""Bytes of a block: tokens as 32-bit integers, or text of about as many tokens. Doubled, as
above."""
STEP_TOKENS: Final = 2048
"""Tokens of an engine's step, vLLM's `max_num_batched_tokens`, and so blocks of a step of the
forecast. Doubled, the forecast has fewer and longer steps; orders hardly differ."""
EARLIER_LINES: Final = 2000
"""Answers that are looked at of each earlier batch. Doubled, rarer kinds of requests are known, and
an order is found a second later for each such batch."""
NICENESS: Final = 5
"""Of the program. Doubled, a busy service leaves it a tenth of the time instead of a quarter."""
FACTORS: Final = np.random.default_rng(0).integers(0, 2**63, BLOCK_BYTES // 8, np.uint64) * 2 + 1
"""Odd, drawn once: a block's number is its sum of products with them. Two blocks of 31 bits that
differ and are equal only matter below the same prefix."""


def blocks_of(prompt: bytes) -> Int32[np.ndarray, " blocks"]:
    """The numbers of a prompt's blocks, at least one; the last may be filled up."""
    count = max(1, -(-len(prompt) // BLOCK_BYTES))
    words = np.frombuffer(prompt.ljust(count * BLOCK_BYTES, b"\0"), np.uint64)
    sums = (words.reshape(count, -1) * FACTORS).sum(axis=1, dtype=np.uint64)
    numbers: Int32[np.ndarray, " blocks"] = (sums >> np.uint64(33)).astype(np.int32)
    return numbers


def order_lines(task: OrderTask) -> Int32[np.ndarray, " ordered"]:
    """Line numbers of the input's good requests, in the order in which to run them.

    Raises:
        ConfigError: The tokenizer, GPU or model is not there.
        DataLostError: The input is not.
    """
    tokenizer = load_tokenizer(task.tokenizer)
    target = describe(task.gpu, task.model)
    lines = array("i")
    rows = _Rows(task.endpoint, tokenizer, target.capacity_tokens)
    for line, body in _bodies(task):
        if rows.add(body):
            lines.append(line)
    numbers = np.array(lines, np.int32)
    if not lines:
        return numbers
    new = np.arange(len(lines))
    for body, answer_tokens in _earlier(task):
        rows.add(body, answer_tokens)
    lengths = rows.pool().estimate().take(new)
    prepared = prepare(rows.pool(new), _cost_of_blocks(target.cost), lengths=lengths)
    # What fits into no such memory is the engine's to refuse.
    capacity = max(target.capacity_tokens // BLOCK_TOKENS, int(prepared.reserved_tokens.max()))
    policy = policy_for(
        task.policy,
        prepared,
        capacity_tokens=capacity,
        max_step_tokens=STEP_TOKENS,
    )
    admitted = forecast(prepared, policy, capacity_tokens=capacity).admitted
    return np.asarray(numbers[admitted])


class _Rows:
    """Requests as blocks, with what is known of their lengths; no answer is longer than memory."""

    def __init__(self, endpoint: str, tokenizer: Tokenizer, longest_tokens: int) -> None:
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._longest_tokens = longest_tokens
        self._flat, self._ends = array("i"), array("q", [0])
        self._known, self._sampled, self._limits = array("i"), array("i"), array("i")
        self._kinds = KindTable()

    def add(self, body: Mapping[str, Any], answer_tokens: int | None = None) -> bool:
        """Add a request, whose answer had so many tokens; False where it is none."""
        try:
            prompt = _prompt_of(self._endpoint, body, self._tokenizer)
        except ValueError:  # Pydantic's errors are; and what a chat template refuses.
            return False
        self._flat.frombytes(blocks_of(prompt).tobytes())
        self._ends.append(len(self._flat))
        fixed, limit = known_length(self._endpoint, body), output_limit(self._endpoint, body)
        for lengths, tokens, otherwise in (
            (self._known, fixed, UNKNOWN),
            (self._sampled, answer_tokens, UNKNOWN),
            (self._limits, limit, NO_LIMIT),
        ):
            lengths.append(
                otherwise if tokens is None else _blocks(min(tokens, self._longest_tokens))
            )
        self._kinds.add(body, len(prompt))
        return True

    def pool(self, rows: Int64[np.ndarray, " some"] | None = None) -> RequestPool:
        """All requests, or the first of them."""
        count = len(self._known) if rows is None else len(rows)
        ends = np.frombuffer(self._ends, np.int64)[: count + 1]
        tree = PrefixTree.from_tokens(np.frombuffer(self._flat, np.int32)[: ends[-1]], ends)
        known, sampled, limits = (
            np.array(each[:count], np.int32) for each in (self._known, self._sampled, self._limits)
        )
        if (sampled == UNKNOWN).all():  # Then limits are the estimate, too.
            limits = np.minimum(limits, _blocks(DEFAULT_OUTPUT_TOKENS))
        kinds = tuple(kind[:count] for kind in self._kinds.kinds())
        return RequestPool(tree, known, sampled, limits, kinds)


def _earlier(task: OrderTask) -> Iterator[tuple[dict[str, Any], int]]:
    """Requests of earlier batches, and the tokens of their answers."""
    store = ObjectStore(task.files)
    for input_key, output_key in task.earlier:
        lengths: dict[str, int] = {}
        try:
            with store.open(output_key) as file:
                for _, _, raw in islice(numbered_lines(file), EARLIER_LINES):
                    record = from_json(raw or b"null")
                    if (tokens := output_tokens(record)) > 0:
                        lengths[record["custom_id"]] = tokens
            with store.open(input_key) as file:
                for _, _, raw in numbered_lines(file):
                    if not lengths:
                        break
                    # A line that is wrong may have the id of one that is right.
                    with suppress(ValueError, KeyError, TypeError, AttributeError):
                        sent = from_json((raw or b"").removeprefix(UTF8_MARK))
                        body = sent["body"]
                        tokens = lengths.pop(sent["custom_id"]) // (body.get("n") or 1)
                        yield body, max(1, tokens)
        except MissingObjectError:  # Deleted meanwhile; what is left may do.
            continue


def _bodies(task: OrderTask) -> Iterator[tuple[int, dict[str, Any]]]:
    with ObjectStore(task.files).open(task.input_key) as file:
        for line, _, raw in numbered_lines(file):
            try:
                body = from_json((raw or b"").removeprefix(UTF8_MARK))["body"]
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(body, dict):
                yield line, body


def _prompt_of(endpoint: str, body: Mapping[str, Any], tokenizer: Tokenizer) -> bytes:
    """Token ids as bytes, or the text itself where there is no tokenizer."""
    kind = ChatBody if endpoint == CHAT_URL else CompletionBody
    try:
        kind.model_validate(body)
    except ValidationError as error:
        raise ValueError("not a body of this endpoint") from error
    if tokenizer.exact:
        ids = [each for prompt in prompt_tokens(tokenizer, endpoint, body) for each in prompt]
        return np.array(ids, np.int32).tobytes()
    if endpoint == CHAT_URL:
        return plain_chat(body["messages"], body.get("tools")).encode(errors="surrogatepass")
    return b"".join(
        part.encode(errors="surrogatepass")
        if isinstance(part, str)
        else np.array(part, np.int32).tobytes()
        for part in prompt_parts(body["prompt"])
    )


def _blocks(tokens: float) -> int:
    return max(1, round(tokens / BLOCK_TOKENS))


def _cost_of_blocks(cost: ResourceCost) -> ResourceCost:
    return ResourceCost(
        cost.linear_s_per_token * BLOCK_TOKENS,
        cost.prefill_s_per_square_token * BLOCK_TOKENS**2,
        cost.decode_s_per_kv_token * BLOCK_TOKENS**2,
        cost.linear_floor_s * BLOCK_TOKENS,
    )


def main() -> int:
    """Answer one task; a failure is told by its kind alone, since a message may quote a prompt."""
    os.nice(NICENESS)
    try:
        numbers = order_lines(OrderTask.model_validate_json(sys.stdin.buffer.read()))
    except Exception as error:  # noqa: BLE001 - told, and the batch keeps its order
        sys.stderr.write(type(error).__name__)
        return 1
    sys.stdout.buffer.write(numbers.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
