"""The API server with the two flags of the tutorial, over HTTP, as a serving engineer runs it."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from aqua_protocol import MIB
from harness.bounds import HANG_S, until
from harness.tiny_llama import write_tiny_llama
from harness.vllm_program import Scenario, prompts_of
from harness.vllm_server import free_port, metrics_of, turn_flags, vllm_server

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

AQUA: Final = turn_flags(store_bytes="16MiB", is_offline=True, tenants={})
TOKEN: Final = "operator-of-this-engine"
USER_KEY: Final = "user-of-this-engine"
ADMINISTERED: Final = ("--middleware", "aqualib.engines.vllm.AquaMiddleware")
PROMPTS: Final = prompts_of(Scenario(model=""))
SAYINGS: Final[list[tuple[bool, dict[str, Any]]]] = [
    (True, {"service_tier": "flex"}),
    (True, {"priority": 1, "vllm_xargs": {"aqua_finish_in_s": 600}}),
    (False, {"priority": -1}),
    (False, {"priority": 1, "service_tier": "priority"}),
]
"""Whether requests are offline that say so without the header of their class."""


def answers(
    client: httpx.Client, service_class: str | None = "online", **said: object
) -> list[list[int]]:
    """Tokens of the greedy completions of all prompts at once; many of them have no text.

    Args:
        client: Of the server.
        service_class: What the header says; None sends none.
        said: Further fields of each request.
    """

    def ask(prompt: list[int]) -> list[int]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 100,
            "ignore_eos": True,
            "return_token_ids": True,
            **said,
        }
        told = {} if service_class is None else {"x-aqua-class": service_class}
        answer = client.post("/v1/completions", json=body, headers=told, timeout=300)
        tokens: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def expected(stock: dict[str, list[int]]) -> list[list[int]]:
    """What vLLM answers by itself."""
    return [stock[f"0-{index}"] for index in range(len(PROMPTS))]


def test_the_server_answers_the_same_under_aqua_and_counts_what_it_pages(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    events = {"enable_kv_cache_events": True, "endpoint": endpoint.replace("127.0.0.1", "*")}
    flags = (*AQUA, *ADMINISTERED, "--kv-events-config", json.dumps(events), "--api-key", USER_KEY)
    with (
        vllm_server(model, tmp_path / "aqua.log", *flags, AQUA_ADMIN_TOKEN=TOKEN) as client,
        router(endpoint) as hear,
    ):
        assert status_without_body(client) == 401, "no body is waited for without a key"
        client.headers["Authorization"] = f"Bearer {USER_KEY}"
        assert answers(client) == expected
        assert hear("CPU") & hear("GPU"), "by the hash of when a block was on the GPU"
        found = metrics_of(client)
        turn(client, slicing=False, paging=False)
        await_gauges(client, slicing_on=0, paging_on=0)
        assert answers(client) == expected
        off = metrics_of(client)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(answers, client)
            turn(client, paging=True)
            evict_and_resume(client)
            for on in (True, False, True):
                turn(client, slicing=on)
                turn(client, paging=on)
            assert again.result() == expected
        pin(client, max(PROMPTS, key=len))
        assert metrics_of(client)["aqua:evicted_requests_total"] > 0
        assert client.get("/aqua/switches").status_code == 401
    assert found["aqua:forced_preemptions_total"] > 10, found
    assert found["aqua:kv_paged_out_bytes_total"] > 0
    assert found["aqua:kv_paged_in_bytes_total"] > 0
    assert found["aqua:restored_tokens_total"] > 500
    assert found["aqua:kv_paging_seconds_total"] > 0
    assert found["aqua:kv_failures_total"] == 0
    assert (found["aqua:slicing_on"], found["aqua:paging_on"]) == (1, 1)
    for name in ("forced_preemptions", "kv_paged_out_bytes", "restored_tokens"):
        assert off[f"aqua:{name}_total"] == found[f"aqua:{name}_total"], "nothing while it is off"


def status_without_body(client: httpx.Client) -> int:
    """What a completion is answered of which only the headers have come."""
    server = HTTPConnection(client.base_url.host, client.base_url.port, timeout=HANG_S)
    with closing(server):
        server.putrequest("POST", "/v1/completions")
        server.putheader("Content-Type", "application/json")
        server.putheader("Content-Length", str(1 << 28))
        server.putheader("X-Aqua-Tenant", "team-a")
        server.endheaders()
        return server.getresponse().status


@contextmanager
def router(endpoint: str) -> Iterator[Callable[[str], set[int]]]:
    """A subscriber to KV events; gives hashes of the blocks stored in a medium, and waits for one.

    Subscribing takes a moment, and what is published before is lost.
    """
    import msgspec
    import zmq
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    stored: defaultdict[str, set[int]] = defaultdict(set)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.subscribe("")

        def hear(medium: str) -> set[int]:
            while not stored[medium] or socket.poll(0):
                assert socket.poll(60_000), "no event comes"
                payload = socket.recv_multipart()[-1]
                for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                    if isinstance(event, BlockStored):
                        stored[event.medium].update(event.block_hashes)
            return stored[medium]

        yield hear


def turn(client: httpx.Client, **change: bool) -> None:
    """Turn switches by the admin API."""
    for engine in command(client, "PATCH", "switches", change):
        assert engine.items() >= change.items()


def evict_and_resume(client: httpx.Client) -> None:
    """Evict what runs, once something does, and resume it by the ids that its clients know."""

    def evicted() -> list[dict[str, Any]]:
        (engine,) = command(client, "POST", "evictions", {"count": 12, "hold_s": 3600})
        return list(engine["evictions"])

    for each in until(evicted, "something runs"):
        assert each["kept_tokens"] > 0
        command(client, "DELETE", f"evictions/{each['request_id'].rpartition('-')[0]}", {})


def pin(client: httpx.Client, prompt: list[int]) -> None:
    """Pin a prompt, wait until a request has brought its blocks, and unpin it."""
    (pinned,) = command(client, "PUT", "pins/a", {"prompt_token_ids": prompt, "ttl_s": 3600})
    assert pinned["blocks"] == len(prompt) // 32 > 0
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    client.post("/v1/completions", json=body, timeout=300).raise_for_status()
    give_up_s = time.monotonic() + 60
    while pinned["present_blocks"] < pinned["blocks"]:
        assert time.monotonic() < give_up_s, pinned
        (pinned,) = command(client, "GET", "pins", {})[0]["pins"]
    await_gauges(client, pinned_prefixes=1, pinned_blocks=pinned["blocks"])
    assert command(client, "DELETE", "pins/a", {})[0]["pins"] == []


def command(
    client: httpx.Client, method: str, path: str, arguments: dict[str, Any]
) -> list[dict[str, Any]]:
    """What each rank answers to a command of the admin API."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = client.request(method, f"/aqua/{path}", json=arguments, headers=headers)
    engines: list[dict[str, Any]] = answer.raise_for_status().json()["engines"]
    return engines


