"""The console in a real headless Chromium, over real coordinators.

One test watches the demo, with real members; the others watch members on paper, of whom there can
be a thousand. What a page must never do (break its policy, put a token into an address, fail in the
browser's eyes) is looked for after every test.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from aqua_coordinator.access.tokens import Role
from aqua_protocol.leases import Pairing, PlacementPlan
from harness.asgi import as_json
from harness.batch_service import BatchServiceProcess
from harness.browser import Browser, missing_programs, sign_in
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.paper_cluster import PaperCluster
from harness.source_tree import ROOT
from harness.store_servers import running_store

if TYPE_CHECKING:
    from sqlalchemy import Connection

AXE: Final = ROOT / ".console-tools" / "axe.min.js"
SHOTS: Final = ROOT / "out" / "console"
LATE_MS: Final = 1000
"""A reclaim is on the screen this long after the books heard of its end, at most; and so long may
a thousand GPUs take to draw."""
LONG_S: Final = "3600"
OPERATOR: Final = "o" * 32

missing = missing_programs()
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"no {' and no '.join(missing)} here"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def http(
    coordinator: CoordinatorProcess, tokens: tuple[Path, dict[Role, str]]
) -> Iterator[httpx.Client]:
    header = {"Authorization": f"Bearer {tokens[1][Role.OPERATOR]}"}
    with httpx.Client(
        base_url=coordinator.url, headers=header, trust_env=False, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="module")
def cluster(http: httpx.Client) -> PaperCluster:
    """Three servers, with a plan whose reason is hostile."""
    made = PaperCluster(http, 24)
    reason = "<img src=x onerror=document.title='run'><script>document.title='run'</script>"
    pairing = Pairing(consumer_id="llm-000-0", producers=["sdxl-000-0"], reason=reason)
    http.put("/v1/placements", json=as_json(PlacementPlan(pairings=[pairing]))).raise_for_status()
    return made


@pytest.fixture
def page(
    browser: Browser,
    coordinator: CoordinatorProcess,
    cluster: PaperCluster,
    tokens: tuple[Path, dict[Role, str]],
) -> Browser:
    """The console, once it has been given a reader's token."""
    browser.open(f"{coordinator.url}/")
    sign_in(browser, tokens[1][Role.READER])
    browser.wait_for("document.querySelectorAll('button.gpu').length === 24")
    return browser


def watch_for_reclaims(browser: Browser) -> None:
    """Let the page note when it first shows each reclaim, by the sentence that tells it."""
    browser.run(
        """
        window.seen = {};
        const look = () => {
          for (const item of document.querySelectorAll("#happened-list li.reclaiming")) {
            if (item.textContent.includes("took back")) window.seen[item.id] ??= Date.now();
          }
        };
        look();
        new MutationObserver(look).observe(document.body, {childList: true, subtree: true});
        """
    )


def seen_after_ms(browser: Browser, event_id: str) -> float:
    """How long after its event a reclaim was on the screen; both are times of this machine."""
    shown_ms = browser.wait_for("window.seen[arguments[0]]", f"e{event_id}")
    return float(shown_ms) - float(event_id.partition("-")[0])


def await_reclaim(url: str, token: str, reclaim_id: str = "") -> dict[str, Any]:
    """Read the event stream from its beginning, as a script does, until a reclaim has ended."""
    headers = {"Authorization": f"Bearer {token}", "Last-Event-ID": "0-0"}
    with (
        httpx.Client(trust_env=False, timeout=300) as client,
        client.stream("GET", f"{url}/v1/events", headers=headers) as answer,
    ):
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if "reclaim" in event and event["reclaim"]["reclaim_id"].endswith(reclaim_id):
                return dict(event)
    raise AssertionError("the stream ended")


def violations(browser: Browser) -> list[str]:
    """What axe finds wrong, in words."""
    assert AXE.is_file(), "make test-console gets it"
    browser.run(AXE.read_text("utf-8") + "\nwindow.axe = axe;")
    found = browser.run_async(
        "const done = arguments[0]; axe.run(document).then((all) => done(all.violations));"
    )
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]


