"""Batches as rows: what may happen to one, and who works on it.

    validating -> in_progress -> finalizing -> completed
         |             |-> finalizing -> expired
         |             `-> cancelling -> cancelled
         `-> failed

Reading a batch's input and writing its output is a worker's: `claim_batch` gives it to one that
lives, with a new generation, and what that worker writes later counts only while the batch still
has this generation. A cancelled or expired batch has its waiting and running requests withdrawn in
the same transaction, so a late answer finds that nothing waits for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, case, delete, func, insert, or_, select, update

from aqua_batch.service.refusals import BatchApiError, NoSuchObjectError
from aqua_batch.service.rows.request_rows import RequestState, alive_workers, withdraw_requests
from aqua_batch.service.rows.schema import BATCHES, OUTCOMES, REQUESTS
from aqua_batch.service.wire import BatchErrorList, BatchObject, RequestCounts


class BatchStatus(StrEnum):
    """OpenAI's statuses."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


TO_WORK_ON: Final = (BatchStatus.VALIDATING, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
"""What a worker claims: an input to read, or an output to write."""
TO_EXPIRE: Final = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch as its row has it; times are Unix seconds.

    Attributes:
        ending: The status that it will have once its output is written.
        ended_s: When it got its last status.
        model: The one that all its requests name; None before they are read, or where they name
            several.
        labels: The client's metadata.
        errors: Faults of the input.
        worker, generation: Who reads its input or writes its output, and for the how manieth time.
    """

    seq: int
    batch_id: str
    tenant: str
    endpoint: str
    completion_window: str
    input_file_id: str
    input_key: str
    model: str | None
    status: str
    ending: str
    created_s: int
    in_progress_s: int | None
    expires_s: int
    finalizing_s: int | None
    cancelling_s: int | None
    ended_s: int | None
    output_file_id: str | None
    error_file_id: str | None
    output_ttl_s: int | None
    labels: dict[str, str]
    errors: list[dict[str, Any]]
    total: int
    completed: int
    failed: int
    worker: str | None
    generation: int

    def view(self) -> BatchObject:
        """The batch as clients see it."""
        ended = {f"{self.status}_at": self.ended_s} if self.ended_s is not None else {}
        return BatchObject.model_validate(
            {
                "id": self.batch_id,
                "endpoint": self.endpoint,
                "errors": BatchErrorList.model_validate({"data": self.errors})
                if self.errors
                else None,
                "input_file_id": self.input_file_id,
                "completion_window": self.completion_window,
                "status": self.status,
                "output_file_id": self.output_file_id,
                "error_file_id": self.error_file_id,
                "created_at": self.created_s,
                "in_progress_at": self.in_progress_s,
                "expires_at": self.expires_s,
                "finalizing_at": self.finalizing_s,
                "cancelling_at": self.cancelling_s,
                "request_counts": RequestCounts(
                    total=self.total, completed=self.completed, failed=self.failed
                ),
                "metadata": self.labels or None,
                **ended,
            }
        )


def create_batch(connection: Connection, **values: Any) -> BatchJob:  # noqa: ANN401 - columns
    """Add a batch, to be validated."""
    batch_id = f"batch_{secrets.token_hex(12)}"
    blank = {"errors": [], "total": 0, "completed": 0, "failed": 0, "generation": 0}
    connection.execute(
        insert(BATCHES).values(
            batch_id=batch_id,
            status=BatchStatus.VALIDATING,
            ending=BatchStatus.COMPLETED,
            **blank,
            **values,
        )
    )
    return find_batch(connection, str(values["tenant"]), batch_id)


def find_batch(connection: Connection, tenant: str, batch_id: str) -> BatchJob:
    """A batch of a tenant.

    Raises:
        NoSuchObjectError: This tenant has none of this id.
    """
    query = select(BATCHES).where(BATCHES.c.batch_id == batch_id, BATCHES.c.tenant == tenant)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise NoSuchObjectError(f"No batch found with id '{batch_id}'", param="batch_id")
    return BatchJob(**row)


def list_batches(
    connection: Connection, tenant: str, *, limit: int, after: str | None
) -> list[BatchJob]:
    """Batches of a tenant, newest first, from after a given one.

    Raises:
        NoSuchObjectError: There is no such `after`.
    """
    query = select(BATCHES).where(BATCHES.c.tenant == tenant)
    if after is not None:
        query = query.where(BATCHES.c.seq < find_batch(connection, tenant, after).seq)
    query = query.order_by(BATCHES.c.seq.desc()).limit(limit)
    return [BatchJob(**row) for row in connection.execute(query).mappings()]


def cancel_batch(connection: Connection, tenant: str, batch_id: str, now_s: float) -> BatchJob:
    """Withdraw what has not been answered; what has been will be in the output.

    Raises:
        NoSuchObjectError: There is none.
        BatchApiError: All its requests have ended already.
    """
    batch = find_batch(connection, tenant, batch_id)
    if batch.status == BatchStatus.CANCELLING:
        return batch
    if batch.status not in TO_EXPIRE:
        raise BatchApiError(f"Cannot cancel a batch with status '{batch.status}'")
    if not _end_early(connection, batch, BatchStatus.CANCELLING, BatchStatus.CANCELLED, now_s):
        raise BatchApiError("the batch has just ended")
    return find_batch(connection, tenant, batch_id)


def expire_batches(connection: Connection, now_s: float) -> int:
    """Withdraw what batches whose window is over have left; how many batches there were."""
    query = select(BATCHES).where(BATCHES.c.status.in_(TO_EXPIRE), BATCHES.c.expires_s <= now_s)
    query = query.order_by(BATCHES.c.seq)  # In the order of locks.
    late = [BatchJob(**row) for row in connection.execute(query).mappings()]
    return sum(
        _end_early(connection, each, BatchStatus.FINALIZING, BatchStatus.EXPIRED, now_s)
        for each in late
    )


def _end_early(
    connection: Connection, batch: BatchJob, status: BatchStatus, ending: BatchStatus, now_s: float
) -> bool:
    times: dict[str, Any] = {"finalizing_s": int(now_s)}
    if status is BatchStatus.CANCELLING:
        times = {"cancelling_s": int(now_s)}
    changed = connection.execute(
        update(BATCHES)
        .where(BATCHES.c.seq == batch.seq, BATCHES.c.status == batch.status)
        # Another generation: a worker that still reads the input adds nothing any more.
        .values(
            status=status, ending=ending, worker=None, generation=BATCHES.c.generation + 1, **times
        )
    )
    if changed.rowcount:
        withdraw_requests(connection, batch.seq)
    return bool(changed.rowcount)


def claim_batch(
    connection: Connection, worker: str, now_s: float, served: Sequence[str] = ()
) -> BatchJob | None:
    """Give this worker a batch that no other reads or writes, if there is one.

    Tenants take turns, each with its oldest batch: one that has few does not wait for all of one
    that has many. What a worker has itself counts as free: one that claims works on nothing, so it
    never learnt that it had that, or could not give it back.

    Args:
        served: Tenants by when this worker had a batch of theirs, the longest ago first; those
            that are not named come before them.
    """
    free = or_(
        BATCHES.c.worker.is_(None),
        BATCHES.c.worker == worker,
        BATCHES.c.worker.not_in(alive_workers(now_s)),
    )
    turns = {tenant: turn for turn, tenant in enumerate(served, 1)}
    turn = [case(turns, value=BATCHES.c.tenant, else_=0)] if turns else []
    query = (
        select(BATCHES.c.seq)
        .where(BATCHES.c.status.in_(TO_WORK_ON), free)
        .order_by(*turn, BATCHES.c.seq)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    seq = connection.execute(query).scalar_one_or_none()
    if seq is None:
        return None
    connection.execute(
        update(BATCHES)
        .where(BATCHES.c.seq == seq)
        .values(worker=worker, generation=BATCHES.c.generation + 1)
    )
    if _status_of(connection, seq) == BatchStatus.VALIDATING:  # A dead worker's half.
        _drop_requests(connection, seq)
    row = connection.execute(select(BATCHES).where(BATCHES.c.seq == seq)).mappings().one()
    return BatchJob(**row)


def _status_of(connection: Connection, seq: int) -> str:
    return str(connection.execute(select(BATCHES.c.status).where(BATCHES.c.seq == seq)).scalar())


def release_batch(connection: Connection, batch: BatchJob) -> None:
    """Let another worker, or this one later, claim a batch that could not be worked on."""
    connection.execute(
        update(BATCHES)
        .where(BATCHES.c.seq == batch.seq, BATCHES.c.generation == batch.generation)
        .values(worker=None)
    )


def holds(connection: Connection, batch: BatchJob) -> bool:
    """Whether the batch is still as it was claimed; keeps it so until the transaction ends."""
    query = select(BATCHES.c.generation).where(BATCHES.c.seq == batch.seq).with_for_update()
    return bool(connection.execute(query).scalar_one() == batch.generation)


def begin_batch(
    connection: Connection,
    batch: BatchJob,
    model: str | None,
    faults: list[dict[str, Any]],
    now_s: float,
) -> None:
    """Let a batch run, all of whose requests are there; a bad line counts as failed."""
    state = REQUESTS.c.state
    rows = connection.execute(select(state).where(REQUESTS.c.batch == batch.seq)).scalars().all()
    ended = sum(each == RequestState.ENDED for each in rows)
    is_over = ended == len(rows)
    connection.execute(
        update(BATCHES)
        .where(BATCHES.c.seq == batch.seq)
        .values(
            status=BatchStatus.FINALIZING if is_over else BatchStatus.IN_PROGRESS,
            in_progress_s=int(now_s),
            finalizing_s=int(now_s) if is_over else None,
            model=model,
            total=len(rows),
            failed=ended,
            errors=faults,
            worker=None,
        )
    )


def fail_batch(
    connection: Connection, batch: BatchJob, faults: list[dict[str, Any]], now_s: float
) -> None:
    """End a batch whose input cannot be run at all."""
    _drop_requests(connection, batch.seq)
    connection.execute(
        update(BATCHES)
        .where(BATCHES.c.seq == batch.seq)
        .values(status=BatchStatus.FAILED, errors=faults, worker=None, ended_s=int(now_s))
    )


def end_batch(
    connection: Connection,
    batch: BatchJob,
    *,
    output_file_id: str | None,
    error_file_id: str | None,
    now_s: float,
) -> None:
    """Give a batch its files and its last status; its rows go, the files have it all."""
    _drop_requests(connection, batch.seq)
    connection.execute(
        update(BATCHES)
        .where(BATCHES.c.seq == batch.seq)
        .values(
            status=batch.ending,
            ended_s=int(now_s),
            finalizing_s=batch.finalizing_s or int(now_s),
            output_file_id=output_file_id,
            error_file_id=error_file_id,
            worker=None,
        )
    )


def _drop_requests(connection: Connection, seq: int) -> None:
    connection.execute(delete(OUTCOMES).where(OUTCOMES.c.batch == seq))
    connection.execute(delete(REQUESTS).where(REQUESTS.c.batch == seq))


def count_batches(connection: Connection, tenant: str | None = None) -> dict[str, int]:
    """How many batches there are by status: of a tenant, or of all for None."""
    query = select(BATCHES.c.status, func.count()).group_by(BATCHES.c.status)
    if tenant is not None:
        query = query.where(BATCHES.c.tenant == tenant)
    return {str(status): int(count) for status, count in connection.execute(query)}
