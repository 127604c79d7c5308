"""A stock image pipeline, or a stock music model, that lends what it leaves over and takes it back.

    python docs/tutorials/lending_pipelines.py images
    python docs/tutorials/lending_pipelines.py music

The classes are those of diffusers and transformers, as they are; the models are tiny and their
weights random, made here, so nothing is downloaded and no GPU is needed. `lending-pipelines.md`
tells what happens.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch

from aqualib import Informer, Profile, open_producer
from aqualib.engines.cpu_memory import CpuMemoryLimit
from aqualib.engines.torch_loop import TorchLoop
from aqualib.producer.device import EmulatedMemory

MEMORY_BYTES: Final = 16 << 20
"""Memory of the device that is emulated: a batch fits, beside the weights."""

HEADROOM_BYTES: Final = 256 << 10
"""Never lent: one image needs a little more than another."""

BATCH: Final = 4
"""Requests that are served at once, when memory allows."""

BURST: Final = 3 * BATCH
"""Requests that wait in a burst."""

Maker = Callable[[TorchLoop, Sequence[int]], torch.Tensor]
"""Serves requests, of which only the seeds differ, together."""


def images() -> Maker:
    """Stable Diffusion, with a text encoder that knows letters."""
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    text_encoder = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
        pad_token_id=len(words) - 1,
    )
    pipeline = StableDiffusionPipeline(
        tokenizer=CLIPTokenizer(
            vocab={word: index for index, word in enumerate(words)}, merges=[], model_max_length=16
        ),
        text_encoder=CLIPTextModel(text_encoder),
        unet=UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
            norm_num_groups=4,
        ),
        vae=AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            norm_num_groups=4,
        ),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)

    def make(loop: TorchLoop, seeds: Sequence[int]) -> torch.Tensor:
        made: torch.Tensor = pipeline(
            "a red fox",
            num_images_per_prompt=len(seeds),
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            num_inference_steps=6,
            output_type="pt",
            callback_on_step_end=loop.on_step_end,
        ).images
        return made

    return make


def music() -> Maker:
    """MusicGen: a text encoder, a decoder of sound tokens, and EnCodec, which makes them sound."""
    from transformers import (
        EncodecConfig,
        MusicgenConfig,
        MusicgenDecoderConfig,
        MusicgenForConditionalGeneration,
        T5Config,
    )

    config = MusicgenConfig(
        text_encoder=T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
        ),
        audio_encoder=EncodecConfig(
            num_filters=8,
            hidden_size=16,
            codebook_dim=16,
            codebook_size=64,
            upsampling_ratios=[8, 8, 4],
            target_bandwidths=[2.4],
            sampling_rate=25_600,
            num_lstm_layers=1,
        ),
        decoder=MusicgenDecoderConfig(
            vocab_size=64,
            pad_token_id=63,
            bos_token_id=63,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            num_codebooks=4,
            max_position_embeddings=64,
        ),
    )
    model = MusicgenForConditionalGeneration(config).eval()

    def make(loop: TorchLoop, seeds: Sequence[int]) -> torch.Tensor:
        made: torch.Tensor = model.generate(
            input_ids=torch.tensor([[2 + seed % 60, 5, 1] for seed in seeds]),
            max_new_tokens=16,
            do_sample=False,
            stopping_criteria=[loop.on_token],
        )
        return made

    return make


MAKERS: Final = {"images": images, "music": music}


def serve_some(make: Maker, loop: TorchLoop, waiting: deque[int]) -> torch.Tensor:
    """Serve a batch of what waits; what memory does not allow, because it is lent, one by one."""
    seeds = [waiting[index] for index in range(min(BATCH, len(waiting)))]
    made = None
    with contextlib.suppress(torch.OutOfMemoryError):
        made = make(loop, seeds)
    if made is None:  # Only here: the error had kept what was made until it was raised.
        made = make(loop, seeds[:1])
    loop.step_ended()  # The decoder runs after the last step that the pipeline tells of.
    for _ in made:
        waiting.popleft()
    return made


def main(kind: str) -> None:
    """Lend while one request waits at a time, and take it back in a burst."""
    memory = EmulatedMemory(MEMORY_BYTES)
    waiting: deque[int] = deque()
    with (
        CpuMemoryLimit(memory, headroom_bytes=HEADROOM_BYTES) as limit,
        open_producer(kind, memory=memory, slab_bytes="1MiB") as producer,
    ):
        make = MAKERS[kind]()
        loop = TorchLoop(limit, queue_length=lambda: len(waiting))
        profile = Profile(
            slab_bytes=producer.slab_bytes,
            spare_bytes=MEMORY_BYTES,  # All that the recent steps have left over.
            steady_queue_length=1,
            least_offer_bytes=producer.slab_bytes,
            calm_s=0.5,
        )
        waiting.append(0)
        serve_some(make, loop, waiting)
        print(f"one at a time takes {loop.load().memory_used_bytes >> 10} KiB", flush=True)
        with Informer(producer, loop, profile) as informer:
            # Slabs are made one by one: until less than one is left of what the limit gave up.
            while not 0 < informer.surrendered_bytes < producer.offered_bytes + producer.slab_bytes:
                waiting.append(1)
                serve_some(make, loop, waiting)
            print(f"lending {producer.offered_bytes >> 20} MiB", flush=True)
            input("Enter sends a burst ")
            served = 0
            while served < BATCH or producer.offered_bytes:
                waiting.extend(range(len(waiting), BURST))
                served = len(serve_some(make, loop, waiting))
                print(f"{served} at once, {producer.offered_bytes >> 20} MiB lent", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
