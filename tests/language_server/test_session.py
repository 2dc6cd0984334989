"""Sessions of a client with `peftc lsp`."""

from __future__ import annotations

from pathlib import Path

import pytest
from lsprotocol import types

from tests.language_server.client import Client, applied, connected, run

TYPO = 'peft 1\n# ✂ 𝔘 é\nedit ffn at layer[*].fnn { h += adaptr(x, r=64, act="relu") }\n'
RIGHT = "peft 1\n\n# ✂ 𝔘 é\nedit ffn at layer[*].ffn { h += adapter(x, r=64, act=relu) }\n"


def test_diagnostics_fixes_and_formatting(folder: Path) -> None:
    """What `peftc check` reports is shown; actions correct it, and formatting is that of `fmt`."""
    uri = (folder / "own.peft").as_uri()

    async def session() -> None:
        async with connected(folder) as client:
            client.open(uri, TYPO)
            first, form, *_ = await client.codes(uri, "P208", "P101")
            assert (first.severity, first.source) == (types.DiagnosticSeverity.Error, "peftc")
            assert first.range == types.Range(types.Position(2, 21), types.Position(2, 24))
            assert "did you mean `ffn`?" in first.message
            everything = types.Range(types.Position(0, 0), types.Position(9, 0))
            actions = await ask_actions(client, uri, everything, [first, form])
            fixes = [one for one in actions if one.kind == types.CodeActionKind.QuickFix]
            assert [one.title for one in fixes] == ["Replace `fnn` with `ffn`", "Replace `adaptr` with `adapter`"]
            assert [one.diagnostics for one in fixes] == [(first,), (form,)]
            (fix_all,) = (one for one in actions if one.kind != types.CodeActionKind.QuickFix)
            client.change(uri, applied(TYPO, fix_all.edit.changes[uri]))
            await client.codes(uri)
            params = types.DocumentFormattingParams(types.TextDocumentIdentifier(uri), types.FormattingOptions(4, True))
            edits = await client.text_document_formatting_async(params)
            assert applied(client.texts[uri], edits) == RIGHT
            client.change(uri, RIGHT)
            assert await client.text_document_formatting_async(params) == ()
            client.change(uri, "peft 1\nedit")
            assert await client.text_document_formatting_async(params) is None

    run(session)


async def ask_actions(client: Client, uri: str, at: types.Range, shown: list[types.Diagnostic]) -> list:
    context = types.CodeActionContext(shown)
    return list(
        await client.text_document_code_action_async(
            types.CodeActionParams(types.TextDocumentIdentifier(uri), at, context)
        )
        or ()
    )


MODEL_SPEC = """peft 1
edit q at layer[*].attn.q { h += lora(x, r=2) }
edit cross at layer[*].attn.cross.q { h += lora(x, r=2) }
expect trained <= 1
"""


def test_models_of_the_settings_and_of_the_configuration(folder: Path) -> None:
    """Settings of the client are in the place of the models of peftc.toml; both may change."""
    uri = (folder / "own.peft").as_uri()
    (folder / "peftc.toml").write_text('models = ["gpt2.json"]\n')

    async def session() -> None:
        async with connected(folder) as client:
            client.open(uri, MODEL_SPEC)
            (missing,) = await client.codes(uri, "P201")
            assert "gpt2" in missing.message
            client.workspace_did_change_configuration(
                types.DidChangeConfigurationParams({"peftc": {"model": "bart.json"}})
            )
            (failed,) = await client.codes(uri, "P304")
            assert failed.range.start.line == 3
            client.workspace_did_change_configuration(types.DidChangeConfigurationParams({"peftc": {"model": 4}}))
            await client.until(lambda: bool(client.messages))
            assert client.messages == ["`peftc.model` is a name or a list of names"]
            await client.codes(uri, "P201")
            (folder / "peftc.toml").write_text('models = ["gpt2.json"]\nmodel = 3\n')
            client.text_document_did_save(types.DidSaveTextDocumentParams(types.TextDocumentIdentifier(uri)))
            toml = (folder / "peftc.toml").as_uri()
            (unknown,) = await client.codes(toml, "P130")
            assert unknown.range == types.Range(types.Position(1, 0), types.Position(1, 5))
            await client.codes(uri)

    run(session)


