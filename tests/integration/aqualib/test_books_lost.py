"""The books are lost for good, and members that lend to each other bring them back over HTTP.

The coordinator is killed with its store, all that the store wrote is deleted, and another starts at
the same address. What was lent stays where it is if the proof of its grant is good, under the key
of then or the one before; if it is not, the consumer pages back, and loses nothing either.
"""

from __future__ import annotations

import shutil

import httpx
import pytest
import torch

from aqua_protocol import TransportKind
from aqualib.producer.producer import Producer
from aqualib.reporter import Identity
from aqualib.tensor import Location
from aqualib.transports import select
from harness.asgi import as_json
from harness.bounds import HANG_S, until
from harness.consumers import consuming
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.members_on_paper import PaperConsumer, PaperProducer
from harness.patience import patient_client
from harness.producers import SLAB, socket_dir

COUNT = 3
OLD, NEW = ("the key that every coordinator has", "the key that is to take its place")
KEYS = {
    "the same key": {"AQUA_ADOPTION_KEY": OLD},
    "another, and the one before": {"AQUA_ADOPTION_KEY": NEW, "AQUA_ADOPTION_KEY_OTHER": OLD},
    "another key alone": {"AQUA_ADOPTION_KEY": NEW},
}


@pytest.mark.parametrize("keys", KEYS)
def test_bytes_outlive_the_loss_of_all_books_and_leases_do_with_a_proof(keys: str) -> None:
    identity = Identity(node="node", domain="domain", gpu_uuid="GPU-0")
    with data_dir() as path, socket_dir() as directory:
        first = CoordinatorProcess(path, AQUA_ADOPTION_KEY=OLD)
        with (
            patient_client(first.url) as link,
            Producer(
                "lender",
                transport=select(TransportKind.MEMFD),
                link=link,
                endpoint=directory / "p.sock",
                identity=identity,
                slab_bytes=SLAB,
                heartbeat_s=0.05,
            ) as producer,
            consuming(link=patient_client(first.url), identity=identity, heartbeat_s=0.05) as aqua,
        ):
            producer.offer(COUNT * SLAB)
            values = [torch.randint(0, 256, (SLAB,), dtype=torch.uint8) for _ in range(COUNT)]
            tensors = [aqua.offload(value) for value in values]
            until(lambda: all(t.location is Location.PEER for t in tensors), "all is lent")
            until(lambda: _states(first) == {"active"}, "the books have seen it")
            granted = {lease["lease_id"] for lease in first.get("leases")["leases"]}
            first.kill()
            shutil.rmtree(path / "appendonlydir")
            with CoordinatorProcess(path, port=first.port, **KEYS[keys]) as second:
                if keys == "another key alone":
                    until(
                        lambda: not producer.leased_bytes or bool(_states(second)),
                        "all is back, or lent anew",
                    )
                else:
                    until(lambda: _states(second) == {"active"}, "the leases are known again")
                    found = {lease["lease_id"] for lease in second.get("leases")["leases"]}
                    assert found == granted
                    assert all(tensor.location is Location.PEER for tensor in tensors)
                for tensor, value in zip(tensors, values, strict=True):
                    assert torch.equal(tensor.load(), value)
                _require_no_forgery(second)
            producer.audit()


def _states(coordinator: CoordinatorProcess) -> set[str]:
    return {lease["state"] for lease in coordinator.get("leases")["leases"]}


def _require_no_forgery(coordinator: CoordinatorProcess) -> None:
    """A lease that was never granted is not known again, whatever its proof says."""
    forger = PaperProducer(name="forger")
    grant = {"lease_id": "lease-forged", "epoch": 5, "consumer_id": PaperConsumer().name}
    proof = f"{forger.slabs * SLAB}.{'A' * 22}"
    held = [{**grant, "held_bytes": forger.slabs * 65_536, "proof": proof}]
    report = as_json(forger.report()) | {"leases": held}
    url = f"{coordinator.url}/v1/producers/forger"
    answer = httpx.put(url, json=report, trust_env=False, timeout=HANG_S).raise_for_status().json()
    assert [notice["reason"] for notice in answer["ended"]] == ["unproven"]
    view = coordinator.get("producers/forger")
    assert view["leased_bytes"] == view["offered_bytes"], "its bytes are its own"
    assert "lease-forged" not in str(coordinator.get("leases"))
