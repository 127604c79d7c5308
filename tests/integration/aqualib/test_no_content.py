"""What is paged shows up in no log, no error, no report and no representation."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import pytest
import torch

from aqua_protocol import ChecksumMismatchError
from harness.bounds import HANG_S
from harness.consumers import await_rest, consuming
from harness.loans import COUNT, lend
from harness.producers import SLAB

if TYPE_CHECKING:
    from aqualib.producer.producer import Producer
    from harness.raw_consumer import TokenIssuer

PROMPT: Final = b"hunter2 is the password of the reactor. "
SHOWN: Final = ("hunter2", "104, 117, 110", "104 117 110", PROMPT.hex()[:14])
"""The prompt as text, as numbers, as numpy shows them, and in hexadecimal."""


def test_a_prompt_that_is_paged_is_seen_nowhere_else(
    issuer: TokenIssuer, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    value = torch.frombuffer(
        bytearray(PROMPT * (SLAB // len(PROMPT) + 1))[:SLAB], dtype=torch.uint8
    )
    with consuming(is_checking=True) as aqua:
        lend(aqua, issuer, producer)
        tensor = aqua.offload(value)
        blocks = aqua.block_store(SLAB // 4, 8)
        src = value.view(4, SLAB // 4)
        slots, transfer = blocks.page_out(src)
        transfer.wait()
        for slab in aqua.attachments[0].slabs:
            slab.memory.tensor[100] ^= 1
        failures = []
        for access in (tensor.load, lambda: blocks.page_in(slots, torch.zeros_like(src))):
            with pytest.raises(ChecksumMismatchError) as caught:
                access()
            failures.append(caught.value)
        assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
        await_rest(aqua)
        held = (aqua, tensor, blocks, producer, *aqua.attachments, aqua.stats(), aqua.step())
        told = [repr(one) + str(one) for one in (*held, *failures)]
        told += [failure.to_body().model_dump_json() for failure in failures]
    assert caplog.records
    told += [record.getMessage() + str(record.exc_text) for record in caplog.records]
    assert [text for text in told if any(part in text for part in SHOWN)] == []
