"""The tutorial's programs run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import IO, Final

from harness.bounds import HANG_S
from harness.cluster import new_cluster

TUTORIAL: Final = Path(__file__).resolve().parents[3] / "docs/tutorials/first-loan.md"


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)


def read_until(output: IO[str], words: str) -> str:
    """Everything up to the line, or prompt, with `words`."""
    text = ""
    while words not in text:
        letter = output.read(1)
        assert letter, f"ended before {words!r}: {text}"
        text += letter
    return text


def test_the_first_loan_goes_as_the_tutorial_says() -> None:
    lend, borrow = programs()
    with new_cluster() as cluster:
        cluster.start_coordinator()
        environment = os.environ | {
            "AQUA_COORDINATOR_URL": cluster.url,
            "AQUA_SOCKET_DIR": str(cluster.directory),
        }
        producer, consumer = (
            subprocess.Popen(
                [sys.executable, "-u", "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for program in (lend, borrow)
        )
        with producer, consumer:
            assert producer.stdin
            assert producer.stdout
            assert consumer.stdin
            assert consumer.stdout
            try:
                read_until(producer.stdout, "lending 512 MiB")
                read_until(consumer.stdout, "press Enter")
                producer.stdin.write("\n")
                producer.stdin.flush()
                assert "first slab after" in read_until(producer.stdout, "Enter leaves")
                consumer.stdin.write("\n")
                consumer.stdin.flush()
                told = read_until(consumer.stdout, "every byte is there")
                assert "mixed" in told.lower()
                assert consumer.wait(HANG_S) == 0
                producer.stdin.write("\n")
                producer.stdin.flush()
                assert producer.wait(HANG_S) == 0
            finally:
                producer.kill()
                consumer.kill()
