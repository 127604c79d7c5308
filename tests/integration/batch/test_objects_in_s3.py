"""Files of the batch service in S3, over the wire: moto's server in a process of its own."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING, Final

import fsspec
import pytest

from aqua_batch.service.files.objects import NEAR_BYTES, MissingObjectError, ObjectStore
from aqua_protocol.errors import StoreUnavailableError
from harness.bounds import HANG_S
from harness.program import Program, say

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB: Final = 1 << 20
LINE: Final = b"x" * 1023 + b"\n"
LARGE_MIB: Final = 96
MAX_GROWTH_MIB: Final = 48
"""Half of the object: parts and pieces under way, threads and pools of the client."""


def serve(_: str) -> None:
    """S3 on a free port, which is told, until standard input ends."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    say(server.get_host_and_port()[1])
    input()


def stream(url: str) -> None:
    """Write a large object and read it line by line; tells lines, sums and growth in MiB."""
    store = ObjectStore(url)
    with store.create("small") as file:  # Whatever is loaded once is loaded now.
        file.write(LINE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with store.create("large") as file:
        for _ in range(LARGE_MIB):
            file.write(LINE * 1024)
    count = 0
    with store.open("large") as file:
        while line := file.readline(2 * len(LINE)):
            assert line == LINE
            count += 1
    say([count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024])


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    with Program(serve, "", within_s=HANG_S) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.answer()}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        yield server
        fsspec.filesystem("s3").clear_instance_cache()


def test_objects_in_s3_are_those_of_a_folder(s3: Program) -> None:
    store, other = ObjectStore("s3://bucket/aqua"), ObjectStore("s3://bucket/aqua")
    with store.create("batch/1/a") as file:
        file.write(b"one\ntwo\n")
    with other.open("batch/1/a") as file:
        assert file.readline(100) == b"one\n"
    assert store.ranges("batch/1/a", [(4, 3), (0, 3)]) == [b"two", b"one"]
    with store.create("far") as file:
        file.write(b"one".ljust(3 * NEAR_BYTES) + b"two")
    assert store.ranges("far", [(3 * NEAR_BYTES, 3), (0, 3)]) == [b"two", b"one"]
    with contextlib.suppress(ZeroDivisionError), store.create("batch/1/b") as file:
        file.write(b"half")
        raise ZeroDivisionError
    with pytest.raises(MissingObjectError), store.open("batch/1/b") as file:
        file.read()
    for generation in (2, 3, 10):
        with store.create(f"outputs/{generation}/c") as file:
            file.write(b"c")
    store.delete_generations("outputs", before=3)
    with pytest.raises(MissingObjectError), other.open("outputs/2/c") as file:
        file.read()
    assert other.ranges("outputs/10/c", [(0, 1)]) == [b"c"]
    with other.create("batch/1/a") as file:
        file.write(b"anew")
    store.delete("batch/1/a")
    store.delete("batch/1/a")
    with pytest.raises(MissingObjectError), other.open("batch/1/a") as file:
        file.read()
    assert other.ranges("outputs/3/c", [(0, 1)]) == [b"c"]
    s3.kill()
    with pytest.raises(StoreUnavailableError, match="the store of files fails"):
        store.delete("outputs/3/c")


@pytest.mark.slow
def test_a_large_object_goes_through_little_memory(s3: Program) -> None:
    with Program(stream, "s3://bucket/aqua", within_s=HANG_S) as program:
        count, growth_mib = program.answer()
    assert count == LARGE_MIB * 1024
    assert growth_mib < MAX_GROWTH_MIB
