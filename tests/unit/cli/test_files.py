"""Files appear whole or not at all, with the mode that was there."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import pytest

from aqua_cli import replacing, write_bytes, write_json, write_text
from aqua_protocol import ConfigError
from aqua_protocol.leases import Pairing


def test_a_file_is_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    write_text(path, "één\n")
    assert path.read_text(encoding="utf-8") == "één\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_mode_of_the_umask_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    before = os.umask(0o027)
    try:
        write_text(path, "new")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    write_text(path, "newer")
    assert path.stat().st_mode & 0o777 == 0o604
    write_text(path, "secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half of the new", None])  # type: ignore[list-item] # the failure
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_a_name_that_ends_in_gz_is_compressed_to_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    for path in (first, second):
        write_json(path, {"a": [1, 2]})
    assert json.loads(gzip.decompress(first.read_bytes())) == {"a": [1, 2]}
    assert first.read_bytes() == second.read_bytes()


def test_a_model_is_written_by_its_own_rules(tmp_path: Path) -> None:
    path = tmp_path / "pairing.json"
    pairing = Pairing(consumer_id="c", producers=["p"])
    write_json(path, pairing)
    assert Pairing.model_validate_json(path.read_bytes()) == pairing


def test_a_number_that_json_has_not_is_refused_before_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not any(tmp_path.iterdir())


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.txt"
    link.symlink_to("real/plan.txt")
    write_text(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "real/plan.txt").read_text() == "text"


def test_what_cannot_be_replaced_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, b"through")
    reader.join(10)
    assert read == [b"through"]
    assert pipe.is_fifo()


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*plan") as raised:
        write_text(tmp_path / "missing" / "plan.txt", "text")
    assert "folder" in raised.value.remedy