def await_gauges(client: httpx.Client, **levels: float) -> None:
    """Wait for the step that tells of them; there is no event across processes."""
    wanted = {f"aqua:{name}": level for name, level in levels.items()}
    until(lambda: metrics_of(client).items() >= wanted.items(), lambda: metrics_of(client))


def test_a_server_lends_while_it_is_idle_and_answers_the_same_when_it_is_not(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    # The server's worker for CPUs is a process of its own: the engine tells it what to do.
    port = free_port()
    lend = {"bytes": "4MiB", "reserve_bytes": 0, "calm_s": 0, "metrics_port": port}
    flags = [
        *("--num-gpu-blocks-override", "96"),
        *("--scheduler-cls", "aqualib.engines.vllm.LendingScheduler"),
        *("--worker-cls", "aqualib.engines.vllm.LendingWorker"),
        *ADMINISTERED,
        *("--additional-config", json.dumps({"aqua": {"lend": lend}})),
    ]
    with (
        vllm_server(model, tmp_path / "lender.log", *flags, AQUA_ADMIN_TOKEN=TOKEN) as client,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=HANG_S
        ) as lender,
    ):
        await_offer(lender, 4 * MIB)
        assert lending(lender)["absent_blocks"] == 64
        assert answers(client) == expected
        found = lending(lender)
        assert found["reclaims_total"] >= 1, found
        assert found["reclaimed_bytes_total"] >= 4 * MIB, found
        steps = [n for name, n in found.items() if name.startswith("step_duration_seconds_count")]
        assert sum(steps) > 100, "steps of 12 requests with 100 tokens each"
        assert found["coordinator_up"] == 0
        await_offer(lender, 4 * MIB)
        turn(client, lending=False)
        await_lending(lender, lending_on=0, offered_bytes=0, absent_blocks=0)
        assert answers(client) == expected
        assert lending(lender)["offered_bytes"] == 0
        turn(client, lending=True)
        await_offer(lender, 4 * MIB)


