"""What `make gpu` needs and does not find here, said before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Final

MODULES: Final = {
    "torch": "torch",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "httpx": "httpx",
    "jaxtyping": "jaxtyping",
    "prometheus_client": "prometheus-client",
    "typing_extensions": "typing-extensions",
    "xxhash": "xxhash",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}
"""Modules that steps import, and the packages that have them."""

BRING: Final = """\
Without a registry, bring wheels along: where there is one, for this machine's Python ({python}),
    pip download --only-binary=:all: --python-version {python} -d wheels {packages}
and here
    pip install --no-index --find-links wheels --target site {packages}
    PYTHONPATH=site make gpu NO_VENV=1"""


def missing_modules() -> list[str]:
    """Packages that are needed and not installed."""
    return [package for name, package in MODULES.items() if not is_there(name)]


def is_there(module: str) -> bool:
    """Whether a module can be found."""
    return importlib.util.find_spec(module) is not None


def why_no_gpu() -> str | None:
    """What keeps a GPU from being used, and what to do; None if nothing does."""
    import torch

    if torch.version.cuda is None:
        return f"this is torch {torch.__version__}, without CUDA: install a CUDA build of torch"
    from aqua_protocol import TransportUnavailableError
    from aqualib.transports.cuda_driver import load_driver

    try:
        driver = load_driver()
    except TransportUnavailableError as error:
        return f"{error.message}. {error.remedy}"
    if not driver.device_count:
        return "the driver sees no GPU: look at `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    return (
        None if torch.cuda.is_available() else "torch sees no GPU: its CUDA does not fit the driver"
    )
