"""A file that operators replace while the coordinator runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from aqua_client.tls import file_version
from aqua_protocol import ConfigError

log = structlog.get_logger(__name__)

ContentT = TypeVar("ContentT")


class FollowedFile(Generic[ContentT]):
    """The content of a file as it was when it could last be read.

    Args:
        path: Of the file.
        read: Reads and checks it; raises `ConfigError` where it is no good.

    Attributes:
        content: What was read last.

    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(self, path: Path, read: Callable[[Path], ContentT]) -> None:
        self.path = path
        self._read = read
        self.content = self._look()

    def refresh(self) -> bool:
        """Read it again if it has changed, and tell whether it was; a bad one changes nothing."""
        try:
            if file_version(self.path) == self._version:
                return False
            self.content = self._look()
        except (ConfigError, OSError) as error:
            log.warning(
                "file not usable, keeping its content", path=str(self.path), error=str(error)
            )
            return False
        log.info("file read again", path=str(self.path))
        return True

    def _look(self) -> ContentT:
        # Before reading: a change that falls in between shows as another version the next time.
        version = file_version(self.path)
        content = self._read(self.path)
        self._version = version
        return content
