"""The test tiers: each test carries the mark of its folder, `tests/<tier>/<package>/test_*.py`.

What this file owns: the marks, the clean skip of `gpu` tests where there is no CUDA device, and
that luck decides nothing: Hypothesis draws the same examples every time and generators are seeded.
A contract suite may add `pytest.mark.gpu` to single parameters; they are skipped alike.
Fixtures that start processes or servers live in `harness/`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Final

import pytest

TIERS: Final = frozenset(
    {"unit", "property", "contract", "model", "simulation", "integration"}
    | {"engine", "e2e", "chaos", "failover", "gpu", "dashboards", "release", "chart", "images"}
    | {"console", "docs"}
)
SEED: Final = 0
"""Of the global generators at the start of each test."""

# How long a store's disk or a coordinator may take is the machine's affair (`harness/bounds.py`);
# 60 s is as long as the settings allow. A test that is about this time sets its own. What processes
# of tests get stands in `harness/patience.py`.
for setting in ("AQUA_STORE_TIMEOUT_S", "AQUA_REQUEST_TIMEOUT_S"):
    os.environ.setdefault(setting, "60")

# Threads of tiny operations mostly wait for each other, and spin meanwhile: where two processes of
# tests share two cores, a tiny pipeline takes five times the processor time. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS_ROOT: Final = Path(__file__).resolve().parent

# Settings of plugins that a GPU machine without registry access may lack (`make test-gpu
# NO_VENV=1`). Declared here when the plugin is absent, so that --strict-config accepts them.
PLUGIN_SETTINGS: Final = {
    "pytest_timeout": ("timeout",),
    "pytest_asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for plugin, settings in PLUGIN_SETTINGS.items():
        if importlib.util.find_spec(plugin) is None:
            for setting in settings:
                parser.addini(setting, f"read by {plugin}, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        # Both without a deadline and a health check by the clock: they measure the machine.
        unhurried = [HealthCheck.too_slow]
        # The default: the same examples every time, so that no test fails by luck. It is loaded
        # before the tests are, whose own settings take over what they do not set.
        settings.register_profile(
            "repeatable",
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=unhurried,
        )
        # `make fuzz`: others every time, and a way to see a failure again.
        settings.register_profile(
            "fuzz", print_blob=True, deadline=None, suppress_health_check=unhurried
        )
        settings.load_profile("repeatable")
    if importlib.util.find_spec("pytest_timeout") is None:
        config.addinivalue_line("markers", "timeout(seconds): ignored without pytest-timeout")


def pytest_runtest_setup() -> None:
    """Begin each test at the same state of the global generators, whatever ran before it."""
    random.seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(SEED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(_tier_of(item.path))
        if item.get_closest_marker("gpu") is not None and (reason := _why_no_cuda()) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    twice = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if twice:
        raise pytest.UsageError(f"tests of one name, of which xdist runs one: {twice}")


def pytest_collection_finish() -> None:
    """Take what was imported out of the collector's sight.

    Hundreds of tests look for cycles that they made, and each would go through a million objects.
    """
    gc.collect()
    gc.freeze()


def _tier_of(path: Path) -> str:
    tier = path.relative_to(TESTS_ROOT).parts[0]
    if tier not in TIERS:
        message = f"{path}: tests live in tests/<tier>/<package>/, tier one of {sorted(TIERS)}"
        raise pytest.UsageError(message)
    return tier


@cache
def _why_no_cuda() -> str | None:
    """Say why `gpu` tests cannot run here, or None where they can.

    Asks NVML rather than the CUDA runtime where possible: an initialised runtime would not
    survive the forks of the multi-process tests. With the stand-in (`gpu/conftest.py`) they can.
    """
    if os.environ.get("AQUA_GPU_TESTS_ON_STAND_IN"):
        return None
    if importlib.util.find_spec("torch") is None:
        return "no CUDA device: torch is not installed"
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        if torch.cuda.is_available():
            return None
    return "no CUDA device: torch.cuda.is_available() is false"
