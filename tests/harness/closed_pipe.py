"""A reader that leaves before a command has written: `command | head -0`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


def into_closed_pipe(command: Sequence[str], within_s: float) -> subprocess.CompletedProcess[str]:
    """Run it with a standard output that nobody reads; standard error is kept."""
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "wb") as closed:
        return subprocess.run(
            command,
            check=False,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=within_s,
        )
