"""What the server answers, and its start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from lsprotocol import types
from pygls.exceptions import JsonRpcException

from peftc.filesystem.open_texts import OpenTexts
from peftc.language_server.analysis import setup_of
from peftc.language_server.answers import actions
from peftc.language_server.answers.completion import Completer
from peftc.language_server.answers.formatting import format_edits
from peftc.language_server.answers.hover import Hover
from peftc.language_server.answers.inlay_hints import inlay_hints
from peftc.language_server.answers.navigation import Navigation
from peftc.language_server.answers.rename import Refusal
from peftc.language_server.documents import Document, Settings
from peftc.language_server.server import Server
from peftc.language_server.transport import Input

T = TypeVar("T")
_REQUEST_FAILED = -32803  # of the protocol


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

    @feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=[".", "=", '"', "("]))
    async def completion(params: types.CompletionParams) -> types.CompletionList | None:
        document = server.documents.get(params.text_document.uri)
        if document is None:
            return None
        tables, offset = server.tables_of(document), document.positions.offset(params.position)
        items = await server.answer(
            lambda: Completer(document, offset, server.library(document), [*tables.values()]).items()
        )
        return types.CompletionList(is_incomplete=False, items=items)

    @feature(types.TEXT_DOCUMENT_HOVER)
    async def hover(params: types.HoverParams) -> types.Hover | None:
        document = server.documents.get(params.text_document.uri)
        if document is None:
            return None
        analysis = server.analyses.get(document.uri)
        analysis = analysis if analysis is not None and analysis.document is document else None
        tables, offset = server.tables_of(document), document.positions.offset(params.position)
        return await server.answer(lambda: Hover(document, offset, server.library(document), tables, analysis).answer())

    @feature(types.TEXT_DOCUMENT_DEFINITION)
    async def definition(params: types.DefinitionParams) -> list[types.Location] | None:
        return await navigate(params, lambda one: one.definitions())

    @feature(types.TEXT_DOCUMENT_REFERENCES)
    async def references(params: types.ReferenceParams) -> list[types.Location] | None:
        return await navigate(params, lambda one: one.references(params.context.include_declaration), everywhere=True)

    @feature(types.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT)
    async def highlight(params: types.DocumentHighlightParams) -> list[types.DocumentHighlight] | None:
        return await navigate(params, lambda one: one.highlights())

    @feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    async def prepare_rename(params: types.PrepareRenameParams) -> types.Range | None:
        return await navigate(params, lambda one: one.renamable())

    @feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    async def rename(params: types.RenameParams) -> types.WorkspaceEdit | None:
        texts = OpenTexts(server.documents.texts())

        def change(one: Navigation) -> types.WorkspaceEdit | None:
            return one.rename(params.new_name, texts, setup_of(one.document, server.settings).include)

        return await navigate(params, change, everywhere=True)

    async def navigate(params: Any, ask: Callable[[Navigation], T], everywhere: bool = False) -> T | None:
        """The answer of `Navigation` at a position. `everywhere`: of the whole workspace."""
        document = server.documents.get(params.text_document.uri)
        if document is None:
            return None
        offset = document.positions.offset(params.position)

        def answer() -> T:
            specs = server.specs(document) if everywhere else ()
            return ask(Navigation(document, offset, server.library(document), server.documents, specs))

        try:
            return await server.answer(answer)
        except Refusal as error:
            raise JsonRpcException(str(error), _REQUEST_FAILED) from None

    @feature(types.TEXT_DOCUMENT_INLAY_HINT)
    async def inlay_hint(params: types.InlayHintParams) -> list[types.InlayHint]:
        analysis = await server.settled(params.text_document.uri)
        if analysis is None:
            return []
        start, end = (analysis.document.positions.offset(at) for at in (params.range.start, params.range.end))
        return [*inlay_hints(analysis, start, end)]


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
    register(server)
    server.start_io(Input(sys.stdin.buffer), output)  # pyright: ignore[reportArgumentType]  # it reads lines and sizes
    sys.stderr.flush()
    os._exit(0 if server.is_shut_down else 1)  # an analysis that still runs is of no use to anyone
