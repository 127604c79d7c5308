"""Settings of a batch service: what is wrong is said so that one can mend it."""

from __future__ import annotations

import pytest

from aqua_batch.service.settings import load_batch_settings
from aqua_protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ((), "AQUA_BATCH_ENGINES: name an engine, as in --engine http://127.0.0.1:8000"),
        (("http://one:1", "ftp://x"), "AQUA_BATCH_ENGINES: number 2 is no URL such as http://"),
        (("http://me:secret@one:1",), "AQUA_BATCH_ENGINES: number 1 is no URL such as http://"),
    ],
)
def test_engines_that_are_no_good_are_told_in_a_sentence(
    engines: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_batch_settings(engines=engines)
    assert caught.value.message.startswith(said)
    assert "secret" not in caught.value.message


def test_engines_are_divided_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_BATCH_ENGINES", "http://one:1, dns+http://llm.gpu.svc:8000")
    assert load_batch_settings().engines == ("http://one:1", "dns+http://llm.gpu.svc:8000")
