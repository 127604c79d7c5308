"""Time of one engine step from what the step does, in a form the kernel can evaluate.

Two kinds of operators run in a step: compute-bound (linear layers over all tokens of the step,
prefill attention) and memory-bound (decode attention, which reads the KV cache of every decoding
request). An engine that overlaps them, as NanoFlow does, takes `max(c, m) + alpha * min(c, m)`:
`alpha` is the interference, 0 for perfect overlap and 1 for operators one after another (vLLM,
SGLang). The paper does not give alpha.

Source: BlendServe sections 2.3 (the two times) and 5.2 (interference, fitted there by a
polynomial that is not printed).
"""

from __future__ import annotations

from typing import NamedTuple

from aqua_protocol.decoders import DecoderModel
from aqua_protocol.hardware import GpuModel
from aqua_schedulers.blendserve.cost import ResourceCost


class StepCost(NamedTuple):
    """Coefficients of the step time; a tuple, because that is what kernels take.

    Attributes:
        linear_s_per_token: Linear layers, per token of the step.
        prefill_s_per_square_token: Prefill attention over a prompt of `p` tokens costs this x p^2;
            a chunk from `a` to `b` costs this x (b^2 - a^2).
        decode_s_per_kv_token: Decode attention, per token of context of each decoding request.
        interference: Alpha above, 0 to 1.
        linear_floor_s: Linear layers at one token: reading the weights. The two joined as
            (floor^n + (b T)^n)^(1/n); 0 leaves the paper's straight line.
        linear_exponent: n of that formula.
        overhead_s: Host time per step that nothing hides.
    """

    linear_s_per_token: float
    prefill_s_per_square_token: float
    decode_s_per_kv_token: float
    interference: float
    linear_floor_s: float = 0.0
    linear_exponent: float = 1.0
    overhead_s: float = 0.0

    @classmethod
    def from_paper(cls, model: DecoderModel, gpu: GpuModel, *, interference: float) -> StepCost:
        """The paper's formulas for one model on one GPU (or a tensor-parallel group as one).

        Source: BlendServe section 2.3, Comp(r) and Mem(r).
        """
        cost = ResourceCost.of(model, gpu)
        return cls(
            cost.linear_s_per_token,
            cost.prefill_s_per_square_token,
            cost.decode_s_per_kv_token,
            interference,
        )

    def overlapped(self, compute_s: float, memory_s: float) -> float:
        """Time of the two together: `max + alpha * min`."""
        return max(compute_s, memory_s) + self.interference * min(compute_s, memory_s)
