"""A client of the language server: pygls' own, over standard input and output of `peftc lsp`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.lsp.client import LanguageClient

ROOT = Path(__file__).resolve().parent.parent.parent
LONG = 60  # seconds: an answer that takes longer does not come


class Client(LanguageClient):
    """Follows the diagnostics that the server publishes, and answers what it asks."""

    def __init__(self) -> None:
        super().__init__("peftc-tests", "1")
        self.diagnostics: dict[str, list[types.Diagnostic]] = {}
        self.published: list[types.PublishDiagnosticsParams] = []
        self.messages: list[str] = []
        self.settings: Any = None
        self.refreshed = 0
        self._news = asyncio.Event()
        self._versions: dict[str, int] = {}
        self.texts: dict[str, str] = {}

        @self.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def publish(params: types.PublishDiagnosticsParams) -> None:
            self.published.append(params)
            self.diagnostics[params.uri] = list(params.diagnostics)
            self._news.set()

        @self.feature(types.WINDOW_SHOW_MESSAGE)
        def show(params: types.ShowMessageParams) -> None:
            self.messages.append(params.message)
            self._news.set()

        @self.feature(types.WORKSPACE_CONFIGURATION)
        def configuration(params: types.ConfigurationParams) -> list[Any]:
            return [self.settings for _ in params.items]

        @self.feature(types.WORKSPACE_INLAY_HINT_REFRESH)
        def refresh(params: None) -> None:
            self.refreshed += 1
            self._news.set()

    async def server_exit(self, server: asyncio.subprocess.Process) -> None:
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the server has sent what makes a condition true."""
        while not condition():
            assert self._server is not None
            assert self._server.returncode is None, "the server has ended"
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), LONG)

    def open(self, uri: str, text: str) -> None:
        self._versions[uri], self.texts[uri] = 1, text
        item = types.TextDocumentItem(uri, "peft", 1, text)
        self.text_document_did_open(types.DidOpenTextDocumentParams(item))

    def change(self, uri: str, text: str) -> None:
        """Types: the whole text, as the server asks for."""
        self._versions[uri] += 1
        self.texts[uri] = text
        document = types.VersionedTextDocumentIdentifier(self._versions[uri], uri)
        change = types.TextDocumentContentChangeWholeDocument(text)
        self.text_document_did_change(types.DidChangeTextDocumentParams(document, [change]))

    async def codes(self, uri: str, *codes: str) -> list[types.Diagnostic]:
        """The diagnostics of the present version, once they have these codes."""

        def complete() -> bool:
            last = next((one for one in reversed(self.published) if one.uri == uri), None)
            is_last = last is not None and last.version in (None, self._versions.get(uri))
            return is_last and [one.code for one in self.diagnostics[uri]] == list(codes)

        try:
            await self.until(complete)
        except TimeoutError:
            shown = [f"{one.uri} {one.version}: {[d.message for d in one.diagnostics]}" for one in self.published]
            raise AssertionError("\n".join(shown)) from None
        return self.diagnostics[uri]

    def at(self, uri: str, words: str, shift: int = 0) -> types.Position:
        """The position of the first place of some words, in UTF-16."""
        before = self.texts[uri][: self.texts[uri].index(words) + shift].split("\n")
        return types.Position(len(before) - 1, len(before[-1].encode("utf-16-le")) // 2)

    def place(self, uri: str, words: str, shift: int = 0) -> dict[str, Any]:
        """The arguments of a request about a position."""
        return {"text_document": types.TextDocumentIdentifier(uri), "position": self.at(uri, words, shift)}


def applied(text: str, edits: Any) -> str:
    """A text after edits, as an editor with UTF-16 positions applies them."""
    lines = text.split("\n")

    def offset(at: types.Position) -> int:
        units = lines[at.line].encode("utf-16-le")[: 2 * at.character]
        return sum(len(line) + 1 for line in lines[: at.line]) + len(units.decode("utf-16-le"))

    for edit in sorted(edits or (), key=lambda edit: offset(edit.range.start), reverse=True):
        text = text[: offset(edit.range.start)] + edit.new_text + text[offset(edit.range.end) :]
    return text


@asynccontextmanager
async def connected(folder: Path, **options: Any) -> AsyncIterator[Client]:
    """A client of a server that works in a folder, which it ends in the end.

    Args: `options`: `settings` and `capabilities` of the client.
    """
    client = Client()
    settings: Mapping[str, Any] | None = options.get("settings")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PEFTC_CACHE": str(folder / "cache")}
    await client.start_io(sys.executable, "-m", "peftc", "lsp", cwd=folder, env=env)
    process = client._server
    assert process is not None
    errors = asyncio.ensure_future(process.stderr.read() if process.stderr else asyncio.sleep(0))
    try:
        params = types.InitializeParams(
            options.get("capabilities") or types.ClientCapabilities(),
            initialization_options=settings,
            workspace_folders=[types.WorkspaceFolder(folder.as_uri(), "work")],
        )
        await client.initialize_async(params)
        client.initialized(types.InitializedParams())
        yield client
        assert process.returncode is None, (await errors or b"").decode()
        await asyncio.wait_for(client.shutdown_async(None), LONG)
        client.exit(None)
        assert await asyncio.wait_for(process.wait(), LONG) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await errors
        await client.stop()


def run(session: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a session to its end."""
    asyncio.run(session())
