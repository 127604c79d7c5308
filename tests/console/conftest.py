"""A browser and a coordinator for the console's tests, and what they measured at their end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aqua_coordinator.access.tokens import Role, create_token
from harness.browser import Browser
from harness.coordinator_process import CoordinatorProcess, data_dir


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the figures of the tests that passed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.head_line}: {name} {value}")


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened
        # What could not be loaded is a refused token, or a coordinator that was killed.
        complaints = [one for one in opened.complaints() if "Failed to load resource" not in one]
        assert complaints == []


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Role, str]]:
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    return path, {
        role: create_token(path, roles=[role])[0] for role in (Role.OPERATOR, Role.READER)
    }


@pytest.fixture(scope="module")
def coordinator(tokens: tuple[Path, dict[Role, str]]) -> Iterator[CoordinatorProcess]:
    """One that asks for tokens."""
    environment = {"AQUA_TOKENS_FILE": str(tokens[0]), "AQUA_SILENT_MEMBER_S": "3600"}
    with data_dir() as path, CoordinatorProcess(path, port=0, **environment) as running:
        yield running
