"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(length=24), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=128), nullable=False),
        sa.Column("note", sa.String(length=256), nullable=False),
        sa.Column("created_s", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
    )
    op.create_table(
        "batches",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=128), nullable=False),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("completion_window", sa.String(length=16), nullable=False),
        sa.Column("input_file_id", sa.String(length=64), nullable=False),
        sa.Column("input_key", sa.String(length=256), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("ending", sa.String(length=16), nullable=False),
        sa.Column("created_s", sa.BigInteger(), nullable=False),
        sa.Column("in_progress_s", sa.BigInteger(), nullable=True),
        sa.Column("expires_s", sa.BigInteger(), nullable=False),
        sa.Column("finalizing_s", sa.BigInteger(), nullable=True),
        sa.Column("cancelling_s", sa.BigInteger(), nullable=True),
        sa.Column("ended_s", sa.BigInteger(), nullable=True),
        sa.Column("output_file_id", sa.String(length=64), nullable=True),
        sa.Column("error_file_id", sa.String(length=64), nullable=True),
        sa.Column("output_ttl_s", sa.BigInteger(), nullable=True),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("errors", sa.JSON(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("completed", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=32), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_batches")),
        sa.UniqueConstraint("batch_id", name=op.f("uq_batches_batch_id")),
    )
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_batches_status"), ["status"], unique=False)

    op.create_table(
        "files",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("file_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=128), nullable=False),
        sa.Column("filename", sa.String(length=256), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_s", sa.BigInteger(), nullable=False),
        sa.Column("expires_s", sa.BigInteger(), nullable=True),
        sa.Column("object_key", sa.String(length=256), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_files")),
        sa.UniqueConstraint("file_id", name=op.f("uq_files_file_id")),
    )
    op.create_table(
        "workers",
        sa.Column("worker", sa.String(length=32), nullable=False),
        sa.Column("alive_until_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("worker", name=op.f("pk_workers")),
    )
    op.create_table(
        "outcomes",
        sa.Column("batch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("line", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("is_answer", sa.Boolean(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["batch"], ["batches.seq"], name=op.f("fk_outcomes_batch")),
        sa.PrimaryKeyConstraint("batch", "line", "generation", name=op.f("pk_outcomes")),
    )
    op.create_table(
        "requests",
        sa.Column("batch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("line", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("custom_id", sa.String(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=32), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("not_before_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["batch"], ["batches.seq"], name=op.f("fk_requests_batch")),
        sa.PrimaryKeyConstraint("batch", "line", name=op.f("pk_requests")),
    )
    with op.batch_alter_table("requests", schema=None) as batch_op:
        batch_op.create_index("ix_requests_feed", ["batch", "state", "rank"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("requests", schema=None) as batch_op:
        batch_op.drop_index("ix_requests_feed")

    op.drop_table("requests")
    op.drop_table("outcomes")
    op.drop_table("workers")
    op.drop_table("files")
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_batches_status"))

    op.drop_table("batches")
    op.drop_table("api_keys")
