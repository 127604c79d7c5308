"""A server that works in steps, as engines with continuous batching do, on a virtual clock.

Every step yields one token for each running request and reads a piece of the prompts of new ones;
it takes longer the more there is in it. So tokens slow down with the load, prompts of some slow
down tokens of others, and where the cache is full requests wait or lose their place. Nothing in it
is a queueing formula.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Final

from harness.queueing import Watcher

LEAST_STEP_S: Final = 1e-5


@dataclass(frozen=True)
class StepServer:
    """What a step costs, and how much fits into it.

    Attributes:
        base_s: Any step.
        decode_s: More for each running request.
        prompt_token_s: More for each token of a prompt.
        context_token_s: More for each token of context.
        noise: Standard deviation of the logarithm of a step's time.
        most_running: Requests at once.
        step_tokens: Tokens in one step: longer prompts are read in pieces.
        kv_tokens: That the cache holds; when it is full the last one admitted starts over.
    """

    base_s: float
    decode_s: float = 0.0
    prompt_token_s: float = 0.0
    context_token_s: float = 0.0
    noise: float = 0.0
    most_running: int = 256
    step_tokens: int = 2048
    kv_tokens: int = 10**9

    def start(self, seed: int) -> SteppingServer:
        """Empty, at time zero."""
        return SteppingServer(self, seed)


@dataclass(slots=True)
class _Sequence:
    number: int
    prompt: int
    left: int
    unread: int
    held: int = 0
    yields: bool = False


class SteppingServer:
    """A `StepServer` at work."""

    def __init__(self, server: StepServer, seed: int) -> None:
        self._server = server
        self._generator = random.Random(f"steps {seed}")
        self._queue: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._held = 0
        self._ends_s: float | None = None
        self.watch: Watcher | None = None

    @property
    def next_s(self) -> float | None:
        """When the step under way ends."""
        return self._ends_s

    def run_until(self, when_s: float) -> None:
        """Finish all steps that end until then."""
        while self._ends_s is not None and self._ends_s <= when_s:
            now_s = self._ends_s
            self._yield(now_s)
            self._begin(now_s)

    def submit(self, number: int, prompt: int, output: int, now_s: float) -> None:
        """A request arrives; it is looked at when the step under way has ended."""
        self._queue.append(_Sequence(number, prompt, output, prompt))
        if self._ends_s is None:
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        server, decoding, read = self._server, 0, 0
        for sequence in list(self._running):
            if sequence.unread or sequence not in self._running:
                continue
            while self._held + 1 > server.kv_tokens and self._running[-1] is not sequence:
                self._put_back(self._running.pop())
            decoding += 1
            self._hold(sequence, 1)
            sequence.yields = True
        budget = server.step_tokens - decoding
        while (
            self._queue
            and len(self._running) < server.most_running
            and sum(s.unread for s in self._running) < budget
            and (
                self._held + sum(s.unread for s in self._running) + self._queue[0].unread
                <= server.kv_tokens
                or not self._running
            )
        ):
            self._running.append(self._queue.popleft())
        for sequence in self._running:
            piece = min(sequence.unread, budget - read)
            if piece > 0:
                read += piece
                sequence.unread -= piece
                self._hold(sequence, piece)
                sequence.yields = not sequence.unread
        if not self._running:
            self._ends_s = None
            return
        step_s = (
            server.base_s
            + server.decode_s * decoding
            + server.prompt_token_s * read
            + server.context_token_s * self._held
        )
        if server.noise:
            step_s *= self._generator.lognormvariate(-0.5 * server.noise**2, server.noise)
        self._ends_s = now_s + max(step_s, LEAST_STEP_S)

    def _yield(self, now_s: float) -> None:
        for sequence in [sequence for sequence in self._running if sequence.yields]:
            sequence.yields = False
            sequence.left -= 1
            if self.watch is not None:
                self.watch.token(sequence.number, now_s)
            if not sequence.left:
                self._running.remove(sequence)
                self._hold(sequence, -sequence.held)
                if self.watch is not None:
                    self.watch.finish(sequence.number, now_s)

    def _put_back(self, sequence: _Sequence) -> None:
        sequence.unread = sequence.held
        sequence.yields = False
        self._hold(sequence, -sequence.held)
        self._queue.appendleft(sequence)

    def _hold(self, sequence: _Sequence, change: int) -> None:
        sequence.held += change
        self._held += change
