"""Profiles as files, JSON or YAML by the name's ending, where they were made, and their sending."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from aqua_cli import parse_document, write_json, write_text
from aqua_client import CoordinatorClient
from aqua_profiler.errors import ProfileInvalidError
from aqua_protocol.profile import ModelProfile, ProfileLabel, Provenance
from aqua_protocol.wire import first_fault

SECRET_OPTIONS: Final = ("--token", "--api-key")
"""Options whose values do not go into a profile."""


def read_profile(path: Path) -> ModelProfile:
    """Read a profile.

    Raises:
        ProfileInvalidError: Unreadable, not JSON or YAML, or not a profile.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = parse_document(text, is_json=path.suffix == ".json")
    except (OSError, ValueError) as error:
        raise ProfileInvalidError(
            f"cannot read {path}: {error}", remedy="Give a file that aqua-profile wrote."
        ) from error
    try:
        return ModelProfile.model_validate(content)
    except ValidationError as error:
        raise ProfileInvalidError(
            f"{path}: {first_fault(error, 'profile')}",
            remedy="Give a file that aqua-profile wrote.",
        ) from error


def write_profile(profile: ModelProfile, path: Path) -> None:
    """Write a profile; whole or not at all."""
    if path.suffix in {".yaml", ".yml"}:
        import yaml

        write_text(path, yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False))
    else:
        write_json(path, profile)


def push(profile: ModelProfile, url: str, token: str | None) -> None:
    """Send a profile to the coordinator, where informers and placers find it.

    Only the fields that the schema fixes are sent: the measurements behind them stay in the file.

    Raises:
        ProfileInvalidError: It is partial or has no label: nothing may act on it.
        AquaError: What the coordinator answered, as its own type.
        UnavailableError: There is no answer.
    """
    if profile.partial or profile.label is ProfileLabel.UNKNOWN:
        raise ProfileInvalidError(
            f"the profile of {profile.model!r} is partial or has no label",
            remedy="Finish it: the same `aqua-profile run` goes on from its journal.",
        )
    # A person waits that long for a coordinator that may be starting.
    with CoordinatorClient(url, token, timeout_s=30.0) as client:
        client.put_profile(profile)


def provenance(workload_sha256: str = "", *, hardware: str = "", engine: str = "") -> Provenance:
    """This process, now; names of the host and of its user stay out."""
    return Provenance(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(sys.argv),
        hardware=hardware or f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        engine=engine,
        workload_sha256=workload_sha256,
        profiler=f"aqua-profiler {version('aqua-profiler')}",
    )


def command_line(arguments: list[str]) -> str:
    """The command, without its secrets."""
    shown, hide = [os.path.basename(arguments[0])], False  # noqa: PTH119 - a string, not a path
    for argument in arguments[1:]:
        name = argument.split("=", 1)[0]
        if hide:
            shown.append("***")
        elif name in SECRET_OPTIONS and "=" in argument:
            shown.append(f"{name}=***")
        else:
            shown.append(argument)
        hide = name in SECRET_OPTIONS and "=" not in argument and not hide
    return shlex.join(shown)
