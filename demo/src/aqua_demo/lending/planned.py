"""What the demo takes from profiles and a plan: how much is lent, and to whom.

The image service's profile says what it can lend at its peak throughput; that replaces the room for
images which the scale assumes. The LLM's says what it needs. The plan of `aqua-place` has to have
put the one beside the other; its match is what the coordinator is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from aqua_demo.messages import CONSUMER_ID, PRODUCER_ID
from aqua_demo.scale import WEIGHT_BYTES, DemoScale
from aqua_protocol import ConfigError, format_bytes
from aqua_protocol.leases import Pairing, PlacementPlan
from aqua_protocol.plan import Match, Plan
from aqua_protocol.profile import ModelProfile, ProfileLabel

Document = TypeVar("Document", bound=BaseModel)


def read_arrangement(
    scale: DemoScale, profiles: list[Path], plan: Path | None
) -> tuple[DemoScale, PlacementPlan | None]:
    """Read files, if there are any, and make an arrangement of them; see `arrange`.

    Raises:
        ConfigError: A file is not what it should be, or the plan does not suit the demo.
    """
    if plan is None and not profiles:
        return scale, None
    if plan is None or not profiles:
        remedy = "Give --profile twice and --plan."
        raise ConfigError("profiles and a plan go together", remedy=remedy)
    found = {profile.model: profile for profile in (_read(path, ModelProfile) for path in profiles)}
    read = _read(plan, Plan)
    return arrange(scale, found, read.matches, read.plan_hash)


def arrange(
    scale: DemoScale, profiles: dict[str, ModelProfile], matches: Sequence[Match], plan_hash: str
) -> tuple[DemoScale, PlacementPlan]:
    """Check that plan and profiles are about the demo's two programs, and fit.

    Returns:
        The scale, with room for as many images as the profile left, and the plan for the
        coordinator.

    Raises:
        ConfigError: They are not, or do not.
    """
    producer, consumer = profiles.get(PRODUCER_ID), profiles.get(CONSUMER_ID)
    if (
        producer is None
        or consumer is None
        or producer.label is not ProfileLabel.PRODUCER
        or consumer.label is not ProfileLabel.CONSUMER
    ):
        raise ConfigError(
            f"the demo takes profiles of a producer {PRODUCER_ID!r} and a consumer {CONSUMER_ID!r}",
            remedy="Profile aqua_demo.programs.profiled as docs/profiling.md shows.",
        )
    match = next((match for match in matches if match.consumer == CONSUMER_ID), None)
    if match is None or match.producer != PRODUCER_ID:
        raise ConfigError(
            "the plan does not match the demo's consumer with its producer",
            remedy="Solve it again from these profiles.",
        )
    spare, needed = producer.spare_bytes or 0, max(consumer.needed_bytes or 0, scale.page_bytes)
    # At least as much room as the profile left, in whole images.
    images = math.ceil((scale.memory_bytes - WEIGHT_BYTES - spare) / scale.image_bytes)
    scale = replace(scale, spare_images=max(1, images))
    if scale.offer_bytes < needed:
        raise ConfigError(
            f"the image service spares {format_bytes(scale.offer_bytes)},"
            f" the LLM needs {format_bytes(needed)}",
            remedy="Profile both at the same size (quick or full), the service with --largest 2.",
        )
    pairing = Pairing(consumer_id=CONSUMER_ID, producers=[PRODUCER_ID], reason=match.reason[:512])
    return scale, PlacementPlan(plan_hash=plan_hash, pairings=[pairing])


def _read(path: Path, kind: type[Document]) -> Document:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{path} is not a {kind.__name__}: {error}",
            remedy="Give JSON that aqua-profile or aqua-place wrote.",
        ) from error