def test_settings_at_the_start_and_settings_that_the_server_asks_for(folder: Path) -> None:
    uri = (folder / "own.peft").as_uri()
    asks = types.ClientCapabilities(workspace=types.WorkspaceClientCapabilities(configuration=True))

    async def session() -> None:
        async with connected(folder, settings={"model": "gpt2.json"}) as client:
            client.open(uri, MODEL_SPEC)
            await client.codes(uri, "P201")
        async with connected(folder, settings={"model": "gpt2.json"}, capabilities=asks) as client:
            client.open(uri, MODEL_SPEC)
            await client.codes(uri, "P201")
            client.settings = {"model": ["bart.json"]}
            client.workspace_did_change_configuration(types.DidChangeConfigurationParams(None))
            await client.codes(uri, "P304")

    run(session)


def test_a_model_that_is_none_is_a_diagnostic(folder: Path) -> None:
    """Until that is known, which takes torch, the server answers what it is asked."""
    uri = (folder / "own.peft").as_uri()
    (folder / "peftc.toml").write_text('models = ["no/such/config.json"]\n')

    async def session() -> None:
        async with connected(folder) as client:
            client.open(uri, MODEL_SPEC)
            for number in range(5):
                client.change(uri, f"{MODEL_SPEC}# {number}\n")
                place = types.HoverParams(**client.place(uri, "lora("))
                assert await client.text_document_hover_async(place) is not None
            assert (folder / "peftc.toml").as_uri() not in client.diagnostics
            (unknown,) = await client.codes((folder / "peftc.toml").as_uri(), "P502")
            versions = [one.version for one in client.published if one.uri == uri]
            assert versions == sorted(versions)
            assert versions[-1] == 6
            assert unknown.range.start == types.Position(0, 10)
            client.workspace_did_change_configuration(types.DidChangeConfigurationParams({"model": "no/such.json"}))
            (unknown,) = await client.codes(uri, "P502")
            assert unknown.range.start == types.Position(0, 0)
            await client.codes((folder / "peftc.toml").as_uri())

    run(session)


METHOD = "peft 1\nmethod m({0} = 8) {{ edit a at layer[*].ffn {{ h += adapter(x, r={0}) }} }}\n"
USER = 'peft 1\nuse m from "other.peft"\napply m(r=4)\n'


def test_texts_that_are_not_saved_are_read_in_the_place_of_files(folder: Path) -> None:
    """A text that uses another is checked again when that one changes, is closed, or is new."""
    uri, other = (folder / "own.peft").as_uri(), (folder / "other.peft").as_uri()

    async def session() -> None:
        async with connected(folder) as client:
            client.open(uri, USER)
            await client.codes(uri, "P112")
            client.open(other, METHOD.format("r"))
            await client.codes(uri)
            client.change(other, METHOD.format("rank"))
            (error,) = await client.codes(uri, "P102")
            assert error.range.start == types.Position(2, 8)
            client.change(other, METHOD.format("r").replace("adapter", "adaptr"))
            await client.codes(other, "P101")  # of both texts, once
            await client.codes(uri)
            client.text_document_did_close(types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(other)))
            await client.codes(uri, "P112")
            await client.codes(other)

    run(session)


WARNED = "peft 1\r\n{}edit ffn at layer[*].ffn {{ let a = h + x h += adapter(x, r=4) }}{}\r\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WARNED.format("", ""), WARNED.format("", "  # peftc: ignore[P114] TODO: say why")),
        (WARNED.format("", "  # é"), WARNED.format("# peftc: ignore[P114] TODO: say why\r\n", "  # é")),
        (
            WARNED.format("# peftc: ignore[P204] so\r\n", ""),
            WARNED.format("# peftc: ignore[P204, P114] so\r\n", ""),
        ),
    ],
    ids=["behind", "above", "in a comment"],
)
def test_a_comment_suppresses_a_warning(folder: Path, text: str, expected: str) -> None:
    uri = (folder / "own.peft").as_uri()

    async def session() -> None:
        async with connected(folder) as client:
            client.open(uri, text)
            (warning,) = await client.codes(uri, "P114")
            assert warning.severity == types.DiagnosticSeverity.Warning
            assert warning.tags == (types.DiagnosticTag.Unnecessary,)
            (action,) = await ask_actions(client, uri, warning.range, [warning])
            client.change(uri, applied(text, action.edit.changes[uri]))
            assert client.texts[uri] == expected
            await client.codes(uri)

    run(session)
