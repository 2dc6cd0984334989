"""What the client writes to the server: bytes that may be anything."""

from __future__ import annotations

from typing import Any, BinaryIO

from pygls.exceptions import JsonRpcException
from pygls.protocol import LanguageServerProtocol

_LONGEST_HEADER = 10_000  # bytes of a line
_LARGEST_MESSAGE = 50_000_000  # bytes
_CHUNK = 1_000_000
_UNREADABLE = b'"a message that is too large"'


class Input:
    """A stream of bytes, of which no line and no message takes more memory than a limit."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readline(self) -> bytes:
        """A line of a header; its parts, if it is longer than any."""
        return self._stream.readline(_LONGEST_HEADER)

    def read(self, size: int) -> bytes:
        """A message; one that is too large is passed over."""
        if size <= _LARGEST_MESSAGE:
            return self._stream.read(size)
        while size > 0 and (chunk := self._stream.read(min(size, _CHUNK))):
            size -= len(chunk)
        return _UNREADABLE


class Protocol(LanguageServerProtocol):
    """The protocol of pygls, which also answers requests that cannot be read."""

    def structure_message(self, data: dict[str, Any]) -> Any:
        try:
            return super().structure_message(data)
        except JsonRpcException as error:
            if "method" in data and isinstance(number := data.get("id"), int | str):
                self._send_response(number, error=error.to_response_error())
            raise

    def handle_message(self, message: Any) -> None:
        if not hasattr(message, "jsonrpc"):
            raise ValueError("this is no message of JSON-RPC")
        super().handle_message(message)
