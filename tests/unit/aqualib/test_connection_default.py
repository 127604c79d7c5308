from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import prometheus_client
import pytest
import torch

import aqualib
from aqua_protocol import ConfigError
from aqualib.consumer import Aqua
from harness.consumers import consuming
from harness.producers import SLAB

if TYPE_CHECKING:
    from collections.abc import Iterator


def connect(name: str) -> Aqua:
    return aqualib.connect(
        name, transport="memfd", slab_bytes=SLAB, host_bytes=8 * SLAB, is_offline=True
    )


@pytest.fixture
def first() -> Iterator[Aqua]:
    with connect("first") as aqua:
        yield aqua


def test_the_first_connection_is_the_default_until_it_is_closed(first: Aqua) -> None:
    with connect("second") as second:
        assert aqualib.default() is first
        first.close()
        with pytest.raises(ConfigError, match="no Aqua is connected"):
            aqualib.default()
        assert aqualib.step() is None
        with connect("third") as third:
            assert aqualib.default() is third
            assert second.offload(torch.ones(2)).load().tolist() == [1, 1]


def test_an_aqua_made_by_hand_is_never_the_default() -> None:
    with consuming(), pytest.raises(ConfigError):
        aqualib.default()


def test_the_functions_of_the_package_use_the_default(first: Aqua) -> None:
    tensor = aqualib.offload(torch.arange(3))
    assert aqualib.empty((2, 2), torch.float16).dtype is torch.float16
    store = aqualib.block_store(1024, 4)
    assert first.stats().used_bytes > 0
    assert tensor.load().tolist() == [0, 1, 2]
    assert store.capacity_blocks == 4
    assert aqualib.step() is None


@pytest.mark.parametrize("call", ["empty", "offload", "block_store"])
def test_without_a_connection_the_next_step_is_named(call: str) -> None:
    arguments = (1024, 1) if call == "block_store" else (torch.zeros(1),)
    with pytest.raises(ConfigError) as caught:
        getattr(aqualib, call)(*arguments)
    assert "aqualib.connect()" in caught.value.remedy


def test_sizes_are_read_as_people_write_them() -> None:
    with aqualib.connect("c", slab_bytes="64KiB", host_bytes="1MiB", is_offline=True) as aqua:
        assert "0 of 16 frames" in repr(aqua)
        aqua.block_store(64 * 1024, 16).close()
        with pytest.raises(ConfigError, match="does not fit"):
            aqua.block_store(64 * 1024 + 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_bytes": SLAB - 1}, "no room for one slab"),
        ({"wanted_bytes": 9 * SLAB}, "exceeds host_bytes"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    options: dict[str, int], message: str
) -> None:
    sizes = {"slab_bytes": SLAB, "host_bytes": 8 * SLAB} | options
    with pytest.raises(ConfigError, match=message):
        aqualib.connect("c", is_offline=True, **sizes)  # type: ignore[arg-type] # sizes only


def test_metrics_are_on_the_registry_of_choice_and_leave_it_in_the_end() -> None:
    registry = prometheus_client.CollectorRegistry()
    with consuming(registry=registry) as aqua:
        kept = aqua.offload(torch.zeros(100))
        labels = {"node": "node", "gpu_uuid": "GPU-1", "model": ""}
        spilled = registry.get_sample_value("aqua_consumer_spilled_host_bytes", labels)
        assert spilled == 512  # Whole units of 256 bytes.
        kept.release()
        with (
            pytest.raises(ConfigError, match="another Aqua consumer"),
            consuming(registry=registry),
        ):
            pass
    assert prometheus_client.generate_latest(registry) == b""


def test_two_instances_have_registries_of_their_own(first: Aqua) -> None:
    with connect("second") as second:
        assert first.metrics.registry is not second.metrics.registry
        assert first.metrics.registry is not prometheus_client.REGISTRY


def test_every_name_of_the_package_resolves() -> None:
    for name in aqualib.__all__:
        assert getattr(aqualib, name) is not None
    assert set(dir(aqualib)) == set(aqualib.__all__)
    with pytest.raises(AttributeError, match="no attribute 'page_everything'"):
        aqualib.page_everything  # noqa: B018 - the access is the test


IMPORTING = """
import json, sys
import aqualib
heavy = [name for name in ("torch", "httpx", "pydantic", "numpy") if name in sys.modules]
error = aqualib.ConfigError
without = "torch" not in sys.modules
print(json.dumps([heavy, without]))
"""

WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib.util
importlib.util.find_spec = lambda name: None
import aqualib
try:
    aqualib.connect()
except aqualib.ConfigError as error:
    print(error)
"""


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout


def test_importing_the_package_loads_nothing_and_errors_need_no_torch() -> None:
    assert json.loads(run(IMPORTING)) == [[], True]


def test_without_torch_the_extra_is_named() -> None:
    assert "aqualib[torch]" in run(WITHOUT_TORCH)
