"""Every expression of `deploy/` returns data on a Prometheus that scrapes a live cluster.

A coordinator, a vLLM that lends, one that borrows and co-serves, a batch service in front of it, a
consumer of aqualib's and a stand-in for DCGM's exporter; all real but the last. The vLLMs are CPU
builds from `.venv-engine`.

An engine lends while it is idle and takes memory back while requests wait, so no one moment has all
series: requests come and go until each expression has returned a number once.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import openai
import pytest

from aqua_protocol import MIB
from harness import promql
from harness.batch_service import BatchServiceProcess, submit, wait_until
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.dcgm_exporter import dcgm_exporter
from harness.prometheus_process import PrometheusProcess
from harness.scraped_consumer import ScrapedConsumer
from harness.source_tree import ROOT
from harness.tiny_llama import write_tiny_llama
from harness.vllm_server import free_port, vllm_server

pytestmark = pytest.mark.timeout(1800)

ENGINE_PYTHON: Final = ROOT / ".venv-engine" / "bin" / "python"
ANSWERED_WITHIN_S: Final = 900.0
"""Until every expression has returned data: seconds where the machine is quiet, minutes beside
busy neighbours."""

LENDER: Final = (
    *("--num-gpu-blocks-override", "128"),
    *("--scheduler-cls", "aqualib.engines.vllm.LendingScheduler"),
    *("--worker-cls", "aqualib.engines.vllm.LendingWorker"),
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
)
PAGING: Final = {
    "policy": "cfs",
    "slice_iterations": 4,
    "granularity_tokens": 0,
    "store_bytes": "8MiB",
    "co_serving": {"ttft_s": 30.0, "tpot_s": 10.0},
}
BORROWER: Final = (
    *("--scheduler-cls", "aqualib.engines.vllm.AquaScheduler"),
    *("--worker-cls", "aqualib.engines.vllm.AquaWorker"),
    "--kv-transfer-config",
    json.dumps(
        {
            "kv_connector": "AquaConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": PAGING,
        }
    ),
)


@contextmanager
def cluster(
    folder: Path,
) -> Iterator[tuple[PrometheusProcess, httpx.Client, httpx.Client, openai.OpenAI]]:
    """Prometheus, the vLLM that lends, the one that borrows, and the batch service before it."""
    model = write_tiny_llama(folder / "tiny")
    ports = {name: free_port() for name in ("lender", "borrower", "lending", "consumer", "prom")}
    with ExitStack() as stack:
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="aqua-", dir="/tmp"))
        dcgm = stack.enter_context(dcgm_exporter(3))
        coordinator = stack.enter_context(
            CoordinatorProcess(stack.enter_context(data_dir()), AQUA_HEARTBEAT_S="0.2")
        )
        shared = {
            "AQUA_COORDINATOR_URL": coordinator.url,
            "AQUA_SOCKET_DIR": sockets,
            "AQUA_NODE": "node",
            "AQUA_DOMAIN": "domain",
            "AQUA_SLAB_BYTES": str(MIB),
        }
        lend = {
            "bytes": "5MiB",
            "reserve_bytes": 0,
            "calm_s": 1.0,
            "metrics_port": ports["lending"],
        }

        def start(name: str, gpu: int, *flags: str, **environment: str) -> httpx.Client:
            return stack.enter_context(
                vllm_server(
                    model,
                    folder / f"{name}.log",
                    *flags,
                    port=ports[name],
                    python=str(ENGINE_PYTHON),
                    **shared,
                    AQUA_GPU_UUID=f"GPU-{gpu}",
                    **environment,
                )
            )

        additional = json.dumps({"aqua": {"lend": lend}})
        lender = start("lender", 0, *LENDER, "--additional-config", additional)
        borrower = start("borrower", 1, *BORROWER, AQUA_WANTED_BYTES=str(2 * MIB))
        consumer = stack.enter_context(
            ScrapedConsumer(ports["consumer"], MIB, MIB, **shared, AQUA_GPU_UUID="GPU-2")
        )
        assert consumer.answer() == {"event": "serving"}
        # The second engine is away: nothing listens there.
        engines = [f"http://127.0.0.1:{port}" for port in (ports["borrower"], free_port())]
        batch = stack.enter_context(BatchServiceProcess(folder / "batch", engines))
        targets = {
            "localhost:7720": batch.url.removeprefix("http://"),
            "localhost:7700": f"127.0.0.1:{coordinator.port}",
            "localhost:8000": f"127.0.0.1:{ports['lender']}",
            "localhost:8001": f"127.0.0.1:{ports['borrower']}",
            "localhost:9410": f"127.0.0.1:{ports['lending']}",
            "localhost:9420": f"127.0.0.1:{ports['consumer']}",
            "localhost:9400": f"127.0.0.1:{dcgm}",
        }
        data = folder / "prometheus"
        data.mkdir()
        prometheus = stack.enter_context(PrometheusProcess(data, ports["prom"], targets))
        yield prometheus, lender, borrower, batch.client()


def complete(client: httpx.Client, rng: random.Random, request_count: int, tokens: int) -> None:
    """Have so many prompts answered at once."""

    def ask(prompt: list[int]) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        client.post("/v1/completions", json=body, timeout=600).raise_for_status()

    prompts = [[rng.randrange(2, 320) for _ in range(60)] for _ in range(request_count)]
    with ThreadPoolExecutor(request_count) as pool:
        list(pool.map(ask, prompts))


def offline_line(custom_id: str, tokens: int) -> bytes:
    """A line of a batch file for the tiny model; offline by its body, so without a middleware."""
    body = {
        "model": "tiny",
        "prompt": [5] * 60,
        "max_tokens": tokens,
        "ignore_eos": True,
        "vllm_xargs": {"aqua_class": "offline"},
    }
    url = "/v1/completions"
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(line).encode() + b"\n"


@contextmanager
def traffic(
    is_lent: Callable[[], bool], lender: httpx.Client, borrower: httpx.Client, batch: openai.OpenAI
) -> Iterator[None]:
    """Requests for all, until left: a few beside loans, then more than the memory left holds."""
    ended = threading.Event()

    def keep_lender_busy() -> None:
        rng = random.Random(1)
        while not ended.is_set():
            while not is_lent() and not ended.wait(0.1):
                pass
            for _ in range(4):
                complete(lender, rng, 2, 40)  # Steps beside loans.
            complete(lender, rng, 24, 100)  # Some have to wait: memory is taken back.

    def keep_borrower_busy() -> None:
        rng = random.Random(2)
        while not ended.is_set():
            complete(borrower, rng, 12, 100)

    def keep_batches_coming() -> None:
        while not ended.is_set():
            # The last is one that the engine refuses: longer than its context.
            lengths = [*([40] * 8), 100_000]
            lines = [offline_line(f"{at}", length) for at, length in enumerate(lengths)]
            wait_until(batch, submit(batch, lines, endpoint="/v1/completions").id)

    with ThreadPoolExecutor(3) as pool:
        busy = (keep_lender_busy, keep_borrower_busy, keep_batches_coming)
        work = [pool.submit(each) for each in busy]
        try:
            yield
        finally:
            ended.set()
    for done in work:
        done.result()


def answered(what: Iterable[str], asks: Callable[[str], bool]) -> set[str]:
    """What is never answered, of all that is asked again and again within the bound."""
    left = set(what)
    give_up_s = time.monotonic() + ANSWERED_WITHIN_S
    while left and time.monotonic() < give_up_s:
        left = {text for text in left if not asks(text)}
        threading.Event().wait(0.5 if left else 0)
    return left


def test_every_expression_returns_data_and_every_selector_matches_a_series(
    tmp_path: Path,
) -> None:
    assert shutil.which("prometheus"), "apt-get install prometheus"
    panels = promql.panel_expressions()
    rules = promql.rule_expressions()
    with cluster(tmp_path) as (prometheus, lender, borrower, batch):

        def is_lent() -> bool:
            return prometheus.has_data("sum(aqua_lender_leased_bytes) > 0")

        with traffic(is_lent, lender, borrower, batch):
            wanted = {expression.text for expression in panels}
            wanted |= {rule["record"] for rule in promql.rules()}
            silent = answered(wanted, prometheus.has_data)
        assert not prometheus.targets_down()
        assert not prometheus.rules_failing()
        where = {expression.text: expression.where for expression in panels}
        assert not [f"{where.get(text, 'rule')}: {text}" for text in sorted(silent)]

        unmatched = [
            f"{expression.where}: {selector}"
            for expression in panels + rules
            for selector in expression.selectors()
            if not prometheus.has_series(selector)
        ]
        assert not unmatched
        for place, series, label in promql.label_queries():
            assert prometheus.label_values(series, label), place
        for alert in promql.rules(promql.ALERT_RULES):
            prometheus.has_data(alert["expr"])  # Raises if Prometheus cannot evaluate it.

        # The negative control: this is not a Prometheus that has data for everything.
        assert not prometheus.has_data("aqua_no_such_series")
        assert not prometheus.has_series('aqua_reclaims_total{outcome="no such"}')
