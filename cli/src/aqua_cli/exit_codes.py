"""How a command ends: one table for all commands, and the one place that reads it from an error.

    0    done
    1    a check failed, a target was missed, or the service refused
    2    wrong usage, input or configuration; nothing was done
    3    something that is needed is not available: a service, solver, engine or device
    130  interrupted (Ctrl-C), as shells have it: 128 + SIGINT

A command says 1 itself (`raise typer.Exit(ExitCode.FAILED)`) where its own answer is "no"; the
others follow from the error that it raises.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of every command of Aqua."""

    DONE = 0
    FAILED = 1
    WRONG = 2
    UNAVAILABLE = 3
    INTERRUPTED = 130


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit status for an expected error.

    Services say with HTTP status 501, 503 and the like that what is needed is not there; errors
    of this program carry the same statuses (`AquaError.http_status`), so one rule serves both.
    """
    from aqua_protocol.errors import (
        AquaError,
        ConfigError,
        RequestInvalidError,
        TransportUnavailableError,
        UnavailableError,
    )

    match error:
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case AquaError(http_status=501) | UnavailableError() | TransportUnavailableError():
            return ExitCode.UNAVAILABLE
        case ConfigError() | RequestInvalidError():
            return ExitCode.WRONG
        case AquaError():
            return ExitCode.FAILED
        case ConnectionError() | TimeoutError():
            return ExitCode.UNAVAILABLE
        case OSError():
            return ExitCode.WRONG
    raise AssertionError(f"{error!r} is not an expected error")
