from __future__ import annotations

import pytest
import torch

from aqua_protocol import TransportKind, TransportUnavailableError
from aqualib.transports import Transport, select, selection
from aqualib.transports.memfd import MemfdTransport


class Candidate(MemfdTransport):
    """Of any kind; works or not as told."""

    def __init__(self, kind: TransportKind, *, works: bool) -> None:
        self.kind = kind
        self._works = works

    def check(self) -> None:
        if not self._works:
            raise TransportUnavailableError(f"no {self.kind}", remedy=f"Mend {self.kind}.")


def offer(monkeypatch: pytest.MonkeyPatch, working: set[TransportKind]) -> None:
    def make(kind: TransportKind, _: str | None) -> Transport:
        return Candidate(kind, works=kind in working)

    monkeypatch.setattr(selection, "_make", make)


V, I, M = TransportKind.CUDA_VMM, TransportKind.CUDA_IPC, TransportKind.MEMFD  # noqa: E741 - one letter each


@pytest.mark.parametrize(
    ("working", "chosen"), [({V, I, M}, V), ({I, M}, I), ({M}, M), ({V, M}, V), ({V}, V)]
)
def test_the_best_that_works_is_taken(
    monkeypatch: pytest.MonkeyPatch, working: set[TransportKind], chosen: TransportKind
) -> None:
    offer(monkeypatch, working)
    assert select().kind is chosen


def test_what_was_named_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, {V, M})
    assert select(M).kind is M
    with pytest.raises(TransportUnavailableError, match="no cuda_ipc") as refusal:
        select(I)
    assert refusal.value.remedy == "Mend cuda_ipc."


def test_when_nothing_works_every_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, set())
    with pytest.raises(TransportUnavailableError) as refusal:
        select()
    for kind in TransportKind:
        assert f"no {kind}" in refusal.value.message
        assert f"Mend {kind}." in refusal.value.remedy


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("kind", [V, I])
def test_a_gpu_transport_without_a_gpu_is_unavailable_and_says_what_to_do(
    kind: TransportKind,
) -> None:
    for device in (None, "cuda", "cuda:0"):
        with pytest.raises(TransportUnavailableError) as refusal:
            select(kind, device)
        assert "memfd" in refusal.value.remedy
    assert select().kind is M


@pytest.mark.parametrize(("kind", "device"), [(M, "cuda:0"), (V, "cpu"), (I, "cpu")])
def test_a_transport_on_the_wrong_device_is_refused(kind: TransportKind, device: str) -> None:
    with pytest.raises(TransportUnavailableError, match=device):
        select(kind, device)


def test_a_cpu_device_gets_memfd() -> None:
    assert select(device="cpu").kind is M
    assert select(M, "cpu").device == torch.device("cpu")
