"""The commands of a batch service as users type them, and its tutorial as it is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner, Result

from aqua_batch.cli import app
from aqua_batch.service.client import BatchClient
from aqua_protocol.errors import ConfigError, UnauthenticatedError, UnknownResourceError
from generators.page_commands import blocks
from harness.batch_service import BatchServiceProcess, chat_line
from harness.bounds import HANG_S
from harness.counting_server import CountingServer
from harness.tcp_proxy import ProxyThread

FEW_BYTES: Final = 1 << 13
"""Bytes: more than a request without a file and its answer, less than a piece of a file."""
TUTORIAL: Final = Path(__file__).resolve().parents[3] / "docs/tutorials/batch-api.md"


@pytest.fixture(scope="module")
def engine() -> Iterator[CountingServer]:
    with CountingServer() as engine:
        yield engine


@pytest.fixture(scope="module")
def service(
    engine: CountingServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BatchServiceProcess]:
    with BatchServiceProcess(tmp_path_factory.mktemp("batch"), [engine.url]) as service:
        yield service


def aqua_batch(service: BatchServiceProcess | None, *arguments: str) -> Result:
    url = {"AQUA_BATCH_URL": service.url} if service is not None else {}
    return CliRunner().invoke(app, arguments, env=url)


def test_a_batch_is_submitted_waited_for_and_fetched(
    service: BatchServiceProcess, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(chat_line("a", "fine") + chat_line("b", "refuse this"))
    sent = aqua_batch(service, "submit", str(source), "--wait", "--label", "team=red", "--json")
    assert sent.exit_code == 0, sent.output
    batch = json.loads(sent.stdout)
    assert batch["status"] == "completed"
    assert batch["metadata"] == {"team": "red"}
    assert aqua_batch(service, "fetch", batch["id"], "-o", str(output)).exit_code == 0
    assert json.loads(output.read_text())["custom_id"] == "a"
    assert json.loads((tmp_path / "out.errors.jsonl").read_text())["custom_id"] == "b"
    newest = json.loads(aqua_batch(service, "status", "--limit", "1", "--json").stdout)
    assert [each["id"] for each in newest] == [batch["id"]]
    assert batch["id"] in aqua_batch(service, "status", batch["id"]).stdout
    assert aqua_batch(service, "wait", batch["id"]).exit_code == 0


def test_a_batch_is_cancelled_and_waiting_says_that_it_did_not_complete(
    service: BatchServiceProcess, engine: CountingServer, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(chat_line("a", "hold commands"))
    began = sum(engine.counts()["began"].values())
    batch_id = aqua_batch(service, "submit", str(source)).stdout.split()[0]
    engine.wait_for("began", began + 1)
    assert aqua_batch(service, "cancel", batch_id).exit_code == 0
    assert aqua_batch(service, "wait", batch_id).exit_code == 1
    output = tmp_path / "out.jsonl"
    assert aqua_batch(service, "fetch", batch_id, "-o", str(output)).exit_code == 0
    assert not output.exists()
    assert "batch_cancelled" in (tmp_path / "out.errors.jsonl").read_text()


def test_a_remedy_is_about_what_was_not_found(service: BatchServiceProcess, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(chat_line("a", "b"))
    with BatchClient(service.url) as client:
        file = client.upload(source)
        with pytest.raises(UnknownResourceError, match="batches of /v1/responses are not") as found:
            client.create(file.id, "/v1/responses", "24h", {})
    assert not found.value.remedy
    missing = aqua_batch(service, "status", "batch_0")
    assert isinstance(missing.exception, UnknownResourceError)
    assert missing.exception.remedy == "`aqua batch status` lists batches."


@pytest.mark.parametrize(
    ("wrong", "words", "remedy"),
    [
        (("--endpoint", "/v1/responses"), "batches of /v1/responses are not", "--endpoint"),
        (("--window", "1 day"), "completion_window: must be a number", "Correct --window."),
        (("--window", "31d"), "of at most 30 days", "Correct --window."),
        (("--label", f"{'n' * 65}=v"), "at most 64 characters", "Correct --label."),
        (tuple(x for i in range(17) for x in ("--label", f"{i}=v")), "16 items", "--label"),
    ],
)
def test_what_is_wrong_with_the_options_is_told_before_the_file_is_sent(
    service: BatchServiceProcess,
    tmp_path: Path,
    wrong: tuple[str, ...],
    words: str,
    remedy: str,
) -> None:
    source = tmp_path / "unsent.jsonl"
    source.write_bytes(chat_line("a", "b"))
    refused = aqua_batch(service, "submit", str(source), *wrong)
    assert isinstance(refused.exception, ConfigError)
    assert words in refused.exception.message
    assert remedy in refused.exception.remedy
    assert source.name not in [each.filename for each in service.client().files.list()]


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b"{}\n", "with a url")])
def test_a_file_that_is_no_batch_is_not_sent(
    service: BatchServiceProcess, tmp_path: Path, content: bytes, words: str
) -> None:
    source = tmp_path / "none.jsonl"
    source.write_bytes(content)
    refused = aqua_batch(service, "submit", str(source))
    assert isinstance(refused.exception, ConfigError)
    assert words in refused.exception.message
    assert source.name not in [each.filename for each in service.client().files.list()]


def test_a_wrong_key_is_told_before_the_file_is_sent(
    engine: CountingServer, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(chat_line("a", "x" * 100 * FEW_BYTES))
    place = ("--data-dir", str(tmp_path))
    assert aqua_batch(None, "key", "add", "--tenant", "red", *place).exit_code == 0
    with BatchServiceProcess(tmp_path, [engine.url]) as service, ProxyThread() as proxies:
        proxy = proxies.open(urlsplit(service.url).port or 0)
        url = f"http://127.0.0.1:{proxy.port}"
        refused = aqua_batch(None, "submit", str(source), "--url", url, "--api-key", "wrong")
        assert isinstance(refused.exception, UnauthenticatedError)
        assert 0 < proxy.byte_count < FEW_BYTES


def test_keys_and_quotas_are_kept_in_the_services_database(tmp_path: Path) -> None:
    place = ("--data-dir", str(tmp_path))
    made = aqua_batch(None, "key", "add", "--tenant", "red", *place)
    assert made.stdout.startswith("sk-aqua-")
    (row,) = json.loads(aqua_batch(None, "key", "list", "--json", *place).stdout)
    assert row["tenant"] == "red"
    assert aqua_batch(None, "key", "revoke", row["id"], *place).exit_code == 0
    assert json.loads(aqua_batch(None, "key", "list", "--json", *place).stdout) == []
    assert aqua_batch(None, "quota", "set", "red", "--open-requests", "5", *place).exit_code == 0
    assert json.loads(aqua_batch(None, "quota", "list", "--json", *place).stdout) == [
        {"tenant": "red", "stored_bytes": None, "open_requests": 5, "requests_per_minute": None}
    ]


def test_the_tutorials_program_runs_as_it_is_printed(
    service: BatchServiceProcess, tmp_path: Path
) -> None:
    (program,) = (block.text for block in blocks(TUTORIAL) if block.file == "ask.py")
    ran = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=tmp_path,
        env=os.environ | {"OPENAI_BASE_URL": f"{service.url}/v1"},
    )
    assert "question-2 Why are tokens fenced? was asked" in ran.stdout
