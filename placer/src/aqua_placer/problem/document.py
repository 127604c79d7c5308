"""Files as parsed documents: JSON or YAML, gzipped or not, with what is wrong with them named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Final

from aqua_placer.errors import ProblemInvalidError

MAX_FILE_BYTES: Final = 1 << 30
"""A problem of a million groups takes some 100 MB; more is a mistake or an attack."""


def read_document(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """The parsed content of a JSON or YAML file, `.gz` or not.

    Raises:
        ProblemInvalidError: Unreadable, too large, or neither JSON nor YAML.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as stream:
                raw = stream.read(MAX_FILE_BYTES + 1)
        else:
            with path.open("rb") as stream:
                raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError) as error:
        raise ProblemInvalidError(
            f"cannot read {path}: {error}", remedy="Check the path and that the file is whole."
        ) from error
    if len(raw) > MAX_FILE_BYTES:
        raise ProblemInvalidError(
            f"{path} is larger than {MAX_FILE_BYTES} bytes", remedy="Split the cluster."
        )
    return parse_document(raw, str(path), yaml=".json" not in path.suffixes)


def parse_document(raw: bytes, source: str, *, yaml: bool) -> Any:  # noqa: ANN401 - as above
    """Parse JSON, and with `yaml` also YAML; `source` is for messages."""
    try:
        text = raw.decode()
        if not yaml:
            return json.loads(text)
        import yaml as pyyaml

        try:
            return pyyaml.safe_load(text)
        except pyyaml.YAMLError as error:
            raise ProblemInvalidError(
                f"{source} is not YAML: {error}", remedy="Mend the syntax at the named line."
            ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProblemInvalidError(
            f"{source} is not JSON: {error}", remedy="Mend the syntax at the named place."
        ) from error
