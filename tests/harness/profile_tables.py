"""Small profile tables of an invented GPU, from formulas, in the formats that the simulator reads.

The formulas are simple and known, so a fit can be held to them; a little seeded noise stands for
the clock. The recorded run is one of the simulator itself with a host overhead that a replay must
find again.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

GPU: Final = "RTX4090"
MODEL: Final = "llama31_8b"

LINEAR_OPERATORS: Final = (
    "emb",
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A CSV file, gzip if its name ends so."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(rows)


def linear_ms(operator: str, tokens: float, width: int) -> float:
    """One operator of the invented GPU: a floor, then a straight line."""
    weight = 0.02 * (1 + LINEAR_OPERATORS.index(operator)) / width
    return float(np.hypot(weight, weight * tokens / 200.0))


def decode_ms(batch: float, context: float, heads: float, kv_heads: float) -> float:
    """Decode attention of the invented GPU: a call, then bytes."""
    return 0.01 + 1e-6 * batch * context * kv_heads + 1e-5 * batch * heads / 8


def prefill_ms(batch: float, tokens: float, heads: float, kv_heads: float) -> float:
    """Prefill attention of the invented GPU: a call, then floating-point operations."""
    return 0.01 + 1e-9 * batch * tokens**2 * heads + 1e-7 * batch * tokens * kv_heads


def write_operator_tables(folder: Path, *, gpu: str = "a100", seed: int = 0) -> None:
    """Vidur's and aiconfigurator's tables for one GPU."""
    noise = np.random.default_rng(seed)

    def noisy(value: float) -> float:
        return value * float(1.0 + 0.01 * noise.standard_normal())

    rows = [
        [*(noisy(linear_ms(name, tokens, width)) for name in LINEAR_OPERATORS), tokens, width]
        for width in (1, 2)
        for tokens in [1, *range(8, 4097, 24)]
    ]
    columns = [f"{name}_ms" for name in LINEAR_OPERATORS]
    write_csv(
        folder / f"vidur_{gpu}_Meta-Llama-3-8B_mlp.csv.gz",
        [*columns, "num_tokens", "num_tensor_parallel_workers"],
        rows,
    )
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "step", "latency_ms")
    write_csv(
        folder / f"aic_{gpu}_sxm_generation_attention_perf.csv.gz",
        names,
        [
            (batch, 1, heads, kv, context - 1, noisy(decode_ms(batch, context, heads, kv)))
            for batch in (1, 4, 16, 64, 256)
            for context in (16, 64, 256, 1024, 4096, 16384)
            for heads, kv in ((32, 8), (16, 4), (8, 2))
        ],
    )
    write_csv(
        folder / f"aic_{gpu}_sxm_context_attention_perf.csv",
        names,
        [
            (batch, tokens, heads, kv, 0, noisy(prefill_ms(batch, tokens, heads, kv)))
            for batch in (1, 2, 4, 8)
            for tokens in (16, 64, 256, 1024, 4096, 16384)
            for heads, kv in ((32, 8), (16, 4), (8, 2))
        ],
    )
    write_csv(
        folder / f"aic_{gpu}_sxm_custom_allreduce_perf.csv.gz",
        ("num_gpus", "message_size", "latency_ms", "backend"),
        [(2, size, 0.005 + size * 1e-8, "vllm_graph") for size in (128, 65536, 1 << 20, 1 << 26)],
    )


def write_kernel_tables(folder: Path) -> None:
    """LLMServingSim's tables of the invented GPU."""
    layers = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn")
    dense = [*layers, "down_proj", "embedding", "final_layernorm"]
    write_csv(
        folder / f"lss_{GPU}_{MODEL}_dense.csv.gz",
        ("layer", "tokens", "time_us"),
        [
            (name, tokens, 20.0 * (1 + place) * np.hypot(1.0, tokens / 150.0))
            for place, name in enumerate(dense)
            for tokens in (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
        ],
    )
    write_csv(
        folder / f"lss_{GPU}_{MODEL}_per_sequence.csv.gz",
        ("layer", "sequences", "time_us"),
        [(name, count, 50.0 + count) for name in ("lm_head", "sampler") for count in (1, 16, 256)],
    )
    write_csv(
        folder / f"lss_{GPU}_{MODEL}_attention.csv.gz",
        ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
        [
            (
                chunk,
                past,
                count,
                context,
                10 + chunk * (past + chunk / 2) * 1e-4 + count * context * 3e-3,
            )
            for chunk in (0, 16, 128, 1024)
            for past in ((0,) if chunk == 0 else (0, 64, 512, 4096))
            for count in (0, 1, 8, 32)
            for context in ((0,) if count == 0 else (16, 128, 1024, 8192))
            if chunk or count
        ],
    )


def write_recording(
    folder: Path, rows: Iterable[Sequence[object]], *, blocks: int, in_flight: int = 2
) -> None:
    """A recorded run: (id, prompt, output, queued, scheduled, first token, last token)."""
    stem = f"vllm_real_{GPU}_{MODEL}"
    columns = (
        "request_id",
        "input_toks",
        "output_toks",
        "queued_ts",
        "scheduled_ts",
        "first_token_ts",
        "last_token_ts",
    )
    write_csv(folder / f"{stem}_requests.csv.gz", columns, rows)
    meta = {
        "kv_cache": {"num_gpu_blocks": blocks, "block_size": 16},
        "resolved_config": {
            "scheduler_config": {
                "max_num_batched_tokens": 512,
                "max_num_seqs": 64,
                "async_scheduling": in_flight == 2,
            }
        },
    }
    (folder / f"{stem}_meta.json").write_text(json.dumps(meta))