def test_a_server_that_lends_in_gaps_without_offline_work_answers_as_ever(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    port = free_port()
    lend = {"bytes": "4MiB", "reserve_bytes": 0, "calm_s": 0, "metrics_port": port}
    co_serving = {"ttft_s": 1000.0, "tpot_s": 60.0, "layer_aborts": True}
    flags = [
        *("--num-gpu-blocks-override", "96"),
        *("--worker-cls", "aqualib.engines.vllm.LendingWorker"),
        *ADMINISTERED,
        *("--scheduling-policy", "priority"),
        *turn_flags(mode="checkpoint", is_offline=True, lend=lend, co_serving=co_serving),
    ]
    with (
        vllm_server(model, tmp_path / "both.log", *flags) as client,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=HANG_S
        ) as lender,
        ThreadPoolExecutor(1) as pool,
    ):
        for reclaims in (1, 2):
            await_offer(lender, 4 * MIB)
            offline = pool.submit(answers, client, "offline")
            await_lending(lender, offered_bytes=0)
            assert answers(client) == expected
            assert offline.result() == expected
            assert lending(lender)["reclaims_total"] >= reclaims
        found = metrics_of(client)
        for is_offline, said in SAYINGS:
            before = metrics_of(client)
            assert answers(client, None, **said) == expected
            after = metrics_of(client)
            online = after["aqua:online_arrivals_total"] - before["aqua:online_arrivals_total"]
            assert online == (0 if is_offline else len(PROMPTS)), said
            computed = after["aqua:offline_tokens_total"] - before["aqua:offline_tokens_total"]
            # What the last step of those before it computed may be told only now.
            assert (computed > 10 * len(PROMPTS)) is is_offline, said
        for claimed, headers in ((0, {}), (600, {"x-aqua-finish-in": "soon"})):
            body = {"model": "tiny", "prompt": "a", "vllm_xargs": {"aqua_finish_in_s": claimed}}
            answer = client.post("/v1/completions", json=body, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
    assert found["aqua:online_arrivals_total"] == 2 * len(PROMPTS)
    assert found["aqua:offline_tokens_total"] > 0
    assert found["aqua:co_serving_without_aborts"] == 0


def lending(client: httpx.Client) -> dict[str, float]:
    """The lender's own metrics."""
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("aqua_lender_")]
    return {name.removeprefix("aqua_lender_"): float(value) for name, value in pairs}


def await_offer(client: httpx.Client, nbytes: int) -> None:
    """Wait until the idle server offers so much; there is no event across processes."""
    await_lending(client, offered_bytes=nbytes)


def await_lending(client: httpx.Client, **figures: float) -> None:
    """Wait until the lender's figures are these."""
    until(lambda: lending(client).items() >= figures.items(), lambda: lending(client))
