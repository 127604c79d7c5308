"""tiktoken as users have it: with an encoding, without the network, and not at all.

tiktoken downloads OpenAI's encodings when they are first used. An encoding of one's own is a
plugin, a module in the namespace `tiktoken_ext`; a small one is written here and loaded as any
other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

PLUGIN: Final = """
def tiny():
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {b"he": 256, b"ll": 257, b"hell": 258, b"hello": 259, b" w": 260}
    return {
        "name": "tiny",
        "pat_str": r"\\s?\\S+|\\s+",
        "mergeable_ranks": ranks,
        "special_tokens": {"<|end|>": 300},
    }


ENCODING_CONSTRUCTORS = {"tiny": tiny}
"""

ROW: Final = {
    "custom_id": "a",
    "url": "/v1/completions",
    "body": {"prompt": "hello", "max_tokens": 2},
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "plugins" / "tiktoken_ext"
    folder.mkdir(parents=True)
    (folder / "tiny.py").write_text(PLUGIN)
    return {
        **os.environ,
        "PYTHONPATH": str(folder.parent),
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"),
        # Nobody listens there: as on a machine without the network.
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }


def python(
    code: str, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


CLI: Final = "from aqua_batch.cli import main; main()"


def order(tmp_path: Path, name: str) -> list[str]:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(ROW))
    return ["order", str(file), "-o", str(tmp_path / "out.jsonl"), "--tokenizer", name, "--json"]


def test_a_tiktoken_encoding_gives_its_exact_token_ids(environment: dict[str, str]) -> None:
    code = """
import json
from aqua_batch.tokens import load_tokenizer
words = load_tokenizer("tiny")
chat = words.chat([{"role": "user", "content": "hello"}])
texts = [words.text(each) for each in ("hello world", "hello <|end|>", "")]
print(json.dumps([words.name, words.exact, texts, chat]))
"""
    done = python(code, environment)
    assert done.returncode == 0, done.stderr
    name, exact, texts, chat = json.loads(done.stdout)
    assert (name, exact) == ("tiktoken:tiny", True)
    # The name of a special token in a user's text is text, not the token.
    assert texts == [[259, 260, *b"orld"], [259, *b" <|end|>"], []]
    # "user:", " hello", a line end, "assistant:"
    assert chat == [*b"user: ", 259, *b"\nassistant:"]


def test_a_batch_is_planned_with_the_tokens_of_a_tiktoken_encoding(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = python(CLI, environment, *order(tmp_path, "tiny"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokenizer"] == {"name": "tiktoken:tiny", "exact": True}
    assert report["prompt_tokens"] == 1
    assert "bytes" not in done.stderr


def test_an_encoding_that_cannot_be_downloaded_is_one_clear_line(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = python(CLI, environment, *order(tmp_path, "cl100k_base"))
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert "tiktoken could not load 'cl100k_base'" in error["message"]
    assert "downloads encodings on first use" in error["remedy"]
    assert "Traceback" not in done.stderr


def test_without_tiktoken_the_error_says_how_to_get_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code = f"import sys; sys.modules['tiktoken'] = None; {CLI}"
    done = python(code, environment, *order(tmp_path, "cl100k_base"))
    assert done.returncode == 2
    assert "pip install 'aqua-batch[tiktoken]'" in json.loads(done.stdout)["error"]["remedy"]
    assert "Traceback" not in done.stderr
