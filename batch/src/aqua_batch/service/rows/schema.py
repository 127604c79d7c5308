"""The tables: what survives the death of every process.

A batch's requests are rows from the moment its file has been read until its output file is written;
then the files speak for it and the rows go. The text of a request stays in its file: a row has its
place there. A row's `generation` counts how often it was leased, and an outcome belongs to one
generation (`request_rows` says why).

The migrations of `migrations/` make these tables; a test compares the two.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
)

METADATA: Final = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

SERIAL: Final = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only where the type is INTEGER."""

API_KEYS: Final = Table(
    "api_keys",
    METADATA,
    Column("key_id", String(24), primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("tenant", String(128), nullable=False),
    Column("note", String(256), nullable=False),
    Column("created_s", BigInteger, nullable=False),
)

QUOTAS: Final = Table(
    "quotas",
    METADATA,
    Column("tenant", String(128), primary_key=True),
    Column("stored_bytes", BigInteger),
    Column("open_requests", BigInteger),
    Column("requests_per_minute", Integer),
)

FILES: Final = Table(
    "files",
    METADATA,
    Column("seq", SERIAL, primary_key=True),
    Column("file_id", String(64), nullable=False, unique=True),
    Column("tenant", String(128), nullable=False),
    Column("filename", String(256), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger),
    Column("object_key", String(256), nullable=False),
    Column("state", String(16), nullable=False),
)

BATCHES: Final = Table(
    "batches",
    METADATA,
    Column("seq", SERIAL, primary_key=True),
    Column("batch_id", String(64), nullable=False, unique=True),
    Column("tenant", String(128), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("completion_window", String(16), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("input_key", String(256), nullable=False),
    Column("model", String),
    Column("status", String(16), nullable=False, index=True),
    Column("ending", String(16), nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("in_progress_s", BigInteger),
    Column("expires_s", BigInteger, nullable=False),
    Column("finalizing_s", BigInteger),
    Column("cancelling_s", BigInteger),
    Column("ended_s", BigInteger),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("output_ttl_s", BigInteger),
    Column("labels", JSON, nullable=False),
    Column("errors", JSON, nullable=False),
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("worker", String(32)),
    Column("generation", Integer, nullable=False),
)

REQUESTS: Final = Table(
    "requests",
    METADATA,
    Column("batch", BigInteger, ForeignKey("batches.seq"), primary_key=True, autoincrement=False),
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", String, nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("size", Integer, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("worker", String(32)),
    Column("attempts", Integer, nullable=False),
    Column("not_before_s", Float, nullable=False),
    Index("ix_requests_feed", "batch", "state", "rank"),
)

OUTCOMES: Final = Table(
    "outcomes",
    METADATA,
    Column("batch", BigInteger, ForeignKey("batches.seq"), primary_key=True, autoincrement=False),
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("is_answer", Boolean, nullable=False),
    Column("record", LargeBinary, nullable=False),
)

WORKERS: Final = Table(
    "workers",
    METADATA,
    Column("worker", String(32), primary_key=True),
    Column("alive_until_s", Float, nullable=False),
)
