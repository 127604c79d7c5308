"""Real coordinators: killed, run side by side, stopped, and started wrongly."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import httpx
import psutil
import pytest

from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.store import Ledger, Pipeline, open_pool
from aqua_coordinator.store.adoption import FILE_NAME
from aqua_protocol.leases import LeaseGrant
from harness.bounds import HANG_S, until
from harness.coordinator_process import CoordinatorProcess
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.patience import variables
from harness.store_servers import running_store, short_directory

# Members of these tests do not send heartbeats.
PATIENT: Final[dict[str, Any]] = {
    "AQUA_SILENT_MEMBER_S": "3600",
    "AQUA_ATTACH_WINDOW_S": "300",
}


def is_ready(url: str) -> bool:
    """Whether a coordinator answers, and its store takes writes."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", trust_env=False, timeout=HANG_S).status_code == 200
    return False


def put(url: str, path: str, body: Any) -> Any:  # noqa: ANN401 - whatever the path takes
    """Send a report."""
    answer = httpx.put(
        f"{url}/v1/{path}", json=body.model_dump(mode="json"), trust_env=False, timeout=HANG_S
    )
    return answer.raise_for_status().json()


def join(url: str, producer: PaperProducer) -> None:
    """Report until the producer may be granted from."""
    for _ in range(2):
        ack = put(url, f"producers/{producer.name}", producer.report())
        producer.books_id = ack["books_id"]
    assert ack["grantable"]


async def audit(store_url: str) -> tuple[list[str], int, int]:
    """Rules that the books break, and bytes that they have leased by producer and by lease."""
    pipeline = Pipeline(
        open_pool(store_url, connect_timeout_s=HANG_S, max_connections=4), timeout_s=HANG_S
    )
    pipeline.start()
    ledger = Ledger(pipeline)
    try:
        faults = await ledger.audit()
        by_producer = sum(row.leased_bytes for row in await ledger.producers())
        leases, cursor = await ledger.leases(limit=1000)
        assert cursor is None
        return faults, by_producer, sum(lease.bytes for lease in leases)
    finally:
        await pipeline.close()


class Load:
    """Threads that allocate and sometimes release, and retry what was not answered.

    Attributes:
        granted: Every lease id that was answered, in order.
        kept: Leases that were not released.
        retries: Calls that had to be repeated because nobody answered.
    """

    def __init__(self, urls: list[str], *, threads: int = 4) -> None:
        self.granted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.kept: queue.SimpleQueue[LeaseGrant] = queue.SimpleQueue()
        self.faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.retries = 0
        self._stop = threading.Event()
        self._urls = urls
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "the load hangs"
        assert self.faults.empty(), self.faults.get()

    def wait_for(self, count: int) -> None:
        """Wait until so many more leases have been granted."""
        wanted = self.granted.qsize() + count
        until(lambda: self.granted.qsize() >= wanted or not self.faults.empty(), "the load stands")

    def _run(self, thread: int) -> None:
        addresses = itertools.cycle(self._urls)
        with httpx.Client(timeout=HANG_S, trust_env=False) as client:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                key = {"Idempotency-Key": f"{thread}-{number}"}
                wish = {"consumer_id": "consumer", "bytes": SLAB}
                text = self._insist(client, addresses, "leases", wish, key)
                if text is None:
                    return
                grant = LeaseGrant.model_validate_json(text)
                self.granted.put(grant.lease.lease_id)
                if number % 10 == 0:
                    self.kept.put(grant)
                    continue
                path = f"leases/{grant.lease.lease_id}/release"
                self._insist(client, addresses, path, {"epoch": grant.lease.epoch}, {})

    def _insist(
        self,
        client: httpx.Client,
        addresses: Iterator[str],
        path: str,
        body: dict[str, object],
        headers: dict[str, str],
    ) -> bytes | None:
        give_up_s = time.monotonic() + HANG_S
        while time.monotonic() < give_up_s:
            try:
                answer = client.post(f"{next(addresses)}/v1/{path}", json=body, headers=headers)
            except httpx.HTTPError:
                self.retries += 1
                self._stop.wait(0.02)
                continue
            if answer.is_success:
                return answer.content
            if answer.status_code != 503:
                break
            self.retries += 1
            self._stop.wait(0.02)
        self.faults.put(f"{path}: no success within {HANG_S} s")
        return None


