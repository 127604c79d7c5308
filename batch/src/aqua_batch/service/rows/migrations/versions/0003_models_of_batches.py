"""The model that all requests of a batch name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("model", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("batches", "model")
