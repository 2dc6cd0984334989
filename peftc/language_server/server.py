"""The language server: it follows the texts that a client has open, and answers what it asks."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lsprotocol import types
from pygls.lsp.server import LanguageServer

from peftc import __version__
from peftc.filesystem.open_texts import OpenTexts, reading
from peftc.language_server import actions
from peftc.language_server.analysis import Analysis, Published, analyse, setup_of
from peftc.language_server.diagnostics import by_file, to_protocol
from peftc.language_server.documents import Document, Documents, Settings
from peftc.language_server.formatting import format_edits
from peftc.language_server.transport import Input, Protocol

T = TypeVar("T")
_PATIENCE = 2.0  # seconds for which an answer waits until a text has been analysed


class Server(LanguageServer):
    """Texts, and what is known of them.

    A text is analysed alone in one thread, and on models in another, version by version: what is of
    an older version is dropped. Typing never waits.
    """

    def __init__(self) -> None:
        super().__init__(
            "peftc",
            __version__,
            text_document_sync_kind=types.TextDocumentSyncKind.Full,
            protocol_cls=Protocol,
        )
        self.documents = Documents()
        self.settings = Settings()
        self.published = Published()
        self.analyses: dict[str, Analysis] = {}  # by URI, the last one of each text
        self.is_shut_down = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._alone = ThreadPoolExecutor(1, "peftc-alone")
        self._on_models = ThreadPoolExecutor(1, "peftc-models")
        register(self)

    @property
    def encoding(self) -> str:
        encoding = self.workspace.position_encoding
        return getattr(encoding, "value", encoding) or types.PositionEncodingKind.Utf16.value

    # Texts

    def open(self, uri: str, text: str, version: int | None) -> None:
        """A new version of a text."""
        document = self.documents.open(uri, text, version, self.encoding)
        self.start(document)
        self._start_users({document.path}, document)

    def close(self, uri: str) -> None:
        document = self.documents.close(uri)
        self.analyses.pop(uri, None)
        if document is not None:
            self.publish(uri, {})
            self._start_users({document.path}, document)

    def _start_users(self, paths: set[str], changed: Document | None = None) -> None:
        """Analyses the texts again that depend on files."""
        for document in self.documents:
            analysis = self.analyses.get(document.uri)
            if document is not changed and analysis is not None and not analysis.reads.isdisjoint(paths):
                self.start(document)

    def start_all(self) -> None:
        for document in self.documents:
            self.start(document)

    def start(self, document: Document) -> None:
        """Starts the analysis of a version, in the place of any that is not complete."""
        if (task := self._tasks.get(document.uri)) is not None:
            task.cancel()
        self._tasks[document.uri] = asyncio.ensure_future(self._analyse(document))

    async def _analyse(self, document: Document) -> None:
        alone = await self._in(self._alone, document, on_models=False)
        if alone is None:
            return
        last = self.analyses.get(document.uri)
        is_last = alone.has_errors or not alone.targets
        if is_last or last is None or not last.on_models:
            self.keep(alone)
        if not is_last and (complete := await self._in(self._on_models, document, on_models=True)) is not None:
            self.keep(complete)
            self.refresh()

    async def _in(self, pool: ThreadPoolExecutor, document: Document, on_models: bool) -> Analysis | None:
        """An analysis, made in another thread; None if there is a newer version by then."""
        settings, texts = self.settings, self.documents.texts()

        def run() -> Analysis | None:
            is_current = self.documents.is_current(document)
            return analyse(document, settings, texts, on_models) if is_current else None

        analysis = await in_thread(pool, run)
        return analysis if self.documents.is_current(document) else None

    async def fix_all(self, analysis: Analysis) -> types.CodeAction | None:
        """All safe fixes of a text."""
        settings, texts = self.settings, self.documents.texts()

        def run() -> types.CodeAction | None:
            with reading(OpenTexts(texts)):
                return actions.fix_all(analysis, setup_of(analysis.document, settings).include)

        is_fixable = any(one.fix for one in analysis.report.diagnostics)
        return await in_thread(self._alone, run) if is_fixable else None

    def keep(self, analysis: Analysis) -> None:
        """Makes an analysis the last one of its text, and shows its diagnostics."""
        self.analyses[analysis.document.uri] = analysis
        self.publish(analysis.document.uri, by_file(analysis, self.documents))

    def publish(self, source: str, diagnostics: Mapping[str, Any]) -> None:
        for uri in self.published.replace(source, diagnostics):
            document = self.documents.get(uri)
            records = to_protocol(self.published.diagnostics(uri), uri, self.documents, self.encoding)
            version = None if document is None else document.version
            self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, records, version))

    def refresh(self) -> None:
        """Asks the client to ask again for what depends on models."""

    async def settled(self, uri: str) -> Analysis | None:
        """The analysis of the present version of a text, for which it waits a little."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _PATIENCE
        while (task := self._tasks.get(uri)) is not None and not task.done() and loop.time() < end:
            await asyncio.wait({task}, timeout=end - loop.time())
        analysis = self.analyses.get(uri)
        return analysis if analysis is not None and self.documents.is_current(analysis.document) else None

    # Settings

    def configure(self, values: object) -> None:
        """New settings of the client."""
        settings = Settings.read(values)
        for error in settings.errors:
            self.window_show_message(types.ShowMessageParams(types.MessageType.Warning, error))
        if settings != self.settings:
            self.settings = settings
            self.start_all()

    async def pull_settings(self) -> None:
        """Asks a client for its settings that does not send them."""
        workspace = self.client_capabilities.workspace
        if workspace is None or not workspace.configuration:
            return
        item = types.ConfigurationItem(section="peftc")
        values = await self.workspace_configuration_async(types.ConfigurationParams([item]))
        if values and values[0]:
            self.configure(values[0])


