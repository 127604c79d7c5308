from __future__ import annotations

import json
import os
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from aqua_protocol import ConfigError
from aqualib import topology
from aqualib.settings import load_settings
from aqualib.topology import Gpu, Link, LinkKind, Topology

BOOT = "3f0c0de0-0000-4000-8000-000000000001"


def gpu(name: str, fabric: str | None = None) -> Gpu:
    return Gpu(uuid=name, model="H100", memory_bytes=80 << 30, fabric=fabric)


def host(names: str, links: list[str]) -> Topology:
    return Topology(
        node="node-1",
        boot_id=BOOT,
        gpus=[gpu(name) for name in names],
        links=[Link(a=pair[0], b=pair[1], kind=LinkKind.NVLINK) for pair in links],
    )


@given(
    st.integers(1, 7).flatmap(
        lambda count: st.tuples(
            st.just(count),
            st.sets(st.sampled_from(list(combinations(range(count), 2)) or [(0, 0)])),
        )
    )
)
def test_domains_are_the_connected_components(drawn: tuple[int, set[tuple[int, int]]]) -> None:
    count, joined = drawn
    joined -= {(0, 0)}
    names = "abcdefg"[:count]
    here = host(names, [names[a] + names[b] for a, b in joined])
    for a, b in joined:
        assert here.domain_of(names[a]) == here.domain_of(names[b])
    # As many domains as a spanning forest has trees.
    parent = list(range(count))

    def root(i: int) -> int:
        return i if parent[i] == i else root(parent[i])

    for a, b in joined:
        parent[root(a)] = root(b)
    domains = {here.domain_of(name) for name in names}
    assert len(domains) == len({root(i) for i in range(count)})
    assert all(domain.startswith(BOOT) for domain in domains), "a domain never spans hosts"


def test_a_fabric_is_a_domain_without_links() -> None:
    here = Topology(
        node="n", boot_id=BOOT, gpus=[gpu("a", "f.1"), gpu("b", "f.1"), gpu("c", "f.2"), gpu("d")]
    )
    assert here.domain_of("a") == here.domain_of("b") == f"{BOOT}.f.1"
    assert len({here.domain_of(name) for name in "abcd"}) == 3


def test_processes_share_a_domain_if_they_see_the_same_part_of_it() -> None:
    here = host("abcd", ["ab", "bc"])
    assert here.domain_of("a", "abcd") == here.domain_of("a", "abc") == here.domain_of("a")
    assert here.domain_of("a", "a") != here.domain_of("b", "b"), "neither maps the other's memory"
    assert here.domain_of("a", "a") != here.domain_of("a")
    assert here.domain_of("a", "ab") == here.domain_of("b", "bad")
    assert here.domain_of("d", "d") == here.domain_of("d")
    fabric = host("ab", []).model_copy(update={"gpus": [gpu("a", "f.1"), gpu("b", "f.1")]})
    part = fabric.model_copy(update={"gpus": [gpu("a", "f.1")]})
    assert fabric.domain_of("a", "ab") == fabric.domain_of("b", "ab") != part.domain_of("a", "a")
    assert len(fabric.domain_of("a", "ab")) <= 128


def test_a_fabric_over_hosts_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    clique = "00010203-0405-0607-0809-0a0b0c0d0e0f.7"
    settings = load_settings(domain=clique)
    with pytest.raises(ConfigError, match="may span hosts") as refusal:
        topology.find_identity(settings, torch.device("cpu"))
    assert clique in refusal.value.message
    monkeypatch.setenv("AQUA_DOMAIN", "rack-1")
    assert topology.find_identity(load_settings(), torch.device("cpu")).domain == "rack-1"


def test_an_unknown_gpu_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ConfigError) as refusal:
        host("ab", []).domain_of("x")
    assert "a, b" in refusal.value.remedy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gpus": []}, "gpus"),
        ({"gpus": [gpu("a").model_dump()] * 2}, "only once"),
        ({"links": [{"a": "a", "b": "x", "kind": "nvlink"}]}, "x"),
        ({"links": [{"a": "a", "b": "a", "kind": "nvlink"}]}, "itself"),
        ({"links": [{"a": "a", "b": "b", "kind": "string"}]}, "kind"),
        ({"node": "not a name"}, "node"),
        ({"nodes": "n"}, "nodes"),
    ],
)
def test_a_wrong_topology_file_is_refused_by_field(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(json.loads(host("ab", []).model_dump_json()) | change))
    with pytest.raises(ConfigError, match=named) as refusal:
        topology.load(path)
    assert "unset" in refusal.value.remedy


def test_a_file_stands_in_for_the_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "topology.json"
    path.write_text(host("abc", ["ab"]).model_dump_json())
    monkeypatch.setenv(topology.TOPOLOGY_FILE_VARIABLE, str(path))
    assert topology.discover() == host("abc", ["ab"])
    here = topology.place(torch.device("cpu"))
    assert (here.node, here.gpu_uuid) == ("node-1", "a")
    assert topology.place(torch.device("cpu"), gpu_uuid="b").domain == here.domain
    assert topology.place(torch.device("cpu"), gpu_uuid="c").domain != here.domain
    with pytest.raises(ConfigError):
        topology.place(torch.device("cpu"), gpu_uuid="d")
    monkeypatch.setenv(topology.TOPOLOGY_FILE_VARIABLE, str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match="absent"):
        topology.discover()