@pytest.mark.parametrize("wrong", ["aqua_0_0", "aqua_0_\u2026"], ids=["unknown", "in no header"])
def test_a_token_is_asked_for_and_gets_into_no_address(
    browser: Browser,
    coordinator: CoordinatorProcess,
    tokens: tuple[Path, dict[Role, str]],
    wrong: str,
) -> None:
    browser.open(f"{coordinator.url}/")
    browser.wait_for("document.getElementById('ask').open")
    browser.press(wrong, "Enter")
    browser.wait_for("document.getElementById('ask-error').textContent.includes('unknown')")
    token = tokens[1][Role.READER]
    sign_in(browser, token)
    addresses = browser.run(
        "return [location.href, ...performance.getEntries().map((entry) => entry.name)]"
    )
    assert not [address for address in addresses if "aqua_" in address]
    assert {httpx.URL(name).host for name in addresses if "://" in name} == {"127.0.0.1"}
    assert browser.run("return document.cookie + localStorage.length") == "0"


def test_a_reclaim_appears_within_a_second_of_its_event(
    page: Browser,
    coordinator: CoordinatorProcess,
    cluster: PaperCluster,
    tokens: tuple[Path, dict[Role, str]],
    record_property: Callable[[str, object], None],
) -> None:
    watch_for_reclaims(page)
    late_ms = []
    for number in range(5):
        name = cluster.reclaim(cluster.producers[number], 12.5)
        event = await_reclaim(coordinator.url, tokens[1][Role.READER], name)
        late_ms.append(seen_after_ms(page, event["event_id"]))
    record_property("seen_after_ms", late_ms)
    assert max(late_ms) < LATE_MS
    page.wait_for("document.querySelectorAll('#reclaim-rows tr').length >= 5")
    assert "13 ms" in page.run("return document.getElementById('reclaim-rows').textContent")
    assert "ended, half within" in page.run(
        "return document.getElementById('reclaims').getAttribute('aria-label')"
    )


def test_the_page_beside_another_coordinator_shows_what_came_through_this_one(
    browser: Browser,
) -> None:
    with running_store() as store, ExitStack() as stack:
        environment = {"AQUA_REDIS_URL": store.url, "AQUA_SILENT_MEMBER_S": LONG_S}
        first, second = (
            stack.enter_context(
                CoordinatorProcess(stack.enter_context(data_dir()), port=0, **environment)
            )
            for _ in range(2)
        )
        client = stack.enter_context(httpx.Client(base_url=first.url, trust_env=False, timeout=60))
        made = PaperCluster(client, 8)
        browser.open(f"{second.url}/")
        browser.wait_for("document.getElementById('connection').dataset.state === 'live'")
        watch_for_reclaims(browser)
        made.reclaim(made.producers[0], 7.5)
        browser.wait_for("Object.keys(window.seen).length === 1")
        first.kill()
        browser.open(f"{second.url}/")
        browser.wait_for("document.querySelectorAll('#reclaim-rows tr').length === 1")


