"""Co-serving without an engine: what vLLM would show of requests, and options by a profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from aqua_schedulers.conserve import CoServingView, StepLoad, StepTimeKey, StepTimeProfile
from aqualib.engines.vllm.co_serving.scheduler import CoServing
from aqualib.engines.vllm.options import read_options

if TYPE_CHECKING:
    from pathlib import Path

SERVING: Final[dict[str, Any]] = {"ttft_s": 1.0, "tpot_s": 0.1}
SIZE: Final = 16


def request(name: str = "r", **facts: Any) -> Any:  # noqa: ANN401 - a request of vLLM's
    values = {
        "request_id": name,
        "sampling_params": SimpleNamespace(extra_args=None),
        "priority": 0,
        "arrival_time": 0.0,
        "num_tokens": 100,
        "num_prompt_tokens": 100,
        "num_output_tokens": 0,
        "num_output_placeholders": 0,
        "max_tokens": 20,
        "num_computed_tokens": 0,
    }
    return SimpleNamespace(**{**values, **facts})


def told(**xargs: object) -> Any:  # noqa: ANN401 - as above
    return SimpleNamespace(extra_args=xargs)


def co_serving(
    *,
    abortable_layers: int | None = None,
    has_page: bool | None = True,
    **options: Any,  # noqa: ANN401 - options
) -> CoServing:
    given = read_options({"co_serving": SERVING, **options})
    served = CoServing(
        given,
        StepTimeKey("m", "e", "g"),
        block_tokens=SIZE,
        is_load_async=True,
        abortable_layers=abortable_layers,
    )
    if served.aborts is not None and has_page is not None:
        served.aborts.page_opened(by_all=has_page)
    return served


def profiled(folder: Path, **facts: Any) -> dict[str, Any]:  # noqa: ANN401 - of a profile
    """Options of co-serving by a profile in which a token takes a millisecond."""
    place = folder / "steps.json"
    profile = StepTimeProfile(
        model="m", engine="e", gpu="g", floor_s=0.01, token_s=1e-3, max_tokens=512
    )
    place.write_text(profile.model_dump_json())
    return {**SERVING, "step_profile": str(place), **facts}


def offline(name: str, **facts: Any) -> Any:  # noqa: ANN401 - as `request`
    return request(name, sampling_params=told(aqua_class="offline"), **facts)


def chunk(output: Any) -> StepLoad:  # noqa: ANN401 - the scheduler's
    """What such a step computes, all of it prompts."""
    return StepLoad().and_chunk(sum(output.num_scheduled_tokens.values()), 0)


def view(*running: Any, free_blocks: int = 100) -> CoServingView:  # noqa: ANN401 - views
    return CoServingView(
        now_s=1.0,
        free_blocks=free_blocks,
        block_count=100,
        max_tokens=512,
        max_running=16,
        running=running,
        link_bytes_per_s=1e9,
        store_room_blocks=100,
    )
