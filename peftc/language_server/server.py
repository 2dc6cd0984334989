"""The language server: it follows the texts that a client has open, and answers what it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, TypeVar

from lsprotocol import types
from pygls.lsp.server import LanguageServer

from peftc import __version__
from peftc.addressing.sites import SiteTable
from peftc.cache.lookup import cached_table
from peftc.filesystem.open_texts import OpenTexts, reading
from peftc.language_server.analysis import Analysis, Published, analyse, setup_of
from peftc.language_server.answers import actions
from peftc.language_server.diagnostics import by_file, to_protocol
from peftc.language_server.documents import Document, Documents, Settings, path_of
from peftc.language_server.library import Library, specs_of
from peftc.language_server.transport import Protocol

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
        self.tables: dict[str, SiteTable | None] = {}  # by model; None where it has none
        self.is_shut_down = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._alone = ThreadPoolExecutor(1, "peftc-alone")
        self._on_models = ThreadPoolExecutor(1, "peftc-models")

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
        """Analyses the texts again that depend on files, or of which that is not known yet."""
        for document in self.documents:
            analysis, task = self.analyses.get(document.uri), self._tasks.get(document.uri)
            is_known = analysis is not None and (task is None or task.done())
            if document is not changed and not (is_known and analysis and analysis.reads.isdisjoint(paths)):
                self.start(document)

    def start_all(self) -> None:
        """Analyses all texts again: files, models or settings may have changed."""
        self.tables.clear()
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
        last, is_last = self.analyses.get(document.uri), alone.has_errors or not alone.targets
        if is_last or last is None or not last.on_models:
            self.keep(alone)
        for target in alone.targets:
            await self._load(target.model)
        if not is_last and (complete := await self._in(self._on_models, document, on_models=True)) is not None:
            self.keep(complete)
            self.refresh()

    async def _load(self, model: str) -> None:
        """Makes the table of a model known, for texts that have no plan yet."""
        if model not in self.tables:
            self.tables[model] = await in_thread(self._on_models, lambda: table_of(model))

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
        workspace = self.client_capabilities.workspace
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)

    async def settled(self, uri: str) -> Analysis | None:
        """The analysis of the present version of a text, for which it waits a little."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _PATIENCE
        while (task := self._tasks.get(uri)) is not None and not task.done() and loop.time() < end:
            await asyncio.wait({task}, timeout=end - loop.time())
        analysis = self.analyses.get(uri)
        return analysis if analysis is not None and self.documents.is_current(analysis.document) else None

    # What answers are made of

    def library(self, document: Document) -> Library:
        """What reads the names of a text and of the files that it uses."""
        include = setup_of(document, self.settings).include
        return Library(OpenTexts(self.documents.texts()), include or ())

    def tables_of(self, document: Document) -> dict[str, SiteTable]:
        """The tables of the models of a text, as far as they are known."""
        analysis = self.analyses.get(document.uri)
        names = [target.model for target in analysis.targets] if analysis is not None else []
        tables = {name: self.tables.get(name) for name in names}
        return {name: table for name, table in tables.items() if table is not None}

    async def answer(self, run: Callable[[], T]) -> T:
        """An answer that reads texts or files: in the thread that analyses texts."""
        return await in_thread(self._alone, run)

    def specs(self, document: Document) -> list[str]:
        """The real paths of the specs that are open, or of the workspace."""
        folders = [
            path for folder in tuple(self.workspace.folders.values()) if (path := path_of(folder.uri)) is not None
        ]
        return [document.path, *self.documents.texts(), *specs_of(folders)]

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


def table_of(model: str) -> SiteTable | None:
    """The table of a model's sites: the cached one, or a new one, which is cached then."""
    try:
        return cached_table(model) or import_module("peftc.compiler").sites(model)
    except Exception:  # the diagnostics of the text say what is wrong
        return None


async def in_thread(pool: ThreadPoolExecutor, run: Callable[[], T]) -> T:
    """The result of a call in another thread."""
    return await asyncio.get_running_loop().run_in_executor(pool, run)
