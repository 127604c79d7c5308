"""What services have in common: their logs."""

from __future__ import annotations

import subprocess
import sys

TELL = """
import logging
from aqua_cli.service import configure_logs
configure_logs("info")
uvicorn = logging.getLogger("uvicorn.error")
for _ in range(1000):
    uvicorn.warning("Invalid HTTP request received.")
uvicorn.error("a fault of ours")
logging.getLogger("some.library").warning("a warning")
"""


def test_nonsense_of_strangers_fills_no_log() -> None:
    told = subprocess.run(
        [sys.executable, "-c", TELL], check=True, capture_output=True, text=True
    ).stderr
    assert "Invalid" not in told
    assert "a fault of ours" in told
    assert "a warning" in told
