"""The generations that the demo compares: stock `model.generate`, seeded, and its fingerprint.

Tokens are sampled, so each one depends on all logits and on everything sampled before; and all
logits go into a digest as well, so a changed bit shows even where it would not have changed a
token. Nothing here knows which cache the model uses.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from transformers import Cache, LogitsProcessor

from aqua_demo.messages import ConsumerResult
from aqua_demo.models import ByteVocabulary, build_llama, load_prompt
from aqua_demo.scale import DemoScale

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedConfig


class Generation:
    """Requests about one long text, one after the other; may be watched and ended from outside.

    The text is read once. After each answer the cache is cropped back to it, and the next request
    starts from there with another seed, so a run may last as long as it takes.

    Args:
        seed: Of weights and sampling.
        ending: When set, the present token is the last.
    """

    def __init__(
        self, scale: DemoScale, device: torch.device, seed: int, *, ending: threading.Event
    ) -> None:
        self._device = device
        self._seed = seed
        self._prompt = load_prompt(scale.prompt_tokens)
        self._model: LlamaForCausalLM = build_llama(
            scale.llama, max_tokens=scale.max_tokens, seed=seed
        ).to(device)
        self._recorder = LogitsRecorder()
        self._ending = ending

    @property
    def config(self) -> PreTrainedConfig:
        """The model's configuration."""
        return self._model.config

    @property
    def tokens(self) -> int:
        """New tokens so far."""
        return self._recorder.count

    def run(self, cache: Cache, answer_lengths: Iterable[int]) -> ConsumerResult:
        """Answer requests with that many tokens each, until there are no more or it ends.

        Raises:
            AquaError: The cache could not give its bytes back.
        """
        answers: list[list[int]] = []
        started_s = time.monotonic()
        for number, length in enumerate(answer_lengths):
            if self._ending.is_set():
                break
            # All but the last token of the text, which is read again: something has to be.
            cache.crop(min(0, len(self._prompt) - 1 - cache.get_seq_length()))
            answers.append(self._answer(cache, number, length))
        return ConsumerResult(
            answers=answers,
            logits_sha256=self._recorder.digest.hexdigest(),
            prefill_s=self._recorder.first_s - started_s,
            decode_s=time.monotonic() - self._recorder.first_s,
        )

    def _answer(self, cache: Cache, number: int, length: int) -> list[int]:
        inputs = torch.tensor([self._prompt], device=self._device)
        torch.manual_seed(self._seed + 1 + number)  # Weights are drawn from the seed itself.
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=cache,
            max_new_tokens=length,
            do_sample=True,
            top_k=0,
            suppress_tokens=list(ByteVocabulary.special),
            logits_processor=[self._recorder],
            stopping_criteria=[self._is_ending],
        )
        answer: list[int] = output[0, len(self._prompt) :].tolist()
        return answer

    def _is_ending(self, input_ids: torch.Tensor, *_: object, **_kwargs: object) -> torch.Tensor:
        """Whether each sequence ends here: transformers' form of a stopping criterion."""
        return torch.full((len(input_ids),), self._ending.is_set(), device=input_ids.device)


class LogitsRecorder(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """Counts tokens and digests the logits of each, as the model gave them.

    Attributes:
        count: Tokens whose logits have been seen.
        first_s: When the first were seen, by CLOCK_MONOTONIC.
        digest: SHA-256 over all of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first_s = 0.0
        self.digest = hashlib.sha256()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take note; scores, shape (batch, vocabulary), are returned unchanged."""
        del input_ids
        self.digest.update(scores.cpu().numpy().tobytes())
        if not self.count:
            self.first_s = time.monotonic()
        self.count += 1
        return scores
