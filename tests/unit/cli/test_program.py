"""Every command ends alike: a sentence or a JSON object, a remedy, and a code of one table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from aqua_cli import ExitCode, Json, exit_code_of
from aqua_cli.program import command_of, run
from aqua_protocol import (
    AquaError,
    CapacityError,
    ConfigError,
    TransportError,
    TransportUnavailableError,
    UnavailableError,
)
from aqua_protocol.errors import ForbiddenError, RequestTooLargeError, StoreUnavailableError
from harness.bounds import HANG_S
from harness.closed_pipe import into_closed_pipe


class SolverMissingError(ConfigError):
    """A configuration that this machine cannot serve."""

    http_status = 501


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 2),
        (RequestTooLargeError("no"), 2),
        (FileNotFoundError(2, "no", "file"), 2),
        (CapacityError("no"), 1),
        (ForbiddenError("no"), 1),
        (TransportError("no"), 1),
        (UnavailableError("no"), 3),
        (StoreUnavailableError("no"), 3),
        (TransportUnavailableError("no"), 3),
        (SolverMissingError("no"), 3),
        (ConnectionRefusedError(111, "no"), 3),
        (TimeoutError("no"), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_expected_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def failing(error: BaseException | None) -> typer.Typer:
    app = typer.Typer(add_completion=False, no_args_is_help=True)

    @app.command()
    def act(count: int = 1, *, as_json: Json = False) -> None:
        del count, as_json
        if error is not None:
            raise error

    @app.command()
    def other() -> None:
        raise typer.Exit(ExitCode.FAILED)

    return app


def ended(error: BaseException | None, *args: str) -> int:
    return run(command_of(failing(error), "aqua-act"), "aqua-act", args)


def test_an_error_is_a_sentence_and_a_remedy_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(ConfigError("it is wrong", remedy="Mend it."), "act") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "aqua-act: it is wrong [config_invalid]\n  Mend it.\n"


def test_under_json_an_error_is_one_object_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(CapacityError("none left", remedy="Wait.", wanted=3), "act", "--json") == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "error": {
            "code": "capacity_exhausted",
            "message": "none left",
            "remedy": "Wait.",
            "details": {"wanted": 3},
        }
    }


@pytest.mark.parametrize(
    "args", [("act", "--frob"), ("act", "--count", "many"), ("frob",)], ids=" ".join
)
def test_wrong_usage_is_told_alike(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(None, *args) == 2
    assert "[usage]\n  `aqua-act" in capsys.readouterr().err
    assert ended(None, *args, "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(FileNotFoundError(2, "No such file or directory", "plan.json"), "act") == 2
    assert "plan.json: No such file" in capsys.readouterr().err


def test_an_interruption_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(KeyboardInterrupt(), "act") == 130
    assert capsys.readouterr().err == "aqua-act: interrupted\n"
    assert ended(KeyboardInterrupt(), "act", "--json") == 130
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "interrupted"


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        ended(ZeroDivisionError(), "act")


def test_a_command_says_itself_that_a_check_failed() -> None:
    assert ended(None, "other") == 1
    assert ended(None, "act") == 0


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(None) == 2
    out, err = capsys.readouterr()
    assert "--version" in out + err
    assert "[usage]" not in err


def test_the_version_names_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command_of(failing(None), "aqua-place"), "aqua-place", ["--version"]) == 0
    assert capsys.readouterr().out == "aqua-place 0.1.0 (aqua-placer)\n"


def test_every_error_of_the_wire_has_an_exit_code() -> None:
    from aqua_protocol.errors import ERRORS_BY_CODE

    for kind in ERRORS_BY_CODE.values():
        assert exit_code_of(kind("no")) in set(ExitCode)
    assert issubclass(SolverMissingError, AquaError)


def test_a_reader_that_has_left_ends_the_command_without_a_trace(tmp_path: Path) -> None:
    script = tmp_path / "many.py"
    script.write_text(
        "import typer\nfrom aqua_cli import main\napp = typer.Typer()\n"
        "@app.command()\ndef many() -> None:\n    [print('line') for _ in range(100_000)]\n"
        "main(app, 'aqua-many')\n"
    )
    done = into_closed_pipe([sys.executable, str(script)], 60)
    assert (done.returncode, done.stderr) == (1, "")


def test_importing_it_loads_nothing_heavy() -> None:
    script = (
        "import sys, aqua_cli\n"
        "heavy = {'pydantic', 'aqua_protocol', 'matplotlib', 'numpy', 'rich.progress', 'httpx'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("where", "status"), [(">/dev/full", ExitCode.WRONG), (">&-", ExitCode.DONE)]
)
def test_an_output_that_takes_nothing_ends_without_a_trace(where: str, status: ExitCode) -> None:
    command = f"{sys.executable} -c 'from aqua_cli.aqua import main; main()' doctor --json {where}"
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in {status, ExitCode.FAILED}
    assert ("No space left" in done.stderr) == (where == ">/dev/full")
