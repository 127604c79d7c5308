"""vLLM as people deploy it, all at once: API processes, an adapter, grammars, drafts, a producer.

One deployment for the module: `vllm serve` with two API processes, a LoRA adapter, structured
output and drafts by n-grams, which takes turns and pages to a producer of the same node. A vLLM by
itself with the same flags says what its answers are.

Requests of the adapter are asked for by themselves: vLLM's build for CPUs mixes an adapter's
weights into requests without one that share a step with it, with Aqua and without.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from aqua_protocol import MIB
from harness.bounds import HANG_S, until
from harness.tiny_llama import write_tiny_adapter, write_tiny_llama
from harness.vllm_deployment import API_PROCESSES, SLABS, TOKEN, Deployment, common_flags
from harness.vllm_program import Scenario, prompts_of
from harness.vllm_server import VLLM_SERVE, free_port, metrics_of, serving_process

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

PROMPTS: Final = prompts_of(Scenario(model=""))
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": r"^[ !#-\[\]-~]{60,90}$"},
        "kind": {"enum": ["first", "second"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
"""What a random model ends within some 120 tokens: a string without a longest might never."""
TEXTS: Final = [bytes(32 + token % 95 for token in prompt).decode() for prompt in PROMPTS]
"""As long as the prompts. After bytes that are no text, the text of an answer begins with them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def expected(stock: dict[str, list[int]]) -> list[list[int]]:
    """What vLLM answers by itself, without drafts."""
    return [stock[f"0-{index}"] for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def deployment(model: Path, adapter: Path) -> Iterator[Deployment]:
    with (
        tempfile.TemporaryDirectory(prefix="aqua-", dir="/tmp") as folder,
        Deployment(Path(folder), model, adapter) as deployment,
    ):
        yield deployment


@pytest.fixture
def deployed(deployment: Deployment) -> Deployment:
    """The deployment, whose vLLM runs whatever the test before has done to it."""
    deployment.start()
    return deployment


# --- What clients ask -------------------------------------------------------------------------


def ask(client: httpx.Client, prompt: list[int] | str, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - of the API
    """A greedy completion; many have no text, so the tokens count."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "return_token_ids": True}
    answer = client.post("/v1/completions", json={**body, **options}).raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def ask_all(
    client: httpx.Client,
    prompts: Sequence[list[int] | str] = PROMPTS,
    **options: Any,  # noqa: ANN401 - as above
) -> list[dict[str, Any]]:
    """The answers to all prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(client, prompt, **options), prompts))


LONG: Final[dict[str, Any]] = {"max_tokens": 100, "ignore_eos": True}
"""Those whose answers a vLLM without drafts has given (`stock`)."""


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [each["token_ids"] for each in answers]


def grown(after: dict[str, float], before: dict[str, float], name: str) -> float:
    """By how much a counter grew."""
    return after[f"{name}_total"] - before.get(f"{name}_total", 0)


def assert_took_turns(after: dict[str, float], before: dict[str, float]) -> None:
    """Requests were put out of memory, and came back without being computed again."""
    for name in ("forced_preemptions", "kv_paged_out_bytes", "kv_paged_in_bytes"):
        assert grown(after, before, f"aqua:{name}") > 0, name
    assert grown(after, before, "aqua:restored_tokens") > 0
    assert after["aqua:lost_blocks_total"] == 0


# --- What a deployment does -------------------------------------------------------------------


