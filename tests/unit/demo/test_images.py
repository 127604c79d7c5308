"""The demo's image service: real steps, memory that limits them, requests that wait."""

from __future__ import annotations

import pytest
import torch

from aqua_demo.programs.images import Arrivals, ImageService
from aqua_demo.scale import QUICK, SCALES
from aqualib.engines.torch_loop import CountedMemoryLimit
from aqualib.producer.device import EmulatedMemory


@pytest.fixture
def memory() -> EmulatedMemory:
    return EmulatedMemory(QUICK.memory_bytes)


@pytest.fixture
def allowance(memory: EmulatedMemory) -> CountedMemoryLimit:
    return CountedMemoryLimit(memory, least_bytes=QUICK.memory_bytes - QUICK.offer_bytes)


@pytest.fixture
def service(allowance: CountedMemoryLimit) -> ImageService:
    return ImageService(QUICK, allowance, torch.device("cpu"), seed=0)


def test_arrivals_come_at_the_rate_that_is_set_and_repeat_with_the_seed() -> None:
    arrivals, again = (Arrivals(50.0, seed=3, now_s=100.0) for _ in range(2))
    counts = [arrivals.due(100.0 + second) for second in range(1, 101)]
    assert counts == [again.due(100.0 + second) for second in range(1, 101)]
    assert 4500 < sum(counts) < 5500
    arrivals.per_s = 100.0
    assert 9000 < arrivals.due(300.0) < 11000
    for tick in range(1, 201):
        arrivals.due(300.0 + tick / 50)
    assert 60 < arrivals.seen_per_s < 140


def test_a_request_becomes_an_image_after_its_steps(service: ImageService) -> None:
    service.request(1)
    for _ in range(QUICK.image_steps - 1):
        service.step()
    assert (service.images, service.batch) == (0, 1)
    service.step()
    assert (service.images, service.batch) == (1, 0)
    assert service.is_idle


def test_lent_memory_limits_how_many_images_are_made_at_once(
    service: ImageService, memory: EmulatedMemory
) -> None:
    memory.take(QUICK.offer_bytes)
    service.request(5)
    service.step()
    assert service.batch < 5
    assert service.queue_length == 5 - service.batch
    memory.give_back(QUICK.offer_bytes)
    service.step()
    assert service.queue_length == 0


@pytest.mark.parametrize("name", SCALES)
def test_a_service_that_lends_all_it_can_still_makes_images(name: str) -> None:
    scale = SCALES[name]
    memory = EmulatedMemory(scale.memory_bytes)
    allowance = CountedMemoryLimit(memory, least_bytes=scale.memory_bytes - scale.offer_bytes)
    service = ImageService(scale, allowance, torch.device("cpu"), seed=0)
    assert allowance.shrink(scale.offer_bytes) == scale.offer_bytes
    memory.take(scale.offer_bytes)
    service.request(3)
    service.step()
    assert service.batch == scale.spare_images


def test_finished_images_give_their_memory_back(
    service: ImageService, memory: EmulatedMemory
) -> None:
    service.request(3)
    while not service.is_idle:
        service.step()
    assert memory.used_bytes == service.weight_bytes


def test_requests_beyond_the_bound_are_turned_away(service: ImageService) -> None:
    service.most_waiting = 20
    service.request(13)
    service.request(13)
    assert service.queue_length == 20


@pytest.mark.slow
def test_capacity_grows_with_the_batch_and_measuring_it_leaves_no_trace(
    service: ImageService, memory: EmulatedMemory
) -> None:
    used = memory.used_bytes
    assert service.images_per_s(8) > 0
    assert service.is_idle
    assert memory.used_bytes == used