def test_processes_without_a_gpu_share_a_domain_and_have_a_gpu_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(topology.TOPOLOGY_FILE_VARIABLE, raising=False)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    one = topology.place(torch.device("cpu"))
    monkeypatch.setattr(os, "getpid", lambda: 2)
    two = topology.place(torch.device("cpu"))
    assert one.domain == two.domain
    assert one.gpu_uuid != two.gpu_uuid


@pytest.mark.parametrize(
    ("host_name", "node"),
    [("node-3.rack", "node-3.rack"), ("my host!", "my-host"), ("_-_", "localhost")],
)
def test_any_host_name_makes_a_node_name(
    monkeypatch: pytest.MonkeyPatch, host_name: str, node: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host_name)
    assert topology.emulated().node == node


class NvmlError(Exception):
    pass


def nvml(gpus: dict[str, dict[str, Any]], p2p: dict[tuple[str, str], set[int]]) -> SimpleNamespace:
    """As much of pynvml as discovery uses, with the package's faulty constant."""

    class FabricInfo:
        clusterUuid = (0,) * 16  # noqa: N815 - NVML's name
        state = 0
        cliqueId = 0  # noqa: N815 - NVML's name

    def fabric(handle: str, info: FabricInfo) -> None:
        found = gpus[handle].get("fabric")
        if found is None:
            raise NvmlError
        info.clusterUuid, info.cliqueId, info.state = found

    def status(a: str, b: str, capability: int) -> int:
        assert isinstance(capability, int)
        return 0 if capability in p2p.get((a, b), ()) else 1

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_P2P_CAPS_INDEX_READ=(0,),
        NVML_P2P_CAPS_INDEX_WRITE=1,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        NVML_GPU_FABRIC_STATE_COMPLETED=3,
        c_nvmlGpuFabricInfoV_t=FabricInfo,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: list(gpus)[index],
        nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetName=lambda _: "NVIDIA H100",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=80 << 30),
        nvmlDeviceGetGpuFabricInfoV=fabric,
        nvmlDeviceGetP2PStatus=status,
    )


def discover_with(monkeypatch: pytest.MonkeyPatch, module: SimpleNamespace | None) -> Topology:
    monkeypatch.delenv(topology.TOPOLOGY_FILE_VARIABLE, raising=False)
    monkeypatch.setattr(topology, "byref", lambda info: info)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return topology.discover()


def test_nvml_gives_links_only_where_both_ways_work(monkeypatch: pytest.MonkeyPatch) -> None:
    p2p = {
        ("GPU-a", "GPU-b"): {0, 1, 2},
        ("GPU-a", "GPU-c"): {0, 1},
        ("GPU-b", "GPU-c"): {0, 2},
    }
    found = discover_with(
        monkeypatch, nvml({"GPU-a": {}, "GPU-b": {}, "GPU-c": {}, "GPU-d": {}}, p2p)
    )
    assert found.links == [
        Link(a="GPU-a", b="GPU-b", kind=LinkKind.NVLINK),
        Link(a="GPU-a", b="GPU-c", kind=LinkKind.PCIE),
    ]
    assert found.domain_of("GPU-b") == found.domain_of("GPU-c") != found.domain_of("GPU-d")


def test_a_fabric_counts_once_it_is_complete_and_has_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named, nameless = tuple(range(16)), (0,) * 16
    found = discover_with(
        monkeypatch,
        nvml(
            {
                "GPU-a": {"fabric": (named, 7, 3)},
                "GPU-b": {"fabric": (named, 7, 3)},
                "GPU-c": {"fabric": (named, 7, 2)},
                "GPU-d": {"fabric": (nameless, 7, 3)},
            },
            {},
        ),
    )
    assert found.gpu("GPU-a").fabric == "00010203-0405-0607-0809-0a0b0c0d0e0f.7"
    assert found.domain_of("GPU-a") == found.domain_of("GPU-b")
    assert found.gpu("GPU-c").fabric is None
    assert found.gpu("GPU-d").fabric is None


def test_without_nvml_or_gpus_one_gpu_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise NvmlError("driver not loaded")

    broken = nvml({}, {})
    broken.nvmlInit = no_driver
    for module in (None, broken, nvml({}, {})):
        found = discover_with(monkeypatch, module)
        assert len(found.gpus) == 1
        assert found.gpus[0].fabric == topology.EMULATED_FABRIC


def test_a_driver_that_cannot_describe_its_gpus_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(_: object) -> None:
        raise NvmlError("not supported")

    module = nvml({"GPU-a": {}}, {})
    module.nvmlDeviceGetMemoryInfo = unsupported
    assert discover_with(monkeypatch, module).gpus[0].fabric == topology.EMULATED_FABRIC
    assert "not supported" in caplog.text
