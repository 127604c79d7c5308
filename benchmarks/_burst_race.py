"""Engines that meet the same requests by turns: who gives orders to each `_burst_engine.py`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from _burst_engine import NULL_CONNECTOR, STOP
from aqua_demo.engines.online_load import Arrival

ENGINE: Final = Path(__file__).with_name("_burst_engine.py")
ENGINE_PYTHON: Final = Path(__file__).resolve().parents[1] / ".venv-engine/bin/python"
BLOCK_TOKENS: Final = 32
STORE_BYTES: Final = 256 << 20
SHAPE: Final = {"layers": 8, "hidden": 256}
TURN_S: Final = 0.25
"""Of an engine: short beside the minutes in which a machine changes, long beside a step."""
BOUND_FACTOR: Final = 2
"""Turns of an engine that is far behind over those of the others: to wait for it would take most of
the time of a burst. Doubled, its completions are known to be up to twice as long."""
HINT: Final = "`make .venv-engine/.ready` makes an environment with vLLM for CPUs"


@contextlib.contextmanager
def started(options: dict[str, dict[str, Any] | None], blocks: int) -> Iterator[dict[str, Bench]]:
    """Engines under these options of the adapter (None: vLLM as it is), and memory to borrow."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aqua-burst-")))
        python = str(ENGINE_PYTHON if ENGINE_PYTHON.exists() else sys.executable)
        note(f"engines run on {python}")
        model = folder / "model"
        write_model(python, model, SHAPE)
        environment = stack.enter_context(lending(python, folder))
        engines = {}
        for name, aqua in options.items():
            note(f"starting {name}: {aqua or 'vLLM as it is'}")
            bench = Bench(python, model, blocks, aqua, environment)
            engines[name] = stack.enter_context(bench)
        for engine in engines.values():
            engine.await_ready()
        yield engines


class Bench:
    """One engine in a process of its own; a context manager.

    Args:
        python: An interpreter with vLLM.
        model: Folder of the model.
        blocks: KV blocks of the engine.
        aqua: Options of the adapter; None for vLLM's own scheduler.
        environment: Of a consumer of Aqua.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        blocks: int,
        aqua: dict[str, Any] | None,
        environment: dict[str, str],
    ) -> None:
        is_paging = aqua not in (None, NULL_CONNECTOR) and aqua.get("mode") != "recompute"
        job = {
            "model": str(model),
            "aqua": aqua,
            "leased_bytes": STORE_BYTES // 2 if is_paging else 0,
            "engine": {
                "max_model_len": 1024,
                "num_gpu_blocks_override": blocks,
                "block_size": BLOCK_TOKENS,
                "max_num_batched_tokens": 512,
                "max_num_seqs": 256,
                "gpu_memory_utilization": 0.1,
                "dtype": "float32",
                "enforce_eager": True,
                "enable_prefix_caching": False,
                "disable_log_stats": True,
                "seed": 0,
            },
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `__exit__`
        self._process = subprocess.Popen(
            [python, str(ENGINE), json.dumps(job)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def await_ready(self) -> None:
        """Wait until it can be given requests; engines start beside each other."""
        self._answer()

    def begin(self, arrivals: list[Arrival]) -> None:
        """Start a run of these."""
        self._order(arrivals)

    def go_on(self, seconds: float) -> dict[str, Any] | None:
        """Serve for so long; the rows and what else was measured, once all are served."""
        answer: dict[str, Any] | None = self._order(seconds)
        return answer

    def stop(self) -> dict[str, Any]:
        """End the run; as `go_on`, with what is unfinished as if it ended now."""
        answer: dict[str, Any] = self._order(STOP)
        return answer

    def _order(self, order: list[Arrival] | float | str) -> Any:  # noqa: ANN401 - as `_answer`
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:  # noqa: ANN401 - whatever was asked
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self._log.seek(0)
        sys.exit(f"{self._log.read()[-3000:]}\nan engine failed; {HINT}")


def race(
    engines: dict[str, Bench], arrivals: list[Arrival], bounded: str | None = None
) -> dict[str, dict[str, Any]]:
    """All of them serve these, by turns; the rows of each and what else was measured.

    Args:
        bounded: An engine that is stopped, and marked as `is_stopped`, once the others have ended
            and it has had `BOUND_FACTOR` times as many turns as any of them.
    """
    turns = Counter[str]()
    for engine in engines.values():
        engine.begin(arrivals)
    order = list(engines)
    shuffler = random.Random(0)
    ended: dict[str, dict[str, Any]] = {}
    while len(ended) < len(engines):
        # Whoever had the machine before leaves its caches: not always the same one.
        shuffler.shuffle(order)
        for name in order:
            if name in ended:
                continue
            turns[name] += 1
            if (figures := engines[name].go_on(TURN_S)) is not None:
                ended[name] = figures
        if bounded is not None and ended.keys() == engines.keys() - {bounded}:
            longest = max(count for name, count in turns.items() if name != bounded)
            if turns[bounded] >= BOUND_FACTOR * longest:
                ended[bounded] = engines[bounded].stop() | {"is_stopped": True}
    return ended


@contextlib.contextmanager
def lending(python: str, folder: Path) -> Iterator[dict[str, str]]:
    """A coordinator and a producer; yields the environment of a consumer."""
    with contextlib.ExitStack() as stack:
        coordinator = subprocess.Popen(
            [
                *(python, "-m", "aqua_coordinator", "serve"),
                *("--port", "0", "--data-dir", str(folder / "d")),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(coordinator.wait)
        stack.callback(coordinator.terminate)
        assert coordinator.stderr is not None
        url = next(json.loads(line)["url"] for line in coordinator.stderr if '"listening"' in line)
        lender = subprocess.Popen(
            # Each of the three that page may take all that its store holds.
            [python, str(ENGINE), "lend", url, str(3 * STORE_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | place("lender"),
        )
        stack.callback(lender.wait)
        assert lender.stdin is not None
        assert lender.stdout is not None
        stack.callback(lender.stdin.close)
        if not lender.stdout.readline():
            sys.exit("nobody lends memory: the benchmark's producer did not start")
        yield place("engine") | {
            "AQUA_COORDINATOR_URL": url,
            "AQUA_SLAB_BYTES": str(4 << 20),
            "AQUA_WANTED_BYTES": str(STORE_BYTES // 2),
        }


def write_model(python: str, model: Path, shape: dict[str, int]) -> None:
    """Write the model that all engines run."""
    command = [python, str(ENGINE), "model", str(model), json.dumps(shape)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"no model could be written; {HINT}")


def place(gpu: str) -> dict[str, str]:
    """Where a member says it is: on one machine, each on a device of its own."""
    return {"AQUA_NODE": "bench", "AQUA_DOMAIN": "bench", "AQUA_GPU_UUID": f"GPU-{gpu}"}


def note(text: str) -> None:
    """Say what goes on, where it does not disturb a reader of the result."""
    print(text, file=sys.stderr, flush=True)
