"""The consumer: a Llama that reads a long text within a budget its keys and values exceed.

Run by the demo as `python -m aqua_demo.programs.consumer <parent pid> <settings>`. With a
coordinator in its settings it borrows memory through `AquaCache`; without one it is the reference:
the same generation with a plain `DynamicCache`, all on its own device.

A generation is stock `model.generate`, and knows nothing of its cache. Tokens are sampled, so each
depends on all logits and on everything sampled before; and all logits go into a digest as well, so
a changed bit shows even where it would not have changed a token.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Final

import torch
from transformers import Cache, DynamicCache, LogitsProcessor

import aqualib
from aqua_demo.child import Parent, run_program
from aqua_demo.messages import (
    CONSUMER_ID,
    SAMPLE_INTERVAL_S,
    ConsumerResult,
    ConsumerSample,
    ConsumerSettings,
)
from aqua_demo.programs.llama import ByteVocabulary, build_llama, load_prompt
from aqua_demo.scale import DemoScale
from aqua_protocol import format_bytes
from aqua_protocol.supervision import SupervisedThread, resting
from aqualib.engines.transformers import AquaCache
from aqualib.ranges import Range
from aqualib.transports import select

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
        self.config: Final[PreTrainedConfig] = self._model.config
        self._recorder = LogitsRecorder()
        self._ending = ending

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
    """Counts tokens and digests the logits of each, as the model gave them."""

    def __init__(self) -> None:
        self.count = 0
        self.first_s = 0.0  # When the first were seen, by CLOCK_MONOTONIC.
        self.digest = hashlib.sha256()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take note; scores, shape (batch, vocabulary), are returned unchanged."""
        del input_ids
        self.digest.update(scores.cpu().numpy().tobytes())
        if not self.count:
            self.first_s = time.monotonic()
        self.count += 1
        return scores


def run(settings: ConsumerSettings, parent: Parent) -> None:
    """Generate until the end, or until told to finish, and report the result."""
    scale = settings.scale
    torch.set_num_threads(settings.threads)
    device = select(settings.transport, settings.device).device
    generation = Generation(scale, device, settings.seed, ending=parent.finished)
    if parent.finished.is_set():
        return
    if settings.coordinator_url is None:
        parent.tell(generate_reference(settings, parent, generation))
        return
    with (
        aqualib.connect(
            CONSUMER_ID,
            coordinator_url=settings.coordinator_url,
            token=settings.token,
            transport=settings.transport,
            device=settings.device,
            host_bytes=scale.offer_bytes,
            wanted_bytes=scale.offer_bytes,
            slab_bytes=scale.slab_bytes,
            checksum=settings.checksum,
            model="llama",
        ) as aqua,
        AquaCache(
            generation.config,
            max_tokens=scale.max_tokens,
            budget_bytes=scale.budget_bytes,
            aqua=aqua,
        ) as cache,
    ):
        wait_for_memory(scale.offer_bytes, parent, aqua)
        parent.tell(generate_on_borrowed(settings, parent, generation, cache, aqua))


def wait_for_memory(wanted_bytes: int, parent: Parent, aqua: aqualib.Aqua) -> None:
    """Wait until memory is lent, so that the first page goes there; the parent gives up, not we."""
    while aqua.stats().leased_bytes < wanted_bytes:
        if parent.finished.wait(SAMPLE_INTERVAL_S):
            return
    stats = aqua.stats()
    slowest = min(stats.links, key=lambda link: link.read_bytes_per_s)
    parent.news(
        f"borrows {format_bytes(stats.leased_bytes)} over {slowest.transport.value}, measured"
        f" at {slowest.write_bytes_per_s / 1e9:.1f} GB/s out and"
        f" {slowest.read_bytes_per_s / 1e9:.1f} GB/s in"
    )


def generate_reference(
    settings: ConsumerSettings, parent: Parent, generation: Generation
) -> ConsumerResult:
    """Generate without interruption, everything on the own device."""

    def watch() -> None:
        parent.tell(ConsumerSample(at_s=time.monotonic(), tokens=generation.tokens))

    with watching(watch):
        return generation.run(DynamicCache(config=generation.config), settings.answer_lengths or ())


def generate_on_borrowed(
    settings: ConsumerSettings,
    parent: Parent,
    generation: Generation,
    cache: AquaCache,
    aqua: aqualib.Aqua,
) -> ConsumerResult:
    """Generate on borrowed memory, and report how it goes."""
    links = aqua.stats().links
    corrupted = False

    def watch() -> None:
        nonlocal corrupted
        parent.tell(sample(generation, cache, aqua))
        if parent.wants.corrupt_one_byte and not corrupted:
            corrupted = True
            corrupt_one_byte(aqua)
            parent.news("one stored byte has been changed, as asked")

    with watching(watch):
        result = generation.run(cache, repeat(settings.scale.answer_tokens))
    parent.tell(sample(generation, cache, aqua))
    return result.model_copy(
        update={
            "peak_resident_bytes": cache.statistics.peak_resident_bytes,
            "budget_bytes": settings.scale.budget_bytes,
            "transport": aqua.transport.kind.value,
            "link_bytes_per_s": min((link.read_bytes_per_s for link in links), default=None),
        }
    )


@contextmanager
def watching(look: Callable[[], None]) -> Iterator[None]:
    """Look ten times a second, on a thread of its own, until the block ends."""
    done = threading.Event()

    def watch() -> None:
        while True:
            with resting():
                if done.wait(SAMPLE_INTERVAL_S):
                    return
            look()

    watcher = SupervisedThread(watch, "demo-watch")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def sample(generation: Generation, cache: AquaCache, aqua: aqualib.Aqua) -> ConsumerSample:
    """Sample the state of this moment."""
    stats, statistics = aqua.stats(), cache.statistics
    return ConsumerSample(
        at_s=time.monotonic(),
        tokens=generation.tokens,
        device_bytes=statistics.resident_bytes,
        peer_bytes=stats.used_bytes - stats.spilled_bytes - stats.lost_bytes,
        host_bytes=stats.spilled_bytes,
        paged_out_bytes=statistics.paged_out_bytes,
        paged_in_bytes=statistics.paged_in_bytes,
        spilled_bytes_peak=stats.spilled_bytes_peak,
        returned_bytes=stats.promoted_bytes,
    )


def corrupt_one_byte(aqua: aqualib.Aqua) -> None:
    """Give a stored float32 the opposite sign, behind the store's back.

    Another exponent could make the number infinite, and fail too loudly.
    """
    store = aqua._store  # noqa: SLF001 - a fault comes from outside every interface
    frames = store._table.frames.values()  # noqa: SLF001 - as above
    frame = next(frame for frame in frames if frame.used_bytes)
    at = frame.used_ranges()[0].start + 3  # Little-endian: the last byte begins with the sign.
    memory = store.pin(frame, Range(at, 1))
    try:
        memory.tensor[at] ^= 0x80
    finally:
        store.unpin(frame)


if __name__ == "__main__":
    run_program(run, ConsumerSettings)
