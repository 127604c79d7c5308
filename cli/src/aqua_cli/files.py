"""Files that appear whole or not at all.

A file is written beside its place under another name, synced, and renamed over it: a crash, a full
disk or Ctrl-C leaves the old file or the new one. An existing file keeps its mode. What is not a
regular file (`/dev/stdout`, a pipe) cannot be replaced and is written directly; a symbolic link is
followed. A name that ends in `.gz` is compressed, the same content to the same bytes.
"""

from __future__ import annotations

import gzip
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel


def write_bytes(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Write a file; see `replacing`."""
    with replacing(path, mode=mode) as file:
        file.write(content)


def write_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write a UTF-8 file; see `replacing`."""
    write_bytes(path, text.encode(), mode=mode)


def write_json(
    path: Path, content: BaseModel | dict[str, Any] | list[Any], *, mode: int | None = None
) -> None:
    """Write a document as indented JSON; see `replacing`."""
    from aqua_cli.output import as_json

    write_text(path, as_json(content, indent=2) + "\n", mode=mode)


@contextmanager
def replacing(path: Path, *, mode: int | None = None) -> Iterator[IO[bytes]]:
    """A binary file to write to, which takes the place of `path` when the block ends well.

    Args:
        mode: Permission bits; by default those of the file there, or what the umask leaves.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        before = path.stat() if path.exists() else None
        if before is not None and not stat.S_ISREG(before.st_mode):
            with path.open("wb") as file:
                yield file
            return
        place = path.resolve()
        draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        file = draft.open("xb")
    except OSError as error:
        from aqua_protocol.errors import ConfigError

        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}",
            remedy="Choose a folder that exists and is writable.",
        ) from error
    try:
        with file:
            kept = None if before is None else stat.S_IMODE(before.st_mode)
            if (wanted := kept if mode is None else mode) is not None:
                os.fchmod(file.fileno(), wanted)  # First: what is written may be a secret.
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
                    yield compressed  # type: ignore[misc] # a GzipFile writes bytes as well
            else:
                yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)
    except BaseException:
        with suppress(FileNotFoundError):
            draft.unlink()
        raise
    _sync_folder(place.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
