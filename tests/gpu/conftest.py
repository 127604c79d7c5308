"""The `gpu` tests on the stand-in, where `make gpu STAND_IN=1` asks for it.

That shows whether the tests themselves work. What they say about a GPU, only a GPU says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

from aqua_protocol import TransportKind
from aqua_protocol.errors import TransportUnavailableError
from aqualib.transports import select
from aqualib.transports.base import Transport
from harness.gpu.step import ON_STAND_IN


@pytest.fixture(scope="module", autouse=True)
def _on_stand_in() -> Iterator[None]:
    if not os.environ.get(ON_STAND_IN):
        yield
        return
    from harness.cuda.ipc import CupyOver
    from harness.cuda.stand_in import stand_in

    with stand_in(memory_bytes=8 << 30) as standing:
        cuda = SimpleNamespace(Device=_NoDevice, runtime=CupyOver(standing.machine).runtime)
        with mock.patch.dict(sys.modules, cupy=SimpleNamespace(cuda=cuda)):
            yield


@pytest.fixture(scope="module", params=[TransportKind.CUDA_VMM, TransportKind.CUDA_IPC], ids=str)
def transport(request: pytest.FixtureRequest) -> Transport:
    try:
        return select(request.param)
    except TransportUnavailableError as refusal:
        pytest.skip(str(refusal))


class _NoDevice:
    """`cupy.cuda.Device`."""

    def __init__(self, ordinal: int) -> None:
        del ordinal

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