async def in_thread(pool: ThreadPoolExecutor, run: Callable[[], T]) -> T:
    """The result of a call in another thread."""
    return await asyncio.get_running_loop().run_in_executor(pool, run)


def register(server: Server) -> None:
    """What the server answers."""
    feature = server.feature

    @feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        server.settings = Settings.read(params.initialization_options)

    @feature(types.SHUTDOWN)
    def shutdown(params: None) -> None:
        server.is_shut_down = True

    @feature(types.INITIALIZED)
    async def initialized(params: types.InitializedParams) -> None:
        await server.pull_settings()

    @feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    async def did_change_configuration(params: types.DidChangeConfigurationParams) -> None:
        if params.settings:
            server.configure(params.settings)
        else:
            await server.pull_settings()

    @feature(types.TEXT_DOCUMENT_DID_OPEN)
    def did_open(params: types.DidOpenTextDocumentParams) -> None:
        document = params.text_document
        server.open(document.uri, document.text, document.version)

    @feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(params: types.DidChangeTextDocumentParams) -> None:
        document = server.documents.get(params.text_document.uri)
        if document is not None and params.content_changes:
            text = changed(document, params.content_changes)
            server.open(document.uri, text, params.text_document.version)

    @feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def did_close(params: types.DidCloseTextDocumentParams) -> None:
        server.close(params.text_document.uri)

    @feature(types.TEXT_DOCUMENT_DID_SAVE)
    def did_save(params: types.DidSaveTextDocumentParams) -> None:
        server.start_all()

    @feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def did_change_watched_files(params: types.DidChangeWatchedFilesParams) -> None:
        server.start_all()

    @feature(types.TEXT_DOCUMENT_FORMATTING)
    def formatting(params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        document = server.documents.get(params.text_document.uri)
        return None if document is None else format_edits(document)

    @feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(code_action_kinds=actions.KINDS))
    async def code_action(params: types.CodeActionParams) -> list[types.CodeAction]:
        analysis = await server.settled(params.text_document.uri)
        if analysis is None:
            return []
        start, end = (analysis.document.positions.offset(at) for at in (params.range.start, params.range.end))
        choices = [*actions.actions(analysis, start, end, params.context.diagnostics)]
        if (fix_all := await server.fix_all(analysis)) is not None:
            choices.append(fix_all)
        only = params.context.only
        return [one for one in choices if only is None or any(_is_kind(one.kind, kind) for kind in only)]


def _is_kind(kind: types.CodeActionKind | str | None, asked: types.CodeActionKind | str) -> bool:
    """Whether a kind is another one, or below it."""
    own, other = (getattr(one, "value", one) or "" for one in (kind, asked))
    return not other or own == other or own.startswith(f"{other}.")


def changed(document: Document, changes: Any) -> str:
    """The text of a document after changes: whole texts, or those of ranges."""
    text: str = document.text
    for change in changes:
        if isinstance(change, types.TextDocumentContentChangePartial):
            positions = Document("", text, None, 0, "", False, document.encoding).positions
            start, end = (positions.offset(at) for at in (change.range.start, change.range.end))
            text = text[:start] + change.text + text[max(start, end) :]
        else:
            text = change.text
    return text


def run() -> int:
    """Answers a client over standard input and output, and ends the process with the session.

    What other code prints goes to standard error.
    """
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    server = Server()
    server.start_io(Input(sys.stdin.buffer), output)  # pyright: ignore[reportArgumentType]  # it reads lines and sizes
    sys.stderr.flush()
    os._exit(0 if server.is_shut_down else 1)  # an analysis that still runs is of no use to anyone
