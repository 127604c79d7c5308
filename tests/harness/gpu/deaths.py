"""SIGKILL of either side while it copies: what the other one still has, and when memory is back."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import torch

from aqua_protocol import TransportError, TransportKind
from harness.gpu.outcome import Outcome
from harness.gpu.sampling import Figure
from harness.transport_peer import pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.gpu.device import GpuAtHand

ROUNDS: Final = 5
BACK_WITHIN_S: Final = 20.0
"""Seconds after which memory that is not back is lost. Doubled, a failure takes longer to show."""


def deaths(gpu: GpuAtHand) -> Outcome:
    """Kill lenders under borrowers that read, and borrowers under lenders."""
    outcome = Outcome()
    table = outcome.table("Deaths", "transport", "who dies", "rounds", "memory back after, ms")
    for transport in gpu.transports():
        kind = transport.kind
        for who, once in (("lender", lender_dies), ("borrower", borrower_dies)):
            if kind is TransportKind.CUDA_IPC and who == "lender":
                continue  # What the borrower then reads is undefined by CUDA.
            spent = [once(gpu, kind, outcome, number) for number in range(rounds(gpu))]
            table.add(kind.value, who, len(spent), Figure.of(spent))
            outcome.figures[f"{kind.value} {who} dies ms"] = Figure.of(spent).median
    return outcome


def rounds(gpu: GpuAtHand) -> int:
    """How often each dies."""
    return 1 if gpu.is_stand_in else ROUNDS


def lender_dies(gpu: GpuAtHand, kind: TransportKind, outcome: Outcome, seed: int) -> float:
    """The lender is killed while the borrower copies; the borrower drains everything."""
    transport, nbytes = gpu.transport(kind), gpu.slab_bytes
    copier, host = transport.copier(is_background=True), transport.create_host(nbytes)
    free_before = gpu.free_bytes()
    with gpu.peer(kind) as lender:
        lender.call("create", name="lent", nbytes=nbytes)
        lender.call("fill", name="lent", seed=seed)
        slab = transport.open(lender.export("lent"), nbytes)

        def copy() -> None:
            copier.copy(host.tensor, slab.tensor)
            copier.fence()

        copies = _copying(copy)
        lender.kill()
        copies()
        host.tensor.fill_(0)
        copy()
        arrived = torch.equal(host.tensor, pattern(seed, nbytes))
        outcome.check(f"{kind.value}: a dead lender's slab is whole", arrived, f"round {seed}")
        begin = time.monotonic()
        slab.close()
    back = _until(lambda: gpu.free_bytes() >= free_before - nbytes * 3 // 4)
    outcome.check(f"{kind.value}: its memory comes back", back, f"round {seed}")
    host.close()
    return (time.monotonic() - begin) * 1e3


def borrower_dies(gpu: GpuAtHand, kind: TransportKind, outcome: Outcome, seed: int) -> float:
    """The borrower is killed while it copies; the lender's slab is sound, its memory returns."""
    transport, nbytes = gpu.transport(kind), gpu.slab_bytes
    free_before = gpu.free_bytes()
    slab = transport.create(nbytes)
    with gpu.peer(kind) as borrower:
        borrower.open("held", slab.export(), nbytes)
        borrower.call("churn", name="held")
        borrower.kill()
        begin = time.monotonic()
        near = pattern(seed, nbytes).to(gpu.device)
        copier = transport.copier()
        copier.copy(slab.tensor, near)
        copier.fence()
        is_sound = bool((slab.tensor == near).all())
        outcome.check(f"{kind.value}: a dead borrower writes no more", is_sound, f"round {seed}")
        del near
        slab.close()
    torch.cuda.empty_cache()
    back = _until(lambda: gpu.free_bytes() >= free_before - nbytes * 3 // 4)
    outcome.check(f"{kind.value}: memory comes back from it", back, f"round {seed}")
    return (time.monotonic() - begin) * 1e3


def _copying(once: Callable[[], object]) -> Callable[[], None]:
    """Copy again and again on another thread; returns once it does, with what ends it."""
    begun, enough = threading.Event(), threading.Event()
    errors: list[TransportError] = []

    def work() -> None:
        try:
            while not enough.is_set():
                once()
                begun.set()
        except TransportError as error:
            errors.append(error)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()

    def end() -> None:
        enough.set()
        thread.join()
        if errors:
            raise errors[0]

    return end


def _until(condition: Callable[[], bool]) -> bool:
    """Whether it came true; the driver takes a dead process apart when it pleases."""
    give_up_s = time.monotonic() + BACK_WITHIN_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() > give_up_s:
            return False
        pause.wait(0.001)
    return True
