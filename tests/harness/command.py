"""A command of Aqua in this process: what it prints and its exit status, as its program has them.

A process of its own costs one to two seconds of a processor, for Python and what the command
imports. So each command is run as a program once, by the test of what it does; its variants and
refusals are run here, by the function that its program ends in (`aqua_cli.program.run`).
"""

from __future__ import annotations

import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from subprocess import CompletedProcess

import typer

from aqua_cli.program import command_of, run


def run_here(app: typer.Typer, name: str, *arguments: object) -> CompletedProcess[str]:
    """Run `name` with these arguments; unforeseen exceptions are the caller's."""
    words = [str(each) for each in arguments]
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("default")  # As in a program: a warning is no error.
        status = run(command_of(app, name), name, words)
    return CompletedProcess([name, *words], int(status), out.getvalue(), err.getvalue())
