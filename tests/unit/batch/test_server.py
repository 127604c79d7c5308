"""What the service's HTTP server keeps to."""

from __future__ import annotations

from pathlib import Path

import httpx

from aqua_batch.service.app import BatchService
from aqua_batch.service.server import BatchServer
from aqua_batch.service.settings import load_batch_settings


def test_an_idle_connection_is_kept_for_longer_than_httpx_keeps_it(tmp_path: Path) -> None:
    settings = load_batch_settings(engines=("http://one:1",), files=tmp_path)
    kept_by_clients_s = httpx.Limits().keepalive_expiry
    assert kept_by_clients_s is not None
    kept_s = BatchServer(BatchService(settings)).config.timeout_keep_alive
    assert kept_s > kept_by_clients_s, "else a request may be sent as its connection is closed"
