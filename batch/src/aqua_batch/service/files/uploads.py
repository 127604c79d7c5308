"""Takes an upload: a multipart form whose file goes to the store as it comes.

Nothing is spooled: a piece of a MiB at most is in memory, then in the store. Fields come in any
order, so what they say is checked at the end; bounds are checked as bytes come.

Source: OpenAI API reference, "Upload file"; RFC 7578.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import IO, Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from aqua_batch.service.files.objects import PIECE_BYTES
from aqua_batch.service.refusals import BatchApiError, UploadTooLargeError

MOST_FIELDS: Final = 16
"""Fields of a form, its file with them; OpenAI's has five. Doubled, a form of garbage takes 64 KiB
more."""
LONGEST_FIELD_BYTES: Final = 4096
"""Bytes of a field; OpenAI's longest is a word. Doubled, as above."""
FRAME_BYTES: Final = MOST_FIELDS * (LONGEST_FIELD_BYTES + 4096)
"""Bytes of a body beside its file: fields, and headers of parts. Doubled, as above."""


class UploadForm:
    """A form as it is read.

    Args:
        content_type: The request's header.
        file: Where the bytes of the form's file go.
        max_bytes: Of the file.

    Attributes:
        fields: Values by name, of those that are no file.
        filename: As the client sent it; None until its part came.
        size_bytes: Of the file.

    Raises:
        BatchApiError: It is no multipart form.
    """

    def __init__(self, content_type: str | None, file: IO[bytes], max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise BatchApiError("the body must be a multipart/form-data form", param="file")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size_bytes = 0
        self._file = file
        self._max_bytes = max_bytes
        self._piece = bytearray()
        self._header = bytearray()
        self._value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name: str | None = None
        self._is_file = False
        self._field = bytearray()
        self._is_whole = False
        self._field_count = 0
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header,
                    "on_header_value": self._on_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise BatchApiError(f"the form cannot be read: {error}") from error

    async def read(self, body: AsyncIterator[bytes]) -> None:
        """Read the whole form.

        Raises:
            BatchApiError: It is broken, ends early, or has no file.
            UploadTooLargeError: The file or the form is too large.
        """
        received = 0
        try:
            async for part in body:
                received += len(part)
                if received > self._max_bytes + FRAME_BYTES:
                    raise self._too_large()
                self._parser.write(part)
                if len(self._piece) >= PIECE_BYTES:
                    await self._flush()
        except FormParserError as error:
            raise BatchApiError(f"the form cannot be read: {error}") from error
        await self._flush()
        if not self._is_whole:
            raise BatchApiError("the form ends in the middle")
        if self.filename is None:
            raise BatchApiError("'file' is a required property", param="file")

    async def _flush(self) -> None:
        piece, self._piece = self._piece, bytearray()
        await asyncio.to_thread(self._file.write, piece)

    def _too_large(self) -> UploadTooLargeError:
        return UploadTooLargeError(
            f"the file is larger than {self._max_bytes} bytes",
            param="file",
            remedy="Split it into several batches.",
        )

    def _on_part_begin(self) -> None:
        # Those without a name, or all of one, count as well: each is work.
        self._field_count += 1
        if self._field_count > MOST_FIELDS:
            raise BatchApiError(f"the form has more than {MOST_FIELDS} fields")
        self._headers.clear()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        self._is_file = name == "file" and filename is not None
        if self._is_file:
            if self.filename is not None:
                raise BatchApiError("the form has two files", param="file")
            self.filename = (filename or b"").decode(errors="replace")
        self._name = name
        self._field.clear()

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._field += data[start:end]
            if len(self._field) > LONGEST_FIELD_BYTES:
                raise BatchApiError("a field of the form is too long", param=self._name)
            return
        self.size_bytes += end - start
        if self.size_bytes > self._max_bytes:
            raise self._too_large()
        self._piece += memoryview(data)[start:end]

    def _on_part_end(self) -> None:
        if not self._is_file and self._name:
            self.fields[self._name] = self._field.decode(errors="replace")

    def _on_end(self) -> None:
        self._is_whole = True


def clean_filename(name: str) -> str:
    """The last part of a path, without what terminals and headers take for commands."""
    last = name.replace("\\", "/").rpartition("/")[2]
    kept = "".join(letter for letter in last if letter.isprintable() and letter not in '"%')
    return kept[:255] if kept.strip(". ") else "unnamed"
