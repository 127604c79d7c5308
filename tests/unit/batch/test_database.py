"""Databases and drivers that the service does not speak are refused by name."""

import pytest

from aqua_batch.service.rows.database import Database
from aqua_protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql+psycopg2://u:hush@h/n", r"postgresql\+psycopg2"),
        ("mysql://u:hush@h/n", "mysql"),
        ("sqlite+aiosqlite:///b.db", "aiosqlite"),
        ("nothing://u:hush@h/n", "AQUA_BATCH_DATABASE_URL"),
        ("no url", "AQUA_BATCH_DATABASE_URL"),
    ],
)
def test_another_database_or_driver_is_refused_before_anything_is_asked(
    url: str, driver: str
) -> None:
    with pytest.raises(ConfigError, match=driver) as caught:
        Database(url)
    assert "hush" not in f"{caught.value} {caught.value.remedy}"
    assert "postgresql+psycopg://" in str(caught.value.remedy)
