"""Parts of an object: whatever lies between them, in whatever order they are asked for."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from aqua_batch.service.files.objects import NEAR_BYTES, MissingObjectError, ObjectStore


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"{request.param}://{tmp_path}")


def test_parts_come_in_the_order_asked_for(store: ObjectStore) -> None:
    content = Random(0).randbytes(20 * NEAR_BYTES)
    with store.create("a") as file:
        file.write(content)
    near, far = NEAR_BYTES, 3 * NEAR_BYTES
    places = [
        (5 * NEAR_BYTES, 7),
        (0, 4),
        (4 + near, 2),  # As far as is read with the one before.
        (6 + far, 100),
        (5 * NEAR_BYTES, 7),  # Twice, and within another.
        (5 * NEAR_BYTES + 3, 2),
        (len(content) - 1, 1),
        (9, 0),
    ]
    assert store.ranges("a", places) == [content[at : at + size] for at, size in places]
    assert store.ranges("a", []) == []


def test_what_is_far_from_all_parts_is_not_read(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    far = 1 << 20
    with store.create("a") as file:
        file.write(bytes(20 * far))
    places = [(number * far, 10) for number in range(20)]
    before = bytes_read()
    store.ranges("a", places)
    assert bytes_read() - before < far


def bytes_read() -> int:
    """Bytes that this process has had from files, by Linux."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_of_what_is_not_there_there_are_no_parts(store: ObjectStore) -> None:
    with pytest.raises(MissingObjectError):
        store.ranges("lost", [(0, 1)])
