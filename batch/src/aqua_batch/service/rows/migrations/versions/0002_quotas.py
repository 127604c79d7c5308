"""Limits of tenants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "quotas",
        sa.Column("tenant", sa.String(length=128), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("open_requests", sa.BigInteger(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_quotas")),
    )


def downgrade() -> None:
    op.drop_table("quotas")
