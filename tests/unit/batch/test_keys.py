"""API keys that were made elsewhere: a folder is the whole list of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aqua_batch.cli import app
from aqua_batch.service.refusals import ApiKeyError
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.keys import add_key, list_keys, read_key_folder, tenant_of
from aqua_protocol.errors import ConfigError


def key_of(letter: str) -> str:
    return f"sk-aqua-{letter * 12}-{letter * 43}"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path}/batch.db")
    yield opened
    opened.close()


def secret(folder: Path, **keys: str) -> Path:
    """A folder as Kubernetes mounts a Secret: links to a hidden folder, which it swaps."""
    (folder / "..data").mkdir(parents=True)
    for tenant, content in keys.items():
        (folder / "..data" / tenant).write_text(content)
        (folder / tenant).symlink_to(folder / "..data" / tenant)
    return folder


def load(folder: Path, data_dir: Path) -> None:
    done = CliRunner().invoke(app, ["key", "load", str(folder), "--data-dir", str(data_dir)])
    assert done.exit_code == 0, done.output


def test_a_folder_is_the_whole_list_of_what_was_loaded(tmp_path: Path, database: Database) -> None:
    def tenant(key: str) -> str:
        find = partial(tenant_of, authorization=f"Bearer {key}")
        return asyncio.run(database.read(find))

    by_hand, _ = asyncio.run(
        database.write(partial(add_key, tenant="green", note="by hand", now_s=0.0))
    )
    red, blue = key_of("a"), key_of("b")
    first = secret(tmp_path / "first", red=f"{red}\n", blue=f"\n{blue}\n{key_of('c')}")
    for _ in range(2):
        load(first, tmp_path)
        assert [tenant(key) for key in (red, blue, key_of("c"))] == ["red", "blue", "blue"]
    changed = f"{red[:-43]}{'d' * 43}"
    load(secret(tmp_path / "second", red=changed, orange=blue), tmp_path)
    assert [tenant(key) for key in (changed, blue, by_hand)] == ["red", "orange", "green"]
    for gone in (red, key_of("c")):
        with pytest.raises(ApiKeyError):
            tenant(gone)
    assert len(asyncio.run(database.read(list_keys))) == 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"red": f"{key_of('a')}\nsk-aqua-short-secret"}, "line 2 of"),
        ({"red": "sk-other-key"}, "line 1 of"),
        ({"red": key_of("a"), "blue": key_of("a")}, "another tenant's"),
        ({"-red": key_of("a")}, "'-red' is no name of a tenant"),
    ],
)
def test_what_is_no_key_is_refused_by_its_place_and_never_shown(
    tmp_path: Path, keys: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_key_folder(secret(tmp_path / "keys", **keys))
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        read_key_folder(tmp_path / "keys")
