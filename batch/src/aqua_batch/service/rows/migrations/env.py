"""Run by Alembic: applies the migrations on the connection that `database` hands over."""

from __future__ import annotations

from alembic import context

from aqua_batch.service.rows.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
