"""What runs of the demos with a real vLLM have in common: their inputs, objectives and settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aqua_demo.engines.online_load import Lengths, OnlineLoad, draw_lengths, write_offline_file
from aqua_demo.engines.race import Run, measure_alone
from aqua_demo.engines.scale import EngineScale
from aqua_demo.view import ConsoleView


@dataclass
class EngineDemo:
    """One run of such a demo, shown by a view.

    Args:
        size: What its scale is called.
        scale: How large it is.
        seed: Of weights, arrivals, lengths and prompts.
        folder: Gets the offline file and the logs.
        view: Shows how it goes.

    Attributes:
        lengths: Of the online requests.
        objectives: As they were measured (`measure_alone`).
        runs: What became of each engine or pass.
    """

    size: str
    scale: EngineScale
    seed: int
    folder: Path
    view: ConsoleView
    objectives: dict[str, float] = field(default_factory=dict, init=False)
    runs: dict[str, Run] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.lengths: Lengths = draw_lengths(self.scale.online_count, self.seed)
        self._begun_s = time.monotonic()

    @property
    def file(self) -> Path:
        """The offline requests."""
        return self.folder / "offline.jsonl"

    def write_inputs(self, model: Path, body: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Write the model and the offline file; `body` has further fields of each request."""
        # Here, because it imports transformers, which takes seconds.
        from aqua_demo.programs.llama import write_llama

        scale, seed = self.scale, self.seed
        self.view.tell("start", "a small Llama, and an offline file of its own prompts")
        write_llama(model, scale.llama, max_tokens=scale.max_tokens, seed=seed)
        write_offline_file(
            self.file,
            scale.offline_count,
            seed,
            scale.longest_prompt,
            topics=scale.topics,
            body=body,
        )

    def measure_alone(self, ask: Callable[[OnlineLoad], Run]) -> dict[str, float]:
        """Ask for a few requests one by one, say what these took, and take objectives from it."""
        found = self.objectives = measure_alone(ask, self.lengths[: self.scale.alone_count])
        self.view.tell(
            "people",
            f"a request takes {found['service_s']:.2f} s by itself; objectives:"
            f" {1000 * found['ttft_s']:.0f} ms to the first token,"
            f" {1000 * found['tpot_s']:.0f} ms between two",
        )
        return found

    def settings(self) -> dict[str, Any]:
        """What the report says of the run itself."""
        return {
            "objectives": self.objectives,
            "scale": self.size,
            "seed": self.seed,
            "took_s": time.monotonic() - self._begun_s,
        }
