"""Every loop of a coordinator, with a fault at each call that it makes.

The loops and their calls are found by running them (`harness/faults.py`). After each fault the
coordinator still grants, expires, tells events, notices changed tokens, closes late connections,
and syncs and restarts its store. One whose loop crashes again and again, or hangs, is not ready.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from aqua_coordinator import app, embedded
from aqua_coordinator.access.tokens import Role, create_token, revoke_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.http import connections
from aqua_coordinator.server import Server
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol import LeaseState
from aqua_protocol.supervision import Loop, RestartPolicy, restart_counts, running_loops
from harness.asgi import allocate, client_of, error_of, hear, join, without_network
from harness.bounds import HANG_S
from harness.coordinator_process import data_dir
from harness.faults import FaultInjector, UnforeseenError, faults, have_rested
from harness.ledger_room import ledger_room
from harness.members_on_paper import PaperConsumer, PaperProducer

Work = Callable[[], Awaitable[None]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "policy", RestartPolicy(0.001, 0.001, jitter=lambda _, most: most))
    monkeypatch.setattr(app, "SWEEP_PERIOD_S", 0.01)
    monkeypatch.setattr(connections, "PATROL_S", 0.01)
    monkeypatch.setattr(embedded, "SYNC_PERIOD_S", 0.01)
    monkeypatch.setattr(embedded, "MIN_BACKOFF_S", 0.001)


async def require_outlived(work: Work, loops: set[str]) -> None:
    """Do `work` once for each call of each loop, which then fails; `loops` must be among them."""
    with FaultInjector() as clean:
        await work()
    assert {site.loop for site in clean.sites} >= loops
    assert clean.unwatched == set()
    hit: set[tuple[str, type[BaseException]]] = set()
    for site, error in faults(clean.sites):
        crashed = sum(restart_counts().values())
        with FaultInjector(site, error) as injector:
            await work()
        if injector.planted is None:  # Not every call is made in every run.
            assert sum(restart_counts().values()) > crashed, f"{site} crashed unseen"
            hit.add((site.loop, type(error)))
    assert {loop for loop, _ in hit} >= loops


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HANG_S):
        while not await condition():  # noqa: ASYNC110 - what is waited for is elsewhere
            await asyncio.sleep(0.005)


class RetryingTransport(httpx.AsyncBaseTransport):
    """Asks again what was refused for the moment, as members do."""

    def __init__(self, service: Service) -> None:
        self._transport = without_network(service.asgi)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(3):
            answer = await self._transport.handle_async_request(request)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
        return answer


async def grant_expire_and_tell(store_url: str, tokens: Path) -> None:
    token, _ = create_token(tokens, roles=[Role.PRODUCER, Role.CONSUMER])
    service = Service(CoordinatorSettings(tokens_file=tokens, attach_window_s=0.2), store_url)
    http = httpx.AsyncClient(
        transport=RetryingTransport(service),
        base_url="http://127.0.0.1",
        headers={"Authorization": f"Bearer {token}"},
    )
    watcher = service.services.event_watcher
    async with service.running(), http:
        watcher.listeners += 1
        life = f"life-{os.urandom(8).hex()}"
        await join(http, PaperProducer(incarnation=life))
        await hear(http, PaperConsumer(incarnation=life))
        change = watcher.next_change()
        lease = (await allocate(http, PaperConsumer(), os.urandom(8).hex())).lease
        async with asyncio.timeout(HANG_S):
            await change

        async def has_expired() -> bool:
            view = (await http.get(f"/v1/leases/{lease.lease_id}")).json()
            return bool(view["state"] == LeaseState.RELEASED)

        await until(has_expired)
        late, record = create_token(tokens, roles=[Role.READER])

        async def is_welcome() -> bool:
            headers = {"Authorization": f"Bearer {late}"}
            return (await http.get("/v1/leases", headers=headers)).status_code == httpx.codes.OK

        async def is_refused() -> bool:
            return not await is_welcome()

        await until(is_welcome)
        revoke_token(tokens, record.token_id)
        await until(is_refused)
        watcher.listeners -= 1


@pytest.mark.slow
async def test_the_loops_of_a_service_outlive_a_fault_at_each_of_their_calls(
    store: EmbeddedValkey, tmp_path: Path
) -> None:
    runs = iter(range(1000))

    async def work() -> None:
        await grant_expire_and_tell(store.url, tmp_path / f"tokens-{next(runs)}.json")
        assert not [loop for loop in running_loops() if loop.kind != "store-pipeline"]

    async def in_fresh_books() -> None:
        await asyncio.wait_for(work(), HANG_S)

    async with ledger_room(store.url):
        loops = {"sweep", "token-refresh", "event-watcher", "store-pipeline"}
        await require_outlived(in_fresh_books, loops)


@asynccontextmanager
async def serving(store_url: str) -> AsyncIterator[int]:
    service = Service(CoordinatorSettings(transfer_timeout_s=0.1), store_url)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        async with service.running():
            server = Server(service)
            serve = asyncio.ensure_future(server.serve(sockets=[listener]))
            yield listener.getsockname()[1]
            server.should_exit = True
            await serve


@pytest.mark.slow
async def test_the_reaper_of_connections_outlives_a_fault_at_each_of_its_calls(
    store: EmbeddedValkey,
) -> None:
    async with ledger_room(store.url), serving(store.url) as port:

        async def work() -> None:
            async with asyncio.timeout(HANG_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /healthz HTTP/1.1\r\n")
                with suppress(ConnectionResetError):
                    assert not await reader.read()
                writer.close()

        await require_outlived(work, {"connection-reaper"})


async def test_the_loops_of_an_embedded_store_outlive_a_fault_at_each_of_their_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    syncs: list[int] = []
    monkeypatch.setattr(os, "fdatasync", syncs.append)

    async def work() -> None:
        with data_dir() as path:
            store = EmbeddedValkey(path)
            store.start()
            store.supervise()
            syncs.clear()
            first = store.pid
            assert first is not None

            async def has_synced() -> bool:
                return len(syncs) >= 3

            async def has_restarted() -> bool:
                return store.pid != first

            try:
                await until(has_synced)
                os.kill(first, signal.SIGKILL)
                await until(has_restarted)
            finally:
                await store.stop_supervising()
                store.stop()

    await require_outlived(work, {"store-restart", "store-sync"})


async def test_a_loop_that_hangs_fails_readiness_until_it_goes_on(
    store: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s = 0.0
    policy = RestartPolicy(clock=lambda: time.monotonic() + later_s)
    monkeypatch.setattr(Loop, "policy", policy)
    service = Service(CoordinatorSettings(), store.url)
    hangs, goes_on = asyncio.Event(), asyncio.Event()

    async def hang(**_: float) -> int:
        hangs.set()
        await goes_on.wait()
        return 0

    async with ledger_room(store.url), service.running(), client_of(service) as http:
        rested = set[Loop]()

        async def have_all_rested() -> bool:
            return have_rested(rested)

        await until(have_all_rested)
        monkeypatch.setattr(service.services.ledger, "sweep", hang)
        await asyncio.wait_for(hangs.wait(), HANG_S)
        assert (await http.get("/readyz")).status_code == httpx.codes.OK
        later_s = policy.hang_s + 1
        answer = await http.get("/readyz")
        assert error_of(answer).details == {"loops": ["sweep"]}
        assert "aqua_coordinator_loops_failing 1.0" in (await http.get("/metrics")).text
        goes_on.set()

        async def is_ready() -> bool:
            return (await http.get("/readyz")).status_code == httpx.codes.OK

        await until(is_ready)


async def test_a_loop_that_crashes_again_and_again_fails_readiness_and_is_counted(
    store: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(CoordinatorSettings(), store.url)

    async def fail(**_: float) -> int:
        raise UnforeseenError("a secret")

    async with ledger_room(store.url), service.running(), client_of(service) as http:
        assert (await http.get("/readyz")).status_code == httpx.codes.OK
        sweep = service.services.ledger.sweep
        monkeypatch.setattr(service.services.ledger, "sweep", fail)

        async def is_failing() -> bool:
            return any(loop.is_failing for loop in running_loops())

        await until(is_failing)
        answer = await http.get("/readyz")
        assert error_of(answer).details == {"loops": ["sweep"]}
        assert (await http.get("/healthz")).status_code == httpx.codes.OK
        lines = (await http.get("/metrics")).text.splitlines()
        assert "aqua_coordinator_loops_failing 1.0" in lines
        (count,) = [line for line in lines if 'loop_restarts_total{loop="sweep"}' in line]
        assert float(count.rpartition(" ")[2]) >= 3
        monkeypatch.setattr(service.services.ledger, "sweep", sweep)
        for loop in running_loops():
            monkeypatch.setattr(loop, "policy", RestartPolicy(steady_s=0.0))
