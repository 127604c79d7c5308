from __future__ import annotations

import pytest

from aqua_protocol import ConfigError, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64MiB", 64 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("1.5GB", 1_500_000_000),
        ("2 tib", 2 << 40),
        ("1024 TiB", 1 << 50),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1.2.3MB", "1 parsec", "0.3B", "1025TiB", "1e9", "9" * 400]
)
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 29, "1.5 GiB"), (5000 << 40, "5000 TiB")],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
