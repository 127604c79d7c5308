"""A consumer and producers in other processes, which are killed, frozen, forked and left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import torch

from aqualib.consumer import Aqua
from aqualib.tensor import Location
from harness.bounds import HANG_S, until
from harness.consumers import await_rest, consuming, grant
from harness.lender_process import LenderProcess
from harness.loans import fill, require_intact
from harness.memory import CountedMemory
from harness.producers import SLAB, lending, socket_dir
from harness.raw_consumer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNT: Final = 8

LEAVING: Final = """
import sys, torch
from harness.consumers import consuming
from aqua_protocol.leases import LeaseGrant

manager = consuming()
aqua = manager.__enter__()
aqua.attach(LeaseGrant.model_validate_json(sys.argv[1]))
tensor = aqua.offload(torch.arange(4000))
blocks = aqua.block_store(1024, 100)
{ending}
"""


@pytest.fixture
def lender(issuer: TokenIssuer) -> Iterator[LenderProcess]:
    with (
        socket_dir() as directory,
        LenderProcess(
            directory / "p.sock", slab_bytes=SLAB, slab_count=COUNT, ack=issuer.ack()
        ) as process,
    ):
        yield process


@pytest.fixture
def aqua(lender: LenderProcess, issuer: TokenIssuer) -> Iterator[Aqua]:
    with consuming() as aqua:
        aqua.attach(grant(issuer, lender.endpoint, COUNT))
        yield aqua


def test_memory_is_lent_filled_taken_back_in_part_and_lent_again(
    aqua: Aqua, lender: LenderProcess, issuer: TokenIssuer
) -> None:
    pairs = fill(aqua)
    assert {tensor.location for tensor, _ in pairs} == {Location.PEER}
    lender.reclaim(5)
    lender.await_reclaimed()
    require_intact(pairs)
    assert lender.slabs() == {"offered": 3, "free": 0, "leased": 3, "quarantined": 0}
    assert aqua.stats().spilled_bytes == 5 * SLAB
    lender.offer(COUNT)
    aqua.attach(grant(issuer, lender.endpoint, 5))
    await_rest(aqua)
    assert {tensor.location for tensor, _ in pairs} == {Location.PEER}
    require_intact(pairs)


def test_the_data_of_a_producer_that_is_killed_survives_it(
    aqua: Aqua, lender: LenderProcess
) -> None:
    pairs = fill(aqua)
    blocks = aqua.block_store(SLAB // 8, 16)
    src = torch.randint(0, 256, (16, SLAB // 8), dtype=torch.uint8)
    slots, transfer = blocks.page_out(src)
    transfer.wait()
    lender.kill()
    require_intact(pairs)
    until(lambda: not aqua.attachments, "the attachment has ended")
    await_rest(aqua)
    assert {tensor.location for tensor, _ in pairs} == {Location.HOST}
    require_intact(pairs)
    back = torch.zeros_like(src)
    blocks.page_in(slots, back).wait()
    assert torch.equal(back, src)
    assert aqua.stats().lost_bytes == 0


def test_a_producer_killed_while_it_takes_memory_back_loses_nothing(
    aqua: Aqua, lender: LenderProcess
) -> None:
    pairs = fill(aqua)
    with pairs[0][0].pinned(writes=False):
        lender.reclaim(COUNT)
        until(lambda: aqua.stats().returned_bytes > 0, "the first slab is back")
        lender.kill()
        until(lambda: not aqua.attachments, "the attachment has ended")
    await_rest(aqua)
    require_intact(pairs)


def test_a_frozen_producer_stops_neither_paging_nor_closing(
    aqua: Aqua, lender: LenderProcess
) -> None:
    pairs = fill(aqua)
    lender.freeze()
    require_intact(pairs)
    aqua.close()
    lender.thaw()
    until(lambda: lender.slabs()["free"] == COUNT, "every slab is free again")


@pytest.mark.parametrize(
    "ending",
    ["", "raise SystemExit(3)", "del aqua, tensor, blocks"],
    ids=["falls off the end", "exits", "forgets everything"],
)
def test_an_interpreter_that_ends_gives_every_slab_back_by_itself(
    issuer: TokenIssuer, ending: str
) -> None:
    memory = CountedMemory()
    with lending(issuer, COUNT, transport=memory) as producer:
        terms = grant(issuer, producer.endpoint, COUNT)
        run_python(LEAVING.format(ending=ending), terms.model_dump_json())
        until(lambda: producer.free_bytes == COUNT * SLAB, "every slab is free again")
        assert memory.made_count == COUNT, "returned, not replaced after a death"


def test_a_consumer_that_is_killed_costs_its_slabs_and_they_are_replaced(
    issuer: TokenIssuer,
) -> None:
    ending = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    memory = CountedMemory()
    with lending(issuer, COUNT, transport=memory) as producer:
        terms = grant(issuer, producer.endpoint, COUNT)
        run_python(LEAVING.format(ending=ending), terms.model_dump_json())
        until(lambda: producer.free_bytes == COUNT * SLAB, "every slab is free again")
        assert memory.made_count == 2 * COUNT


def test_a_forked_child_is_told_to_connect_anew_and_disturbs_its_parent_in_nothing(
    aqua: Aqua, lender: LenderProcess
) -> None:
    pairs = fill(aqua)
    ready, told = os.pipe()
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing of pytest may run here.
        answer = "nothing was raised"
        try:
            pairs[0][0].load()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent judges
            answer = f"{type(error).__name__}: {error}"
        os.write(told, answer.encode())
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    try:
        answer = os.read(ready, 4096).decode()
        assert answer.startswith("ConfigError: this Aqua belongs to the parent process")
        lender.reclaim(COUNT)
        lender.await_reclaimed()
        require_intact(pairs)
        aqua.close()
        # The child lives, and neither keeps a channel open nor a slab mapped.
        assert lender.slabs() == {"offered": 0, "free": 0, "leased": 0, "quarantined": 0}
    finally:
        for fd in (release, ready, told, hold):
            os.close(fd)
        os.waitpid(child, 0)


def test_a_child_that_outlives_its_killed_parent_does_not_hide_the_death(
    issuer: TokenIssuer,
) -> None:
    ending = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    signal.pause()\n"
        "signal.pause()\n"
    )
    with lending(issuer, COUNT) as producer:
        terms = grant(issuer, producer.endpoint, COUNT)
        process = start_python(LEAVING.format(ending=ending), terms.model_dump_json())
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            process.wait(HANG_S)
            until(lambda: producer.free_bytes == COUNT * SLAB, "every slab was replaced")
            os.kill(child, 0)  # It is still there.
        finally:
            os.kill(child, 9)
            process.stdout.close()


def start_python(program: str, *arguments: str) -> subprocess.Popen[str]:
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_python(program: str, *arguments: str) -> None:
    process = start_python(program, *arguments)
    process.communicate(timeout=HANG_S)
