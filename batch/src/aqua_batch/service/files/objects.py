"""Where the bytes of files lie: a folder, or whatever else `fsspec` knows by a URL.

Keys name objects below one root. An object is written once, from start to end, and is only there
for others once a row names it (`file_rows`); so a store needs no renaming and no locks, and an
object store (S3) serves as well as a folder. Nothing here holds more than a piece of an object in
memory. All calls block: they belong into a thread.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import IO, Final, cast

import fsspec.core
from fsspec.implementations.local import LocalFileOpener
from fsspec.spec import AbstractFileSystem
from fsspec.utils import get_protocol, merge_offset_ranges

from aqua_protocol.errors import ConfigError, DataLostError, StoreUnavailableError

PIECE_BYTES: Final = 1 << 20
"""Bytes that are read or written at once: enough that a disk or network is not asked for crumbs.
Doubled, each transfer under way takes another MiB."""

PART_BYTES: Final = 5 << 20
"""Bytes of a part of an object that is written to S3, which takes no smaller ones. A part is kept
until it is full; doubled, each object being written takes 5 MiB more."""


NEAR_BYTES: Final = 16 << 10
"""Bytes between two parts that are read with them: a disk takes some microseconds for so many, and
as long for another call. Doubled, reading what is leased takes up to 16 MiB more of memory."""


class MissingObjectError(DataLostError):
    """An object that a row names is not in the store."""

    code = "object_missing"


class ObjectStore:
    """Objects by key, below one URL.

    Args:
        url: `file:///var/lib/aqua/files`, `s3://bucket/prefix`, `memory://` in tests.

    Raises:
        ConfigError: The URL is of no kind that is installed.
    """

    def __init__(self, url: str) -> None:
        # Folders are made as they are needed; elsewhere listings are looked up anew, since other
        # instances of the service write, too.
        is_local = get_protocol(url) == "file"
        options = {"auto_mkdir": True} if is_local else {"use_listings_cache": False}
        try:
            self._files, root = cast(
                "tuple[AbstractFileSystem, str]",
                fsspec.core.url_to_fs(url, **options),
            )
        except (ValueError, ImportError, TypeError) as error:
            raise ConfigError(
                f"AQUA_BATCH_FILES_URL is no good: {error}",
                remedy="For example file:///var/lib/aqua/files; other kinds need fsspec's package "
                "for them.",
            ) from error
        self._root = root.rstrip("/")

    @contextmanager
    def create(self, key: str) -> Iterator[IO[bytes]]:
        """A new object to write; on its disk when the block has ended, gone if the block failed."""
        try:
            with self._store_errors(), self._open(key, "wb") as file:
                yield file
                file.flush()
                if isinstance(file, LocalFileOpener):  # Closing would leave it to the kernel.
                    os.fsync(file.fileno())
        except BaseException:
            self.delete(key)
            raise

    @contextmanager
    def open(self, key: str) -> Iterator[IO[bytes]]:
        """An object to read."""
        with self._store_errors(), self._open(key, "rb") as file:
            # Some stores' files know no `readline` with a bound.
            buffered = io.BufferedReader(cast("io.RawIOBase", file), PIECE_BYTES)
            try:
                yield buffered
            finally:
                buffered.detach()

    def ranges(self, key: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of an object: the bytes at each (start, size).

        Parts that lie near each other are read as one, and a store behind a network is asked for
        many at once: in BlendServe's order neighbours are anywhere in their file.
        """
        paths, starts, ends = merge_offset_ranges(
            [self._path(key)] * len(places),
            [start for start, _ in places],
            [start + size for start, size in places],
            max_gap=NEAR_BYTES,
        )
        with self._store_errors():
            if self._files.async_impl:
                pieces = self._files.cat_ranges(paths, starts, ends, on_error="raise")
            else:
                pieces = []
                with self._open(key, "rb") as file:
                    for start, end in zip(starts, ends, strict=True):
                        file.seek(start)
                        pieces.append(file.read(end - start))
        found = []
        for start, size in places:
            at = bisect_right(starts, start) - 1
            begin = start - starts[at]
            found.append(pieces[at][begin : begin + size])
        return found

    def delete(self, key: str) -> None:
        """Delete an object, if it is there."""
        with self._store_errors():
            if self._files.exists(self._path(key)):
                self._files.rm(self._path(key))

    def delete_generations(self, prefix: str, *, before: int) -> None:
        """Delete the objects of folders below a prefix whose number is lower.

        Not of higher ones: who is late must not delete what came after it.
        """
        with self._store_errors():
            path = self._path(prefix)
            if self._files.exists(path):
                for found in self._files.find(path):
                    generation = found.removeprefix(f"{path}/").partition("/")[0]
                    if int(generation) < before:
                        self._files.rm(found)

    def _open(self, key: str, mode: str) -> IO[bytes]:
        size = PART_BYTES if mode == "wb" else PIECE_BYTES
        return cast("IO[bytes]", self._files.open(self._path(key), mode, block_size=size))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise MissingObjectError(
                "the store of files has lost an object", remedy="Restore it from a backup."
            ) from None
        except _store_failures() as error:
            said = error.strerror if isinstance(error, OSError) else None
            raise StoreUnavailableError(
                f"the store of files fails: {said or type(error).__name__}",
                remedy="Check its disk and rights, or its network.",
                retry_after_s=1.0,
            ) from error


@cache
def _store_failures() -> tuple[type[Exception], ...]:
    """What stores raise; S3's client, where it is installed, has its own where nothing answers."""
    try:
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return (OSError,)
    return (OSError, BotoCoreError)
