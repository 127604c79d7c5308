"""Who a member says it is."""

from __future__ import annotations

import pytest

import aqualib
from aqua_protocol import ConfigError
from aqualib.settings import require_name


@pytest.mark.parametrize("name", ["llm-0.node-3", "GPU:a_b", "x", "a" * 128])
def test_what_the_books_can_hold_is_a_name(name: str) -> None:
    assert require_name("model", name) == name


@pytest.mark.parametrize("name", ["", "meta/Llama-3-8B", "-a", "a-", "a b", "a\n", "a" * 129])
def test_what_they_cannot_hold_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name") as refusal:
        require_name("model", name)
    assert "for example" in str(refusal.value.remedy)


def test_connecting_and_lending_refuse_a_name_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="model 'meta/Llama'"):
        aqualib.connect(device="cpu", model="meta/Llama")
    with (
        pytest.raises(ConfigError, match="model 'meta/Llama'"),
        aqualib.open_producer(device="cpu", model="meta/Llama"),
    ):
        pass