@pytest.mark.parametrize("victim", ["coordinator", "store"])
async def test_killed_under_load_it_comes_back_with_books_that_agree(victim: str) -> None:
    with short_directory() as directory:
        books_url = f"unix://{directory}/d/valkey.sock"
        coordinator = CoordinatorProcess(directory / "d", **PATIENT)
        url, port = coordinator.url, coordinator.port
        try:
            join(url, PaperProducer(slabs=4000))
            put(url, "consumers/consumer", PaperConsumer().report())
            with Load([url]) as load:
                for _ in range(3):
                    load.wait_for(50)
                    store = [psutil.Process(pid) for pid in coordinator.children()]
                    if victim == "coordinator":
                        os.kill(coordinator.process.pid, signal.SIGKILL)
                        coordinator.process.wait(HANG_S)
                        psutil.wait_procs(store, HANG_S)
                        assert not store[0].is_running(), "the store outlived it"
                        coordinator.kill()
                        coordinator = CoordinatorProcess(directory / "d", port=port, **PATIENT)
                    else:
                        store[0].kill()
                        until(lambda: is_ready(url), "the store did not come back")
                load.wait_for(50)
            granted = [load.granted.get() for _ in range(load.granted.qsize())]
            kept = {load.kept.get().lease.lease_id for _ in range(load.kept.qsize())}
            assert load.retries > 0, "nobody noticed: the kill did not happen under load"
            assert len(set(granted)) == len(granted)
            faults, by_producer, by_lease = await audit(books_url)
            assert faults == []
            assert by_producer == by_lease
            leases = coordinator.get("leases?limit=1000")["leases"]
            booked = {lease["lease_id"] for lease in leases}
            assert kept <= booked
        finally:
            coordinator.kill()


async def test_two_coordinators_over_one_redis_are_one() -> None:
    with running_store() as store, short_directory() as directory:
        settings = PATIENT | {"AQUA_REDIS_URL": store.url}
        with (
            CoordinatorProcess(directory / "keys", **settings) as one,
            CoordinatorProcess(directory / "keys", **settings) as two,
        ):
            join(one.url, PaperProducer(slabs=2000))
            put(two.url, "consumers/consumer", PaperConsumer().report())
            wish = {"consumer_id": "consumer", "bytes": SLAB}
            key = {"Idempotency-Key": "the-same"}
            assert one.post("leases", wish, **key) == two.post("leases", wish, **key)
            with Load([one.url, two.url]) as load:
                load.wait_for(300)
                os.kill(two.process.pid, signal.SIGKILL)
                load.wait_for(100)
            granted = [load.granted.get() for _ in range(load.granted.qsize())]
            assert len(set(granted)) == len(granted)
        faults, by_producer, by_lease = await audit(store.url)
        assert faults == []
        assert by_producer == by_lease
        assert [path.name for path in (directory / "keys").iterdir()] == [FILE_NAME]


def test_sigterm_stops_it_with_its_store_even_while_events_are_streamed() -> None:
    with short_directory() as directory:
        coordinator = CoordinatorProcess(directory / "d")
        try:
            store_pid = coordinator.children()[0]
            with httpx.stream(
                "GET", f"{coordinator.url}/v1/events", trust_env=False, timeout=HANG_S
            ) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("retry:")
                coordinator.process.terminate()
                assert coordinator.process.wait(HANG_S) == 0
            assert not psutil.pid_exists(store_pid)
        finally:
            coordinator.kill()


def test_events_arrive_as_they_happen_and_go_on_where_a_client_left_off() -> None:
    with short_directory() as directory, CoordinatorProcess(directory / "d") as coordinator:
        url = f"{coordinator.url}/v1/events"
        with httpx.stream("GET", url, trust_env=False, timeout=HANG_S) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.iter_lines()
            next(lines)
            put(coordinator.url, "producers/producer", PaperProducer().report())
            put(coordinator.url, "consumers/consumer", PaperConsumer().report())
            first, second = (next_event(lines) for _ in range(2))
        assert (first["kind"], first["producer_id"]) == ("producer_joined", "producer")
        assert (second["kind"], second["consumer_id"]) == ("consumer_joined", "consumer")
        resume = {"Last-Event-ID": first["event_id"]}
        with httpx.stream("GET", url, headers=resume, trust_env=False, timeout=HANG_S) as stream:
            assert next_event(stream.iter_lines()) == second
        wrong = httpx.get(url, headers={"Last-Event-ID": "soon"}, trust_env=False, timeout=HANG_S)
        assert wrong.json()["code"] == "request_invalid"


