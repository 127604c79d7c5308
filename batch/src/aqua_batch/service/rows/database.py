"""The connection to the database, and the threads that use it.

Transactions are plain functions of a connection, run off the event loop: SQLite knows no
asynchronous calls (an asyncio driver for it hands every single statement to a thread), so a
transaction is one hop here instead of one for each statement, and PostgreSQL needs no other code.

Writes go one after the other through one thread of this process. SQLite admits one writer anyway;
and what waits for its turn is written together (`dispatch.Recorder`), so a sync of the disk serves
many answers. Reads run in threads of their own and wait for no writer (WAL).

After `write` has returned, its transaction survives the death of this process and of the machine.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from aqua_protocol.errors import ConfigError, StoreUnavailableError
from aqua_protocol.supervision import SerialExecutor

ResultT = TypeVar("ResultT")

BUSY_S: Final = 30.0
"""Seconds that a transaction waits for another process's; ours take milliseconds. Doubled, a writer
that hangs holds the others up for a minute."""
POOL_SIZE: Final = 8
"""Connections to PostgreSQL: the writer and a few readers at once. Doubled, more reads run at once
than a service of one process has threads for."""
MIGRATION_LOCK: Final = 0x41717561
"""Fixed: any number that all services of one PostgreSQL share; this one spells "Aqua"."""
DRIVERS: Final = frozenset({("sqlite", "pysqlite"), ("postgresql", "psycopg")})
"""Databases and their drivers, whose own statements and lists are used (`request_rows`)."""
REMEDY: Final = (
    "For example sqlite:////var/lib/aqua/batch.db, or "
    "postgresql+psycopg://user:password@host/name (the extra `postgres`)."
)
MIGRATIONS: Final = Path(__file__).with_name("migrations")


class Database:
    """One database, opened and migrated to the newest schema.

    Args:
        url: Of SQLAlchemy: `sqlite:////var/lib/aqua/batch.db`, `postgresql+psycopg://host/name`.

    Raises:
        ConfigError: The URL is no good, its driver is not installed, or the schema is of a newer
            version than this program.
        StoreUnavailableError: The database does not answer.
    """

    def __init__(self, url: str) -> None:
        self._engine = _open(url)
        self._writes = self._engine.execution_options(aqua_writes=True)
        self._writer = SerialExecutor("batch-database")
        try:
            self._transaction(self._writes, _migrate)
        except SQLAlchemyError as error:
            raise StoreUnavailableError(
                f"the database does not answer: {type(error).__name__}",
                remedy="Check AQUA_BATCH_DATABASE_URL, and that the database runs.",
            ) from error

    async def read(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """Run a transaction that only reads.

        Raises:
            StoreUnavailableError: The database does not answer.
        """
        return await asyncio.to_thread(self._transaction, self._engine, work)

    async def write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """Run a transaction that may write, after those of this process that were there before.

        Raises:
            StoreUnavailableError: The database does not answer; nothing was written, or all of it
                was and the answer got lost.
        """
        submitted = self._writer.submit(partial(self._transaction, self._writes, work))
        return await asyncio.wrap_future(submitted)

    def close(self) -> None:
        """Finish what was submitted, and disconnect. Harmless when repeated."""
        self._writer.shutdown()
        self._engine.dispose()

    @staticmethod
    def _transaction(engine: Engine, work: Callable[[Connection], ResultT]) -> ResultT:
        try:
            with engine.begin() as connection:
                return work(connection)
        except DBAPIError as error:
            # Without the statement, whose parameters may be prompts and answers.
            raise StoreUnavailableError(
                f"the database refused a transaction: {type(error.orig).__name__}",
                remedy="Try again; the service's log of this moment may say more.",
                retry_after_s=1.0,
            ) from None


def _open(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if (driver := (parsed.get_backend_name(), parsed.get_driver_name())) not in DRIVERS:
            raise ConfigError(
                f"AQUA_BATCH_DATABASE_URL names {'+'.join(driver)}: not spoken here",
                remedy=REMEDY,
            )
        if parsed.get_backend_name() != "sqlite":
            return create_engine(parsed, pool_size=POOL_SIZE, pool_pre_ping=True)
        if parsed.database is not None:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(parsed, connect_args={"timeout": BUSY_S, "check_same_thread": False})
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise ConfigError(
            f"AQUA_BATCH_DATABASE_URL is no good: {type(error).__name__}",
            remedy=REMEDY,
        ) from error
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # Python would begin transactions where it sees fit.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and then writes is refused if another wrote in between.
    writes = connection.get_execution_options().get("aqua_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(connection: Connection) -> None:
    """Bring the tables to the newest schema; one service at a time."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
    command.upgrade(alembic_config(connection), "head")


def alembic_config(connection: Connection) -> Config:
    """What Alembic needs to know: where the migrations are, and the connection to use."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS))
    return config
