"""Profiles of one real vLLM that should agree, and a rate above theirs that should not hold.

A tiny Llama on a CPU behind vLLM's API server is profiled several times by `aqua-profile`, with one
seed and with others, then loaded at the median of the rates found and at 1.2 times that. What it
shows: how far apart two profiles of one deployment are on this machine, and whether the rate means
anything. On two cores the server, its engine and the load share them, so the rate is that of all
three; beside other work nothing here is worth reading.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

ROOT: Final = Path(__file__).resolve().parents[1]
ENGINE_PYTHON: Final = ROOT / ".venv-engine/bin/python"
PROFILER: Final = ROOT / ".venv/bin"
HINT: Final = "`make venv` and `make .venv-engine/.ready` make the environments that this needs"
START_WITHIN_S: Final = 900.0
MODEL: Final = "tiny"
SHAPE: Final = {"hidden": 512, "layers": 8}
WRITE_MODEL: Final = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
    " from harness.tiny_llama import write_tiny_llama;"
    " write_tiny_llama(Path(sys.argv[2]), **json.loads(sys.argv[3]))"
)
SPREAD_BAR, OVERLOAD = 1.15, 1.2


def main(
    seeds: Annotated[str, typer.Option(help="Of the profiles, in turn.")] = "0,0,1",
    budget_s: Annotated[float, typer.Option(help="Of each profile.")] = 90.0,
    hold_s: Annotated[float, typer.Option(help="Of the load at a fixed rate.")] = 30.0,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Profile, compare, overload."""
    require_environments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lengths = _lengths(folder / "lengths.csv")
        write_model(folder / "model", SHAPE)
        flags = "--served-model-name", MODEL, "--max-model-len", "512"
        with api_server(folder / "model", folder / "vllm.log", *flags) as url:
            profiles = []
            for number, seed in enumerate(seeds.split(",")):
                profiles.append(_profile(url, lengths, folder / f"{number}.json", budget_s, seed))
                print(json.dumps(profiles[-1]), file=sys.stderr)
            rates = [profile["rate_per_s"] for profile in profiles]
            middle = statistics.median(rates)
            held = [_hold(url, lengths, share * middle, hold_s) for share in (1.0, OVERLOAD)]
    report = {
        "profiles": profiles,
        "spread": max(rates) / min(rates),
        "bar": SPREAD_BAR,
        "at_the_rate": held[0],
        "above_it": held[1],
    }
    if as_json:
        print(json.dumps(report))
        return
    print(f"rates {rates}, spread {report['spread']:.3f} (bar {SPREAD_BAR})")
    for share, load in zip((1.0, OVERLOAD), held, strict=True):
        print(
            f"{share:g} x: {load['rate_per_s']:.2f}/s, TTFT p50 {load['ttft_s']:.3f} s,"
            f" p99 {load['ttft_p99_s']:.3f} s, between tokens p99 {load['tbt_s'] * 1e3:.0f} ms"
        )


def _lengths(path: Path) -> Path:
    generator = random.Random(5)
    rows = [
        f"{max(4, min(90, round(generator.lognormvariate(3.0, 0.6))))},"
        f"{max(2, min(80, round(generator.lognormvariate(3.0, 0.6))))}\n"
        for _ in range(500)
    ]
    path.write_text("prompt_tokens,output_tokens\n" + "".join(rows))
    return path


def require_environments() -> None:
    """Refuse to begin without both."""
    if not (ENGINE_PYTHON.exists() and (PROFILER / "aqua-profile").exists()):
        raise typer.BadParameter(HINT)


def write_model(model: Path, shape: dict[str, int]) -> None:
    """Write a tiny Llama with a tokenizer; its vocabulary has a little more than 256 words."""
    arguments = [str(ROOT / "tests"), str(model), json.dumps(shape)]
    subprocess.run([ENGINE_PYTHON, "-c", WRITE_MODEL, *arguments], check=True, capture_output=True)


@contextmanager
def api_server(model: Path, log: Path, *flags: str, **environment: str) -> Iterator[str]:
    """VLLM's API server for a model, eager and in float32, on a free port; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "--model": str(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--block-size": "32",
        "--kv-cache-memory-bytes": str(64 << 20),
        "--dtype": "float32",
    }
    command = [str(ENGINE_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    for name, value in options.items():
        command += [name, value]
    usual = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as sink:
        server = subprocess.Popen(
            [*command, *flags], stdout=sink, stderr=sink, env=os.environ | usual | environment
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(server, url, log)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(30)


def _await_health(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up_s = time.monotonic() + START_WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 - our own
                return
        except OSError:
            if server.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-3000:]}") from None
            time.sleep(0.5)


def _profile(url: str, lengths: Path, output: Path, budget_s: float, seed: str) -> dict[str, Any]:
    """One profile, as `aqua-profile` makes it; bursts are left out."""
    began_s = time.monotonic()
    command = [str(PROFILER / "aqua-profile"), "run", "llm", "--endpoint", url, "--model", MODEL]
    command += ["--lengths", str(lengths), "--budget-s", str(budget_s), "--seed", seed]
    command += ["--threshold", "1B", "--output", str(output), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    content = json.loads(done.stdout)
    return {
        "seed": int(seed),
        "rate_per_s": content["stable_rate_per_s"],
        "limited_by": content["limited_by"],
        "confidence": content["confidence"],
        "partial": content["partial"],
        "requests": content["requests_sent"],
        "runs": [(run["rate_per_s"], run["stop"], run["sent"]) for run in content["runs"]],
        "lateness_p99_s": content["lateness_p99_s"],
        "seconds": time.monotonic() - began_s,
        "notes": content["notes"],
    }


def _hold(url: str, lengths: Path, rate: float, seconds: float) -> dict[str, Any]:
    script = Path(__file__).with_name("_steady_load.py")
    command = [PROFILER / "python", script, url, MODEL, lengths, str(rate), str(seconds), "77"]
    done = subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    typer.run(main)