def test_a_thousand_gpus_draw_within_a_second(
    browser: Browser, record_property: Callable[[str, object], None]
) -> None:
    with (
        data_dir() as path,
        CoordinatorProcess(path, AQUA_SILENT_MEMBER_S=LONG_S) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as client,
    ):
        PaperCluster(client, 1000)
        taken_ms = []
        for _ in range(3):
            browser.open(f"{running.url}/")
            browser.wait_for("performance.getEntriesByName('cluster-drawn').length > 0")
            asked_ms, answered_ms, drawn_ms, count, ready_ms = browser.run(
                """
                const name = location.origin + "/v1/console/cluster";
                const entry = performance.getEntriesByName(name)[0];
                return [entry.startTime, entry.responseEnd,
                  performance.getEntriesByName("cluster-drawn")[0].startTime,
                  document.querySelectorAll("button.gpu").length,
                  performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart];
                """
            )
            assert count == 1000
            figures = {"page ready": ready_ms, "asked": asked_ms, "answered": answered_ms}
            record_property("ms after the click", figures | {"drawn": drawn_ms})
            taken_ms.append(drawn_ms - asked_ms)
        assert min(taken_ms) < LATE_MS
        assert browser.run("return document.querySelectorAll('path.link').length") == 250


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_both_schemes_differ(page: Browser, scheme: str) -> None:
    page.prefer(scheme)
    dark = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(16, 19, 21)") == (scheme == "dark")
    page.wait_for("document.querySelectorAll('.chart canvas').length === 2")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(SHOTS / f"{scheme}.png")
    assert violations(page) == []
    page.run("document.querySelector('#reclaim-table').open = true")
    page.press("g", "Enter")
    page.wait_for("document.getElementById('details').open")
    page.screenshot(SHOTS / f"{scheme}-details.png")
    assert violations(page) == []
    page.resize(420, 800)
    page.press("Escape")
    assert violations(page) == []
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def add_batches(folder: Path) -> None:
    """Batches under way of several tenants, in a database that a service is then started on."""
    from sqlalchemy import insert

    from aqua_batch.service.rows.database import Database
    from aqua_batch.service.rows.request_rows import add_worker
    from aqua_batch.service.rows.schema import BATCHES

    now_s = int(time.time())
    fields = ("status", "tenant", "model", "total", "completed", "failed", "begun_h", "window_h")
    rows = [
        ("in_progress", "search", "Qwen3-8B", 50_000, 41_210, 3, 9, 24),
        ("in_progress", "evals", "Llama-3.1-8B", 20_000, 2_480, 0, 6, 12),
        ("in_progress", "docs", "Llama-3.1-8B", 8_000, 1_900, 212, 1, 24),
        ("validating", "search", None, 0, 0, 0, 0, 24),
        ("completed", "research", "Qwen3-8B", 12_000, 11_998, 2, 20, 24),
    ]
    made: list[dict[str, Any]] = []
    for number, values in enumerate(rows):
        row: dict[str, Any] = dict(zip(fields, values, strict=True))
        begun_s = now_s - 3600 * row.pop("begun_h")
        row["expires_s"] = begun_s + 3600 * row.pop("window_h")
        row |= dict.fromkeys(("endpoint", "completion_window", "input_file_id", "input_key"), "x")
        row |= {"batch_id": f"batch_{number}f6a91c04", "labels": {}, "errors": [], "ending": ""}
        # The one to be read is another worker's, who lives: this service leaves it alone.
        row |= {"created_s": begun_s, "in_progress_s": begun_s, "worker": "other"}
        made.append({**row, "generation": 1})
    database = Database(f"sqlite:///{folder}/batch.db")

    def add(connection: Connection) -> None:
        connection.execute(insert(BATCHES), made)
        add_worker(connection, "other", now_s + float(LONG_S))

    asyncio.run(database.write(add))
    database.close()


def test_batches_are_shown_beside_the_cluster_and_the_page_outlives_their_service(
    browser: Browser, tmp_path: Path
) -> None:
    add_batches(tmp_path)
    rows = "document.querySelectorAll('#batch-table tbody tr').length"
    with (
        BatchServiceProcess(tmp_path, ["http://127.0.0.1:9"], operator_token=OPERATOR) as batches,
        data_dir() as path,
        CoordinatorProcess(
            path,
            AQUA_SILENT_MEMBER_S=LONG_S,
            AQUA_BATCH_URL=batches.url,
            AQUA_BATCH_OPERATOR_TOKEN=OPERATOR,
        ) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as client,
    ):
        PaperCluster(client, 16)
        browser.open(f"{running.url}/")
        browser.wait_for(f"{rows} === 5")
        with closing(sqlite3.connect(tmp_path / "batch.db", timeout=60)) as database, database:
            database.execute(
                "UPDATE batches SET completed = completed + 60 WHERE status = 'in_progress'"
            )
        browser.wait_for(
            "document.getElementById('batch-table').textContent.includes('41,273 of 50,000')"
        )
        said = browser.run("return document.getElementById('batch-section').innerText")
        for words in ("evals", "docs", "2,540 of 20,000", "goes first", "reading its input"):
            assert words in said
        assert browser.run("return document.querySelectorAll('td.risk').length") >= 1
        browser.press("b")
        assert browser.run("return document.activeElement.id") == "batch-table"
        browser.run("document.activeElement.blur()")
        SHOTS.mkdir(parents=True, exist_ok=True)
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            browser.screenshot(SHOTS / f"batches-{scheme}.png")
            assert violations(browser) == []
        browser.press("Tab", "b")
        browser.resize(420, 800)
        assert violations(browser) == []
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        # Drawn anew under a reader, it keeps the focus.
        assert browser.run("return document.activeElement.id") == "batch-table"
        batches.kill()
        browser.wait_for(
            "document.getElementById('batches').textContent.includes('service does not answer')"
        )
        assert violations(browser) == []
        assert browser.run("return document.querySelectorAll('button.gpu').length") == 16
        browser.open("about:blank")  # What follows is not the page's affair.