def test_vllms_benchmark_has_every_request_answered(deployed: Deployment, model: Path) -> None:
    before = deployed.counters()
    folder = deployed.log.parent
    flags = {
        "--backend": "openai",
        "--base-url": str(deployed.client.base_url),
        "--endpoint": "/v1/completions",
        "--model": "tiny",
        "--tokenizer": str(model),
        "--dataset-name": "random",
        "--random-input-len": "60",
        "--random-output-len": "60",
        "--num-prompts": "24",
        "--result-dir": str(folder),
        "--result-filename": "bench.json",
    }
    words = [word for pair in flags.items() for word in pair]
    ended = subprocess.run(
        [*VLLM_SERVE[:-1], "bench", "serve", *words, "--ignore-eos", "--save-result"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((folder / "bench.json").read_text())
    assert (found["completed"], found["failed"]) == (24, 0), ended.stdout
    assert found["total_output_tokens"] == 24 * 60
    assert_took_turns(deployed.counters(), before)


def test_each_api_process_commands_the_engine_and_shows_its_figures(
    deployed: Deployment, expected: list[list[int]]
) -> None:
    assert tokens_of(ask_all(deployed.client, **LONG)) == expected
    with api_clients(deployed) as clients:
        for one in clients:
            for is_on in (False, True):
                turn_slicing(one, is_on=is_on)
                assert [switches(each)["slicing"] for each in clients] == [is_on] * API_PROCESSES
                await_shown(clients, is_on=is_on)
        one, other = clients
        until(lambda: aquas(one) == aquas(other), "both show the same sums")
        assert aquas(one)["aqua:forced_preemptions_total"] > 0


def aquas(client: httpx.Client) -> dict[str, float]:
    """Aqua's part of the metrics."""
    found = metrics_of(client).items()
    return {name: value for name, value in found if name.startswith("aqua:")}


def await_shown(clients: list[httpx.Client], *, is_on: bool) -> None:
    """Wait for the step that tells of a switch."""

    def is_shown() -> bool:
        return all(metrics_of(each)["aqua:slicing_on"] == is_on for each in clients)

    until(is_shown, "every process shows the switch")


@contextmanager
def api_clients(deployed: Deployment) -> Iterator[list[httpx.Client]]:
    """A client of each API process: which one answers a new connection is up to the kernel."""
    clients: dict[int, httpx.Client] = {}
    give_up_s = time.monotonic() + HANG_S
    while len(clients) < API_PROCESSES:
        assert time.monotonic() < give_up_s, f"only {list(clients)} answer"
        client = httpx.Client(
            base_url=deployed.client.base_url,
            trust_env=False,
            timeout=HANG_S,
            limits=httpx.Limits(keepalive_expiry=None),
        )
        stream = client.get("/version").extensions["network_stream"]
        pid = deployed.answering(stream.get_extra_info("client_addr")[1])
        if pid in clients:
            client.close()
        else:
            clients[pid] = client
    yield list(clients.values())
    for client in clients.values():
        client.close()


def switches(client: httpx.Client) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = client.get("/aqua/switches", headers=headers).raise_for_status()
    (engine,) = answer.json()["engines"]
    return dict(engine)


def turn_slicing(client: httpx.Client, *, is_on: bool) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    change = {"slicing": is_on}
    client.patch("/aqua/switches", json=change, headers=headers).raise_for_status()


def test_drafts_change_no_answer(deployed: Deployment, expected: list[list[int]]) -> None:
    before = deployed.counters()
    assert tokens_of(ask_all(deployed.client, **LONG)) == expected
    after = deployed.counters()
    assert_took_turns(after, before)
    for name in ("draft_tokens", "accepted_tokens"):
        assert grown(after, before, f"vllm:spec_decode_num_{name}") > 0, name


STRUCTURED: Final[dict[str, Any]] = {
    "model": "adapter",
    "max_tokens": 200,
    # Else a random model says the same letter over and over.
    "frequency_penalty": 1.0,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
    },
}


def test_an_adapter_under_a_grammar_answers_as_in_a_vllm_by_itself(
    deployed: Deployment, model: Path, adapter: Path, tmp_path: Path
) -> None:
    before = deployed.counters()
    answers = ask_all(deployed.client, TEXTS, **STRUCTURED)
    assert_took_turns(deployed.counters(), before)
    with serving_process(
        model, tmp_path / "log", *common_flags(adapter), port=free_port(), command=VLLM_SERVE
    ) as (client, _):
        alone = ask_all(client, TEXTS, **STRUCTURED)
        without = ask_all(client, TEXTS, **{**STRUCTURED, "model": "tiny"})
    assert tokens_of(answers) == tokens_of(alone)
    for each in answers:
        assert each["finish_reason"] == "stop"
        assert json.loads(each["text"]).keys() == set(SCHEMA["required"])
    texts = {each["text"] for each in alone}
    assert len(texts) == len(TEXTS), "degenerate outputs would prove nothing"
    differ = [one != other for one, other in zip(tokens_of(alone), tokens_of(without), strict=True)]
    assert all(differ), "an adapter that changes nothing would show nothing"


@pytest.mark.parametrize("level", [0, 1])
def test_an_engine_that_slept_in_the_middle_answers_as_ever(
    deployed: Deployment, expected: list[list[int]], level: int
) -> None:
    """Level 1 forgets all KV. A build for CPUs keeps the weights where they are, and says so."""
    was_amid = False
    while not was_amid:
        before = deployed.counters()
        was_amid, answers = sleep_amid(deployed, level, "keep")
        assert tokens_of(answers) == expected
    assert deployed.client.get("/is_sleeping").json() == {"is_sleeping": False}
    if level:
        assert "sleep mode is not supported on CPU, ignore it" in deployed.log.read_text()
    assert_took_turns(deployed.counters(), before)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_an_engine_that_ends_its_requests_before_it_sleeps_answers_as_ever(
    deployed: Deployment, expected: list[list[int]], mode: str
) -> None:
    """Those that wait outside of memory end as well: waited for, or aborted."""
    was_amid = False
    while not was_amid:
        was_amid, answers = sleep_amid(deployed, 1, mode)
        if mode == "wait":
            assert tokens_of(answers) == expected
            continue
        was_amid = any(each["finish_reason"] == "abort" for each in answers)
        for tokens, whole in zip(tokens_of(answers), expected, strict=True):
            assert tokens == whole[: len(tokens)]
    assert tokens_of(ask_all(deployed.client, **LONG)) == expected
    until(lambda: is_idle(deployed.counters()), "no request is left, nor any memory")


def sleep_amid(deployed: Deployment, level: int, mode: str) -> tuple[bool, list[dict[str, Any]]]:
    """Ask, and have the engine sleep and wake meanwhile; whether it was so, and the answers."""
    client, before = deployed.client, deployed.counters()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, client, **LONG)
        await_turn(deployed, before)
        was_amid = not asked.done()
        client.post("/sleep", params={"level": level, "mode": mode}).raise_for_status()
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        if mode == "keep":  # What it keeps cannot have ended.
            was_amid = not asked.done()
        awake = {"tags": "scheduling"} if level == 0 else {}
        client.post("/wake_up", params=awake).raise_for_status()
        return was_amid, asked.result(HANG_S)