def next_event(lines: Iterator[str]) -> dict[str, Any]:
    """The next event of a stream."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "data":
            event: dict[str, Any] = json.loads(value)
            assert fields == {"id": event["event_id"], "event": event["kind"]}
            return event
        if name in {"id", "event"}:
            fields[name] = value
    raise AssertionError("the stream ended")


# --- The command line --------------------------------------------------------------------


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `aqua-coordinator` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "aqua_coordinator", *words],
        env=variables(**environment),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "environment", "code", "says"),
    [
        (["--host", "10.0.0.5"], {}, 2, "refusing to listen on 10.0.0.5 without authentication"),
        (["--host", "::"], {}, 2, "refusing to listen on :: without authentication"),
        ([], {"AQUA_HEARTBEAT_S": "soon"}, 2, "AQUA_HEARTBEAT_S"),
        ([], {"AQUA_HEARTBEAT_S": "9"}, 2, "at least three heartbeats"),
        ([], {"AQUA_CAPABILITY_SECRET": "short"}, 2, "at least 32 characters"),
        (["--redis-url", "http://x"], {}, 2, "unknown scheme"),
        (
            ["--redis-url", "redis://127.0.0.1:1"],
            {"AQUA_STORE_TIMEOUT_S": "1"},
            3,
            "Redis does not answer",
        ),
        (["--tokens-file", "/nonexistent/tokens.json"], {}, 2, "cannot read the tokens file"),
        (["--data-dir", "/dev/null/d"], {}, 2, "data directory"),
        (["--data-dir", "/nonexistent/" + "d" * 120], {}, 2, "AQUA_DATA_DIR"),
        (["--nonsense"], {}, 2, "No such option"),
    ],
)
def test_a_wrong_configuration_is_one_clear_sentence(
    words: list[str], environment: dict[str, str], code: int, says: str
) -> None:
    done = command("serve", "--port", "0", *words, **environment)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_told() -> None:
    with short_directory() as directory, CoordinatorProcess(directory / "d") as coordinator:
        done = command(
            "serve", "--port", str(coordinator.port), "--data-dir", str(directory / "other")
        )
    assert done.returncode == 2
    assert "in use" in done.stderr
    assert "AQUA_LISTEN_PORT" in done.stderr


def test_tokens_are_made_once_listed_without_secrets_and_revoked(tmp_path: Path) -> None:
    file = str(tmp_path / "tokens.json")
    words = ["token", "--file", file, "--role", "consumer", "--member", "llm-0", "--expires", "1h"]
    words += ["--tenant", "team"]
    made = command(*words).stdout.strip()
    assert made.startswith("aqua_")
    assert made not in Path(file).read_text()
    assert Path(file).stat().st_mode & 0o077 == 0
    listed = json.loads(command("token", "list", "--file", file, "--json").stdout)
    assert [(entry["roles"], entry["member"], entry["tenant"]) for entry in listed] == [
        (["consumer"], "llm-0", "team")
    ]
    assert command("token", "revoke", listed[0]["token_id"], "--file", file).returncode == 0
    assert json.loads(command("token", "list", "--file", file, "--json").stdout) == []
    again = command("token", "revoke", listed[0]["token_id"], "--file", file)
    assert (again.returncode, "unknown_resource" in again.stderr) == (1, True)


def test_status_shows_the_books_to_people_and_programs(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    operator, _ = create_token(file, roles=[Role.OPERATOR])
    reader, _ = create_token(file, roles=[Role.READER])
    quotas = tmp_path / "quotas.json"
    quotas.write_text('{"tenants": {"team": {"nominal": "2GiB"}}}')
    with (
        short_directory() as directory,
        CoordinatorProcess(
            directory / "d", AQUA_TOKENS_FILE=str(file), AQUA_QUOTAS_FILE=str(quotas)
        ) as coordinator,
    ):
        httpx.put(
            f"{coordinator.url}/v1/producers/producer",
            json=PaperProducer().report().model_dump(mode="json"),
            headers={"Authorization": f"Bearer {operator}"},
            trust_env=False,
            timeout=HANG_S,
        ).raise_for_status()
        look = {"AQUA_COORDINATOR_URL": coordinator.url, "AQUA_TOKEN": reader}
        content = json.loads(command("status", "--json", **look).stdout)
        assert content["producers"][0]["free_bytes"] == 16 * SLAB
        shown = command("status", "--once", COLUMNS="160", **look).stdout
        assert "producer" in shown
        assert "1 MiB" in shown
        (team,) = json.loads(command("quotas", "--json", **look).stdout)
        assert (team["tenant"], team["nominal_bytes"]) == ("team", 2 << 30)
        assert "2 GiB" in command("quotas", COLUMNS="160", **look).stdout
        refused = command("status", "--once", AQUA_COORDINATOR_URL=coordinator.url)
        assert (refused.returncode, "unauthenticated" in refused.stderr) == (1, True)


def test_help_teaches_by_example() -> None:
    for words in (["--help"], ["serve", "--help"], ["token", "--help"], ["quotas", "--help"]):
        done = command(*words)
        assert done.returncode == 0
        assert "aqua-coordinator" in done.stdout
