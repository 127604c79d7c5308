"""The page while something is away: its coordinator, a member, a token that is good."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from aqua_coordinator.access.tokens import Role, create_token
from harness.browser import Browser, missing_programs, sign_in
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.paper_cluster import PaperCluster

missing = missing_programs()
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"no {' and no '.join(missing)} here"),
    pytest.mark.timeout(600),
]


def test_the_page_finds_a_coordinator_again_that_was_away(browser: Browser) -> None:
    with data_dir() as path:
        first = CoordinatorProcess(path)
        browser.open(f"{first.url}/")
        browser.wait_for("document.getElementById('connection').dataset.state === 'live'")
        first.kill()
        browser.wait_for("document.getElementById('connection').dataset.state === 'away'")
        with CoordinatorProcess(path, port=first.port):
            browser.wait_for("document.getElementById('connection').dataset.state === 'live'")
            # What the page asks of one that is being stopped would be a complaint of its own.
            browser.open("about:blank")
            browser.complaints()


def test_a_coordinator_that_stands_still_is_not_called_live(browser: Browser) -> None:
    with data_dir() as path, CoordinatorProcess(path, port=0) as running:
        browser.open(f"{running.url}/")
        browser.wait_for("document.getElementById('connection').dataset.state === 'live'")
        os.kill(running.process.pid, signal.SIGSTOP)
        try:
            browser.wait_for("document.getElementById('connection').dataset.state === 'away'")
        finally:
            os.kill(running.process.pid, signal.SIGCONT)
        browser.wait_for("document.getElementById('connection').dataset.state === 'live'")
        browser.open("about:blank")
        browser.complaints()


def test_details_of_a_member_that_is_gone_are_not_those_of_another(
    browser: Browser,
) -> None:
    with data_dir() as path:
        environment = {"AQUA_SILENT_MEMBER_S": "3600"}
        with (
            CoordinatorProcess(path, port=0, **environment) as running,
            httpx.Client(base_url=running.url, trust_env=False, timeout=60) as client,
        ):
            PaperCluster(client, 8)
            browser.open(f"{running.url}/")
            browser.wait_for("document.querySelectorAll('button.gpu').length === 8")
            browser.press("g", "Enter")
            browser.wait_for("document.getElementById('details').open")
            browser.press("Escape")
            # As it stands on the page between a member's end and the next look.
            browser.run("document.activeElement.dataset.name = 'sdxl-gone'")
            browser.press("Enter")
            browser.wait_for("document.getElementById('details').open")
            said = browser.run("return document.getElementById('details-body').textContent")
            assert said == "sdxl-goneIt is not in the books any more."
            browser.press("Escape")
        browser.press("Enter")
        browser.wait_for("document.getElementById('details').open")
        said = browser.run("return document.getElementById('details-body').textContent")
        assert "The coordinator does not answer." in said
        browser.open("about:blank")
        browser.complaints()


def test_a_token_that_ends_before_details_are_asked_for_is_asked_for_alone(
    browser: Browser,
) -> None:
    with data_dir() as path:
        file = path / "tokens.json"
        tokens = [create_token(file, roles=[Role.OPERATOR])[0] for _ in range(2)]
        environment = {"AQUA_TOKENS_FILE": str(file), "AQUA_SILENT_MEMBER_S": "3600"}
        header = {"Authorization": f"Bearer {tokens[0]}"}
        with (
            CoordinatorProcess(path, port=0, **environment) as running,
            httpx.Client(
                base_url=running.url, headers=header, trust_env=False, timeout=60
            ) as client,
        ):
            PaperCluster(client, 8)
            browser.open(f"{running.url}/")
            sign_in(browser, tokens[0])
            browser.wait_for("document.querySelectorAll('button.gpu').length === 8")
            browser.run("token = 'aqua_0_0'")
            browser.press("g", "Enter")
            browser.wait_for("document.getElementById('ask').open")
            assert browser.run("return document.getElementById('details').open") is False
            browser.press(tokens[1], "Enter")
            browser.wait_for("document.getElementById('details').open")
            said = browser.run("return document.getElementById('details-title').textContent")
            assert said == "sdxl-000-0"
            browser.open("about:blank")
            browser.complaints()