def await_turn(deployed: Deployment, before: dict[str, float]) -> None:
    """Wait until a request was put out of memory, so that others are under way and wait."""
    name = "aqua:forced_preemptions"
    until(lambda: grown(deployed.counters(), before, name) > 0, "a request makes room")


def test_clients_that_hang_up_leave_nothing_behind(
    deployed: Deployment, expected: list[list[int]]
) -> None:
    before = deployed.counters()
    rounds = 3
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = pool.submit(ask_all, deployed.client, **LONG)
        for _ in range(rounds):
            list(pool.map(lambda prompt: hang_up(deployed.client, prompt), PROMPTS))
        assert tokens_of(answers.result(HANG_S)) == expected
    # One more, whose end tells how many run beside it.
    ask(deployed.client, PROMPTS[0], max_tokens=1)
    until(lambda: is_idle(deployed.counters()), "no request is left, nor any memory")
    after = deployed.counters()
    assert_took_turns(after, before)
    asked = len(PROMPTS) * (1 + rounds) + 1
    aborted = asked - grown(after, before, "vllm:request_success")
    assert aborted >= len(PROMPTS), "hardly any ended before its answer did"
    assert tokens_of(ask_all(deployed.client, **LONG)) == expected


ABANDONED_TOKENS: Final = 400


def hang_up(client: httpx.Client, prompt: list[int]) -> None:
    """Go away once the first token of a long answer has come."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": ABANDONED_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())


def is_idle(metrics: dict[str, float]) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(metrics[f"vllm:{name}"] for name in names)


def test_an_engine_that_is_killed_gives_all_back_and_one_started_anew_serves(
    deployed: Deployment, expected: list[list[int]]
) -> None:
    # The worker is what borrows; killed, it cannot say that it goes.
    (worker,) = deployed.pids("Worker")
    assert_broken(crash(deployed, worker))
    # Memory that a process which died had mapped is not lent again, but made anew.
    deployed.lender.offer(SLABS)
    deployed.start()
    before = deployed.counters()
    assert tokens_of(ask_all(deployed.client, **LONG)) == expected
    assert_took_turns(deployed.counters(), before)
    # Killed from above, it says so, and the books are clean before they would be by its silence.
    (core,) = deployed.pids("EngineCore")
    assert_broken(crash(deployed, core))
    until(lambda: not consumers(deployed), "it has left")


def consumers(deployed: Deployment) -> list[str]:
    """The ids of those in the coordinator's books."""
    found = deployed.coordinator.get("consumers")["consumers"]
    return [each["consumer_id"] for each in found]


def crash(deployed: Deployment, pid: int) -> list[list[str]]:
    """Kill a process of the engine while all prompts are answered; what their clients saw.

    When it returns, the producer and the coordinator have back what was lent.
    """
    before = deployed.counters()
    lent = deployed.coordinator.get("leases")["leases"]
    assert sum(each["bytes"] for each in lent) == SLABS * MIB
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = [pool.submit(streamed, deployed.client, prompt) for prompt in PROMPTS]
        await_turn(deployed, before)
        os.kill(pid, signal.SIGKILL)
        seen = [each.result(HANG_S) for each in streams]
    assert deployed.process.wait(HANG_S) != 0, "a server without an engine ends, as failed"
    until(lambda: deployed.lender.slabs()["leased"] == 0, "the producer has its memory back")
    until(lambda: not deployed.coordinator.get("leases")["leases"], "nothing is booked")
    assert deployed.lender.slabs()["quarantined"] == 0
    return seen


def streamed(client: httpx.Client, prompt: list[int]) -> list[str]:
    """Ask again and again until an answer does not end as it should; what came of that one."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": ABANDONED_TOKENS, "ignore_eos": True}
    while True:
        lines: list[str] = []
        with (
            suppress(httpx.TransportError),
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
        ):
            lines.extend(answer.iter_lines())
        events = [line.removeprefix("data: ") for line in lines if line]
        if not is_whole(events):
            return events


def is_whole(events: list[str]) -> bool:
    """Whether the last tokens of a stream came, and its end."""
    if len(events) < 2 or events[-1] != "[DONE]":
        return False
    last = json.loads(events[-2])
    return "choices" in last and last["choices"][0]["finish_reason"] == "length"


def assert_broken(answers: list[list[str]]) -> None:
    """Clients see an error as the last event, or that the answer breaks off; nothing else."""
    assert any(answers), "nobody was being answered"
    for events in answers:
        if events and events[-1] == "[DONE]":
            assert json.loads(events[-2])["error"]["code"] == HTTPStatus.INTERNAL_SERVER_ERROR