def test_axe_finds_nothing_where_a_token_is_asked_for(
    browser: Browser, coordinator: CoordinatorProcess
) -> None:
    browser.open(f"{coordinator.url}/")
    browser.wait_for("document.getElementById('ask').open")
    SHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SHOTS / "token.png")
    assert violations(browser) == []


def test_the_keyboard_reaches_everything(page: Browser) -> None:
    focused = "document.activeElement.id"
    page.press("g")
    assert page.run(f"return {focused}") == "producers.sdxl-000-0"
    page.press("Down", "Right")
    assert page.run(f"return {focused}") == "consumers.llm-000-1"
    page.press("Left", "Up", "Right", "Enter")
    page.wait_for("document.getElementById('details').open")
    said = page.run("return document.getElementById('details-body').textContent")
    assert "The placer says: <img src=x" in said
    page.press("Escape")
    page.wait_for("!document.getElementById('details').open")
    assert page.run(f"return {focused}") == "consumers.llm-000-0"
    assert page.run("return document.title") == "Aqua"
    page.press("/", "llm-002")
    page.wait_for(
        "[...document.querySelectorAll('.domain')].filter((one) => !one.hidden).length === 1"
    )
    page.press("Enter")
    assert page.run(f"return {focused}").startswith("consumers.llm-002")
    # One stop for all GPUs: Tab goes on to what comes after them.
    page.press("Tab")
    assert "gpu" not in page.run("return document.activeElement.className")


def test_focus_stays_where_it_is_while_the_page_is_drawn_anew(
    page: Browser, cluster: PaperCluster
) -> None:
    watch_for_reclaims(page)
    page.press("g", "Down")
    before = len(page.run("return Object.keys(window.seen)"))
    cluster.reclaim(cluster.producers[-1], 3.5)
    page.wait_for("Object.keys(window.seen).length > arguments[0]", before)
    marks = "performance.getEntriesByName('cluster-drawn').length"
    drawn = page.run(f"return {marks}")
    page.wait_for(f"{marks} > arguments[0]", drawn)
    assert page.run("return document.activeElement.id") == "producers.sdxl-000-1"
    assert page.run("return document.activeElement.tabIndex") == 0


def test_the_demo_is_watched(
    browser: Browser,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Real members: what is lent is seen, and taken back within a second of the event."""
    from rich.console import Console

    from aqua_demo.lending import run as lending
    from aqua_demo.processes import DemoCoordinator, ProcessGroup
    from aqua_demo.scale import SCALES
    from aqua_demo.view import ConsoleView

    ended: list[object] = []

    def tell(coordinator: DemoCoordinator) -> None:
        options = lending.Options(
            size="quick",
            scale=SCALES["quick"],
            transport=None,
            seed=0,
            checksum=True,
            corrupt_one_byte=False,
            logs=tmp_path,
            coordinator=coordinator,
        )
        try:
            ended.append(lending.DemoRun(options, ConsoleView(Console(quiet=True))).run())
        except BaseException as error:  # noqa: BLE001 - told by the test
            ended.append(error)

    with data_dir() as scratch, ProcessGroup(tmp_path) as group:
        coordinator = DemoCoordinator.start(group, scratch)
        token = coordinator.operator_token
        assert token is not None
        demo = threading.Thread(target=tell, args=[coordinator])
        demo.start()
        try:
            browser.open(f"{coordinator.url}/")
            sign_in(browser, token)
            watch_for_reclaims(browser)
            browser.wait_for("document.querySelector('path.link')")
            event = await_reclaim(coordinator.url, token)
            late_ms = seen_after_ms(browser, event["event_id"])
            SHOTS.mkdir(parents=True, exist_ok=True)
            browser.screenshot(SHOTS / "demo.png")
            record_property("seen_after_ms", late_ms)
            assert late_ms < LATE_MS
        finally:
            demo.join()
        browser.open("about:blank")
    assert not isinstance(ended[0], BaseException), ended[0]
