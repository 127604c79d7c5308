"""The batch commands against what is no batch service: told in a sentence, whatever answers."""

from __future__ import annotations

import pytest

from aqua_batch.service.client import BatchClient
from aqua_protocol.errors import ConfigError
from harness.scripted_server import Answer, ScriptedServer


@pytest.mark.parametrize(
    "answer",
    [b"", b"<html>", b"[]", b"{}", b'{"data": {"result": []}}', b'{"data": [{}]}', b"[" * 100_000],
)
def test_an_answer_of_another_service_is_told(answer: bytes) -> None:
    with ScriptedServer(lambda _: Answer(body=answer)) as server, BatchClient(server.url) as client:
        with pytest.raises(ConfigError, match="does not answer as a batch service"):
            client.list(1)
        with pytest.raises(ConfigError, match="does not answer as a batch service"):
            client.retrieve("batch_0")


def test_an_address_or_key_that_none_can_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        BatchClient("http://[::1")
    with pytest.raises(ConfigError, match="bearer token"):
        BatchClient("http://127.0.0.1:9", "kéy")
