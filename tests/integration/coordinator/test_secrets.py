"""Secrets stay out of logs, tracebacks and representations."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Final

import pytest
from pydantic import BaseModel

from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store import open_pool
from aqua_coordinator.store.rows import CurrentBooks
from aqua_demo.processes import DemoCoordinator
from aqua_profiler.spec import ProfileSpec
from aqua_protocol import ConfigError
from aqua_protocol.channel import Hello
from aqua_protocol.leases import LeaseGrant
from aqua_protocol.members import ProducerAck
from aqualib.settings import Settings

SECRET = "hunter2"
SECRET_FIELDS: Final[list[tuple[type[BaseModel], str]]] = [
    (LeaseGrant, "token"),
    (ProducerAck, "capability_key"),
    (Hello, "token"),
]
FAULT = """
import sys
import structlog
from aqua_cli.service import configure_logs
from aqua_coordinator.http.answers import typed
configure_logs("info")
def fail():
    secret = "hunter" + str(1 + 1)
    raise RuntimeError("a fault")
try:
    fail()
except RuntimeError as error:
    typed(error)
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_the_traceback_of_a_fault_shows_no_local_variables(*, terminal: bool) -> None:
    ours, theirs = os.openpty() if terminal else os.pipe()
    subprocess.run([sys.executable, "-c", FAULT], stderr=theirs, check=True)
    os.set_blocking(ours, False)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert "RuntimeError" in shown
    assert "in fail" in shown
    assert SECRET not in shown


def test_no_command_shows_local_variables_when_it_fails() -> None:
    apps = {entry.name: entry.load() for entry in entry_points(group="aqua.commands")}
    assert "coordinator" in apps
    assert not [name for name, app in apps.items() if app.pretty_exceptions_enable]


@pytest.mark.parametrize("url", ["redis://u:hunter2/x@h:1/0", "redis://u:x@h:hunter2/0"])
def test_a_password_that_is_not_encoded_is_not_told(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_pool(url, connect_timeout_s=1, max_connections=1)
    assert SECRET not in f"{caught.value}{caught.value.__cause__}"


def test_nothing_that_holds_a_secret_shows_it() -> None:
    held = [
        CoordinatorSettings.model_validate({"capability_secret": 5 * SECRET, "redis_url": SECRET}),
        Settings.model_validate({"token": SECRET}),
        CurrentBooks("books", SECRET.encode()),
        DemoCoordinator("url", SECRET, SECRET, SECRET),
        *(kind.model_construct(None, **{name: SECRET}) for kind, name in SECRET_FIELDS),
    ]
    assert [one for one in held if SECRET in f"{one!r}{one}"] == []
    assert not ProfileSpec.__dataclass_fields__["token"].repr


def test_a_message_that_does_not_fit_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        Hello.model_validate({"token": SECRET, "surprise": SECRET})
    assert SECRET not in str(caught.value)
