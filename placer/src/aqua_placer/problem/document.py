"""Files as parsed documents: JSON or YAML, gzipped or not, with what is wrong with them named."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any, Final

from aqua_cli import parse_document
from aqua_placer.errors import ProblemInvalidError

MAX_FILE_BYTES: Final = 1 << 30
"""A problem of a million groups takes some 100 MB; more is a mistake or an attack.
Doubled, a mistake takes twice the memory before it is refused."""


def read_document(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """The parsed content of a JSON or YAML file, `.gz` or not.

    Raises:
        ProblemInvalidError: Unreadable, too large, or neither JSON nor YAML.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemInvalidError(
            f"cannot read {path}: {error}", remedy="Check the path and that the file is whole."
        ) from error
    if len(raw) > MAX_FILE_BYTES:
        raise ProblemInvalidError(
            f"{path} is larger than {MAX_FILE_BYTES} bytes", remedy="Split the cluster."
        )
    is_json = ".json" in path.suffixes
    try:
        return parse_document(raw.decode(), is_json=is_json)
    except ValueError as error:
        raise ProblemInvalidError(
            f"{path} is not {'JSON' if is_json else 'YAML'}: {error}",
            remedy="Mend the syntax at the named place.",
        ) from error
