"""What the demo takes from profiles and a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aqua_cli import ExitCode
from aqua_demo.cli import app
from aqua_demo.lending.planned import arrange
from aqua_demo.messages import CONSUMER_ID, PRODUCER_ID
from aqua_demo.scale import QUICK, SCALES, WEIGHT_BYTES
from aqua_protocol import MIB, ConfigError
from aqua_protocol.plan import Match
from aqua_protocol.profile import ModelProfile, ProfileLabel
from aqualib.engines.transformers.cache import DEFAULT_BLOCK_TOKENS
from aqualib.engines.transformers.offload_plan import LayerShape, plan_offload
from harness.command import run_here


def _profiles(spare: int = 12 * MIB, needed: int = 5 * MIB) -> dict[str, ModelProfile]:
    return {
        PRODUCER_ID: ModelProfile(
            model=PRODUCER_ID, label=ProfileLabel.PRODUCER, spare_bytes=spare
        ),
        CONSUMER_ID: ModelProfile(
            model=CONSUMER_ID, label=ProfileLabel.CONSUMER, needed_bytes=needed
        ),
    }


def _matches(producer: str = PRODUCER_ID) -> list[Match]:
    return [
        Match(
            consumer=CONSUMER_ID,
            consumer_shard=0,
            producer=producer,
            producer_shard=0,
            server="server/0",
            covered_gb=0.005,
            reason="the only one",
        )
    ]


def test_the_room_for_images_follows_from_what_the_profile_spares() -> None:
    scale, plan = arrange(QUICK, _profiles(), _matches(), "0" * 64)
    assert scale.spare_images == 2
    assert scale.offer_bytes == 10 * MIB
    (pairing,) = plan.pairings
    assert (pairing.consumer_id, list(pairing.producers)) == (CONSUMER_ID, [PRODUCER_ID])


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("images", [1, 2])
def test_whichever_peak_the_profile_finds_the_offer_holds_every_page(
    name: str, images: int
) -> None:
    scale = replace(SCALES[name], spare_images=images)
    shape = LayerShape(
        batch=1,
        heads=scale.llama.heads,
        head_dim=scale.llama.head_dim,
        element_bytes=4,
        block_tokens=DEFAULT_BLOCK_TOKENS,
        max_blocks=-(-scale.max_tokens // DEFAULT_BLOCK_TOKENS),
    )
    offload = plan_offload(scale.llama.layers, shape, budget_bytes=scale.budget_bytes)
    blocks = len(offload.offloaded) * shape.rows * shape.max_blocks
    slabs = -(-blocks // (scale.slab_bytes // shape.block_bytes))
    assert scale.page_bytes == slabs * scale.slab_bytes <= scale.offer_bytes
    spare = scale.memory_bytes - WEIGHT_BYTES - images * scale.image_bytes
    profiles = _profiles(spare=spare, needed=scale.kv_bytes - scale.budget_bytes)
    arranged, _ = arrange(scale, profiles, _matches(), "0" * 64)
    assert arranged.spare_images == images


def test_an_offer_with_room_for_the_profiled_need_but_not_for_every_page_is_refused() -> None:
    assert 5 * MIB < replace(QUICK, spare_images=3).offer_bytes < QUICK.page_bytes
    with pytest.raises(ConfigError, match="needs"):
        arrange(QUICK, _profiles(spare=9 * MIB, needed=5 * MIB), _matches(), "0" * 64)


def test_a_plan_that_matches_others_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not match"):
        arrange(QUICK, _profiles(), _matches("someone-else"), "0" * 64)


def test_a_need_beyond_the_offer_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="needs"):
        arrange(QUICK, _profiles(spare=5 * MIB), _matches(), "0" * 64)


def test_profiles_of_other_programs_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes profiles"):
        arrange(QUICK, {}, _matches(), "0" * 64)


def test_the_plan_of_a_coordinator_that_runs_is_not_replaced_by_the_demos() -> None:
    said = run_here(app, "aqua-demo", "--coordinator", "http://127.0.0.1:1", "--plan", "plan.json")
    assert said.returncode == ExitCode.WRONG
    assert "would replace the one that a running coordinator obeys" in said.stderr
