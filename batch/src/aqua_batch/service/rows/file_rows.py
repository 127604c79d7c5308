"""Files as rows: whose they are, where their bytes lie, until when.

A file is *uploading* until all its bytes are safe, then *stored*; what is to go is *deleting* until
its bytes are gone. Only stored files are seen. So a death at any moment leaves a row that says what
is left to do: `doomed_files` finds those of uploads that ended without a word, too.

An output is *uploading* while a worker writes it. Such a row stays for a day even where another
worker has claimed the batch meanwhile: the first may be late rather than dead, and write on. That
of the worker that has the batch stays however old it looks: clocks differ.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import (
    Connection,
    Exists,
    String,
    and_,
    cast,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from aqua_batch.service.refusals import BatchApiError, NoSuchObjectError
from aqua_batch.service.rows.schema import BATCHES, FILES
from aqua_batch.service.wire import FileObject

UPLOAD_S: Final = 86_400
"""Seconds after which an upload or output that has not ended is given up: its client or its server
died. Doubled, its part of a file lies around for two days."""
DOOMED_AT_ONCE: Final = 100
"""Files that one sweep deletes. Doubled, a sweep takes twice as long before batches go on."""


class FileState(StrEnum):
    """How far a file is."""

    UPLOADING = "uploading"
    STORED = "stored"
    DELETING = "deleting"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as its row has it; times are Unix seconds."""

    seq: int
    file_id: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    created_s: int
    expires_s: int | None
    object_key: str
    state: str

    def view(self) -> FileObject:
        """The file as clients see it."""
        return FileObject(
            id=self.file_id,
            bytes=self.size_bytes,
            created_at=self.created_s,
            expires_at=self.expires_s,
            filename=self.filename,
            purpose=self.purpose,
        )


def new_file_id() -> str:
    """A fresh random id, as OpenAI spells them."""
    return f"file-{secrets.token_hex(12)}"


def begin_upload(connection: Connection, tenant: str, now_s: float) -> tuple[str, str]:
    """Note that a file is being uploaded; its id and the key of its bytes."""
    file_id = new_file_id()
    key = f"inputs/{file_id}"
    add_file(connection, file_id, tenant, key, now_s)
    return file_id, key


def output_folder(batch_id: str, generation: int) -> str:
    """Where a worker that has claimed a batch writes its outputs."""
    return f"outputs/{batch_id}/{generation}"


def add_file(
    connection: Connection, file_id: str, tenant: str, object_key: str, now_s: float
) -> None:
    """Note that the bytes of a file may be there from now on, and are not safe yet."""
    connection.execute(
        insert(FILES).values(
            file_id=file_id,
            tenant=tenant,
            filename="",
            purpose="",
            size_bytes=0,
            created_s=int(now_s),
            expires_s=None,
            object_key=object_key,
            state=FileState.UPLOADING,
        )
    )


def end_upload(connection: Connection, file_id: str, **values: Any) -> StoredFile:  # noqa: ANN401 - columns
    """Let a file be seen, with what its upload said about it.

    Raises:
        BatchApiError: The upload took so long that it was given up.
    """
    changed = connection.execute(
        update(FILES)
        .where(FILES.c.file_id == file_id, FILES.c.state == FileState.UPLOADING)
        .values(state=FileState.STORED, **values)
    )
    if changed.rowcount == 0:
        raise BatchApiError("the upload took too long and was given up")
    row = connection.execute(select(FILES).where(FILES.c.file_id == file_id)).mappings().one()
    return StoredFile(**row)


def give_up(connection: Connection, file_ids: Sequence[str]) -> None:
    """Let the sweep delete files that are no longer written, unless they are stored after all."""
    connection.execute(
        update(FILES)
        .where(FILES.c.file_id.in_(file_ids), FILES.c.state == FileState.UPLOADING)
        .values(state=FileState.DELETING)
    )


