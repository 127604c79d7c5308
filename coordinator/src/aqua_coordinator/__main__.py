"""`python -m aqua_coordinator`."""

from __future__ import annotations

from aqua_coordinator.cli import main

main()