def find_file(
    connection: Connection, tenant: str, file_id: str, now_s: float, *, holds: bool = False
) -> StoredFile:
    """A file of a tenant.

    Args:
        holds: Whether others that ask so wait for the end of this transaction: who deletes a file,
            and who creates a batch of it.

    Raises:
        NoSuchObjectError: This tenant has none of this id, or it has expired.
    """
    query = select(FILES).where(
        FILES.c.file_id == file_id,
        FILES.c.tenant == tenant,
        FILES.c.state == FileState.STORED,
        or_(FILES.c.expires_s.is_(None), FILES.c.expires_s > now_s),
    )
    found = connection.execute(query.with_for_update() if holds else query)
    row = found.mappings().one_or_none()
    if row is None:
        raise NoSuchObjectError(f"No such File object: {file_id}", param="id")
    return StoredFile(**row)


def list_files(
    connection: Connection,
    tenant: str,
    now_s: float,
    *,
    limit: int,
    after: str | None,
    purpose: str | None,
    is_ascending: bool,
) -> list[StoredFile]:
    """Files of a tenant by age, from after a given one.

    Raises:
        NoSuchObjectError: There is no such `after`.
    """
    query = select(FILES).where(
        FILES.c.tenant == tenant,
        FILES.c.state == FileState.STORED,
        or_(FILES.c.expires_s.is_(None), FILES.c.expires_s > now_s),
    )
    if purpose is not None:
        query = query.where(FILES.c.purpose == purpose)
    if after is not None:
        seq = find_file(connection, tenant, after, now_s).seq
        query = query.where(FILES.c.seq > seq if is_ascending else FILES.c.seq < seq)
    query = query.order_by(FILES.c.seq if is_ascending else FILES.c.seq.desc()).limit(limit)
    return [StoredFile(**row) for row in connection.execute(query).mappings()]


def doom_file(connection: Connection, tenant: str, file_id: str, now_s: float) -> StoredFile:
    """Take a file out of sight; its bytes go next.

    Raises:
        NoSuchObjectError: There is none.
        BatchApiError: A batch still reads it.
    """
    file = find_file(connection, tenant, file_id, now_s, holds=True)
    reader = connection.execute(
        select(BATCHES.c.batch_id).where(
            BATCHES.c.input_file_id == file_id, BATCHES.c.ended_s.is_(None)
        )
    ).first()
    if reader is not None:
        raise BatchApiError(
            f"{file_id} is the input of {reader.batch_id}",
            param="id",
            remedy="Wait for the batch or cancel it.",
        )
    connection.execute(
        update(FILES).where(FILES.c.seq == file.seq).values(state=FileState.DELETING)
    )
    return file


def doomed_files(connection: Connection, now_s: float) -> list[StoredFile]:
    """Some files whose bytes are to go: deleted, expired, or never written to their end.

    The input of a batch that has not ended does not expire, and an output is not given up while the
    batch has the generation that it is written under: the transaction that ends the batch then may
    still store it.
    """
    is_read = exists().where(
        BATCHES.c.input_file_id == FILES.c.file_id, BATCHES.c.ended_s.is_(None)
    )
    query = (
        select(FILES)
        .where(
            or_(
                FILES.c.state == FileState.DELETING,
                and_(FILES.c.expires_s <= now_s, ~is_read),
                and_(
                    FILES.c.state == FileState.UPLOADING,
                    FILES.c.created_s < now_s - UPLOAD_S,
                    ~_can_be_stored(),
                ),
            )
        )
        .limit(DOOMED_AT_ONCE)
    )
    return [StoredFile(**row) for row in connection.execute(query).mappings()]


def _can_be_stored() -> Exists:
    """Whether a file is an output of a batch as it is claimed now; `output_folder` in SQL."""
    generation = cast(BATCHES.c.generation, String)
    folder = literal("outputs/") + BATCHES.c.batch_id + "/" + generation + "/"
    is_below = func.substr(FILES.c.object_key, 1, func.length(folder)) == folder
    return exists().where(BATCHES.c.ended_s.is_(None), is_below)


def drop_files(connection: Connection, files: Sequence[StoredFile]) -> None:
    """Forget files whose bytes are gone."""
    connection.execute(delete(FILES).where(FILES.c.seq.in_([file.seq for file in files])))
