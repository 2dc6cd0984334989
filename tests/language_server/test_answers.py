"""Completion, hover, definitions, renaming and inlay hints, in sessions with `peftc lsp`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types
from pygls.exceptions import JsonRpcException

import peftc
from tests.language_server.client import Client, applied, connected, run

SPEC = """peft 2
# ✂ 𝔘 é
use mam from std
use twice from "forms.peft"
let s = 2
method own(r = 4) {
    edit qv at layer[*].attn.q | layer[*].attn.v { let g = lora(x, r=r) h += s * g }
    expect foldable(qv)
}
apply mam(l=3, r=8)
apply own() as own
edit own_ffn at layer[*].ffn { h += twice(x, factor=3) }
expect sites(own.qv) == 0
"""
FORMS = "peft 2\n# Twice, or more.\nform twice(x, factor = 2) { param a[d(out)] = 0 f = factor * x * a }\n"


async def complete(client: Client, uri: str, text: str) -> list[str]:
    """The labels at the place of `|` in a text."""
    client.change(uri, text.replace("¦", ""))
    before = text[: text.index("¦")].split("\n")
    at = types.Position(len(before) - 1, len(before[-1].encode("utf-16-le")) // 2)
    params = types.CompletionParams(types.TextDocumentIdentifier(uri), at)
    answer: Any = await client.text_document_completion_async(params)
    return [one.label for one in answer.items]


EDIT = "peft 2\n# ✂ 𝔘 é\nlet s = 2\nedit a at {}"


def test_completion(folder: Path) -> None:
    """What the grammar allows, the names of the text, and the sites and states of the model."""
    uri = (folder / "own.peft").as_uri()
    (folder / "forms.peft").write_text(FORMS)
    (folder / "peftc.toml").write_text('models = ["bart.json"]\n')

    async def session() -> None:
        async with connected(folder) as client:
            client.open(uri, SPEC)
            await client.codes(uri, "P304")
            assert await complete(client, uri, "¦") == ["peft 2"]
            assert await complete(client, uri, "peft 2\nuse twice from ¦") == ["std"]
            assert "mam" in await complete(client, uri, "peft 2\nuse ¦")
            assert await complete(client, uri, 'peft 2\nuse twice from "¦"') == ["forms.peft"]
            steps = await complete(client, uri, EDIT.format("encoder.layer[*].¦"))
            assert {"attn", "ffn", "norm"} <= {*steps}
            assert not {"cross", "mixer", "router"} & {*steps}  # BART has none there
            assert "cross" in await complete(client, uri, EDIT.format("decoder.layer[*].attn.¦"))
            states = await complete(client, uri, EDIT.format("layer[*].ffn {¦"))
            assert states == ["h", "x", "res", "z", "let"]
            assert [*await complete(client, uri, EDIT.format("embed { ¦ }"))][:2] == ["h", "x"]
            values = await complete(
                client, uri, EDIT.format("layer[*].ffn { let g = x h += ¦ }\nedit b at head { h = x }")
            )
            assert {"s", "g", "z", "adapter", "norm", "concat"} <= {*values}
            assert not {"kv", "a", "edit"} & {*values}
            arguments = await complete(client, uri, EDIT.format("layer[*].ffn { h += adapter(x, r=4, ¦) }"))
            assert {"act=", "init=", "bias="} <= {*arguments}
            assert "r=" not in arguments
            choices = await complete(client, uri, EDIT.format("layer[*].ffn { h += adapter(x, r=4, act=re¦) }"))
            assert {"relu", "gelu", "s"} <= {*choices}
            assert "layer" in await complete(client, uri, EDIT.format("layer[*].ffn { h += adapter(x, r=¦) }"))
            own = 'peft 2\nuse twice from "forms.peft"\nedit a at embed {{ h += {}¦'
            assert "twice" in await complete(client, uri, own.format("2 * "))
            assert "factor=" in await complete(client, uri, own.format("twice(x, "))
            assert await complete(client, uri, 'peft 2\nedit a at "model.enc¦" { h = x }') == modules()
            assert await complete(client, uri, EDIT.format("embed { h = x } # ¦")) == []
            facts = await complete(client, uri, EDIT.format("embed { h = x }\nexpect ¦"))
            assert {"trained", "foldable"} <= {*facts}
            assert (await complete(client, uri, EDIT.format("embed { h = x }\nexpect identity(¦")))[0] == "a"

    run(session)


GROUPS = """peft 2
let both at layer[*].attn.{q, v}
edit a at both - layer[0].attn.q { h += lora(x, r=2) }
train b = [w] at both?
"""


def test_names_in_braces_and_groups(folder: Path) -> None:
    """Steps are completed in braces, with the path in front; groups of sites are names."""
    uri = (folder / "own.peft").as_uri()
    (folder / "peftc.toml").write_text('models = ["bart.json"]\n')

    async def session() -> None:
        hints = types.InlayHintWorkspaceClientCapabilities(refresh_support=True)
        able = types.ClientCapabilities(workspace=types.WorkspaceClientCapabilities(inlay_hint=hints))
        async with connected(folder, capabilities=able) as client:
            client.open(uri, GROUPS)
            await client.codes(uri)
            await client.until(lambda: client.refreshed > 0)  # the sites of the model are known
            for written in ("{¦", "{q, ¦", "{q?, k.¦", "{norm, o}.¦"):
                below = written.startswith("{norm") or written.endswith(".¦")
                steps = await complete(client, uri, EDIT.format(f"encoder.layer[*].attn.{written}"))
                assert ("heads" in steps) == (not below), written
                assert "ffn" not in steps
            assert "up" in await complete(client, uri, EDIT.format("layer[*].{attn.{q, v}, ffn.¦"))
            assert "up" not in await complete(client, uri, EDIT.format("layer[*].{ffn.{up, down}, attn.¦"))
            assert await complete(client, uri, EDIT.format("layer[*].**.¦")) == ["linear"]
            assert "both" in await complete(client, uri, GROUPS + "edit c at ¦")
            assert "both" not in await complete(client, uri, GROUPS + "edit c at layer.¦")
            assert "both" not in await complete(client, uri, GROUPS + "edit c at embed { h += ¦ }")
            client.change(uri, "peft 2\nedit c at layer.ffn { h += adapter(x, r=2 + layer) }")
            assert "from 0" in await hover(client, uri, "layer)")
            lines = "param a[d(x)] = 0  f = a * x if of == layer  f = 2 * a * x if of != layer"
            words = f"form by(x, of = none) {{ {lines} }}"
            client.change(uri, f"peft 2\n{words}\nedit c at layer.ffn {{ h += by(x, of=layer) }}")
            assert "a word" in await hover(client, uri, "layer) }")
            client.change(uri, "peft 2\nedit c at layer.ffn { h += adapter(x, r=2 + layer) }")
            client.change(uri, GROUPS)
            assert "`layer[*].attn.v` on `bart.json`: 8 sites" in await hover(client, uri, "v}")
            assert "let both at" in await hover(client, uri, "both -")
            params = types.RenameParams(new_name="two", **client.place(uri, "both -"))
            edit = await client.text_document_rename_async(params)
            assert applied(GROUPS, edit.changes[uri]) == GROUPS.replace("both", "two")

    run(session)


def modules() -> list[str]:
    names = [module.name for module in peftc.sites("bart.json").modules if module.name]
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in n.split(".")) for n in names))


async def hover(client: Client, uri: str, words: str, shift: int = 0) -> str:
    answer = await client.text_document_hover_async(types.HoverParams(**client.place(uri, words, shift)))
    return "" if answer is None else answer.contents.value  # pyright: ignore


def test_hover_and_inlay_hints(folder: Path) -> None:
    """Equations, shapes and counts; they are those of the plan."""
    uri = (folder / "own.peft").as_uri()
    (folder / "forms.peft").write_text(FORMS)
    (folder / "own.peft").write_text(SPEC)
    plan = peftc.plan("own.peft", "bart.json")
    counts = {edit.name: f"{len(edit.sites)} sites · {edit.trained:,} parameters" for edit in plan.edits}

    async def session() -> None:
        hints = types.InlayHintWorkspaceClientCapabilities(refresh_support=True)
        able = types.ClientCapabilities(workspace=types.WorkspaceClientCapabilities(inlay_hint=hints))
        async with connected(folder, settings={"model": "bart.json"}, capabilities=able) as client:
            client.open(uri, SPEC)
            await client.codes(uri, "P304")
            await client.until(lambda: client.refreshed > 0)
            form = await hover(client, uri, "lora(")
            for part in ("lora(x, r,", "form lora(", "Folds      yes", "arXiv:2106.09685", counts["own.qv"]):
                assert part in form
            assert "form twice(x, factor = 2)" in await hover(client, uri, "twice(x")
            assert await hover(client, uri, "r=r") == "`r` of `lora`: rank of the product B A, at least 1 (required)"
            assert "Mix-And-Match" in await hover(client, uri, "mam(")
            assert counts["own.qv"] in await hover(client, uri, "qv at")
            site = await hover(client, uri, "attn.q")
            assert f"{len(plan.edits[2].sites) // 2 * 3} sites" not in site
            assert "on `bart.json`" in site
            assert "`h`: the hidden state" in await hover(client, uri, "h += twice")
            assert "let s = 2" in await hover(client, uri, "s * g")
            assert await hover(client, uri, "✂") == ""
            whole = types.Range(types.Position(0, 0), types.Position(99, 0))
            asked = types.InlayHintParams(types.TextDocumentIdentifier(uri), whole)
            shown = await client.text_document_inlay_hint_async(asked) or ()
            assert [one.label for one in shown] == [counts["own.qv"], counts["own_ffn"]]
            ends = [client.at(uri, words, len(words)) for words in ("s * g }", "factor=3) }")]
            assert [one.position for one in shown] == ends

    run(session)


def test_definitions_and_references(folder: Path) -> None:
    uri, forms = (folder / "own.peft").as_uri(), (folder / "forms.peft").as_uri()
    (folder / "forms.peft").write_text(FORMS)

    async def session() -> None:
        async with connected(folder) as client:
            client.open(uri, SPEC)
            await client.codes(uri)

            async def definition(words: str, shift: int = 0) -> tuple[str, str]:
                answer: Any = await client.text_document_definition_async(
                    types.DefinitionParams(**client.place(uri, words, shift))
                )
                (one,) = answer
                path = Path(one.uri.removeprefix("file://"))
                start, line = one.range.start, path.read_text().split("\n") if one.uri != uri else SPEC.split("\n")
                return path.name, line[start.line][start.character : one.range.end.character]

            assert await definition("g }") == ("own.peft", "g")
            assert await definition("s * g") == ("own.peft", "s")
            assert await definition("r) h") == ("own.peft", "r")
            assert await definition("own() as") == ("own.peft", "own")
            assert await definition("qv) ==") == ("own.peft", "qv")
            assert await definition("twice(x") == ("forms.peft", "twice")
            assert await definition("factor=3") == ("forms.peft", "factor")
            assert await definition('"forms.peft"', 4) == ("forms.peft", "")
            assert await definition("mam(l") == ("mam.peft", "mam")
            assert await definition("l=3") == ("mam.peft", "l")
            assert await definition("lora(") == ("lora.peft", "lora")
            assert await definition("r=r") == ("lora.peft", "r")
            place = client.place(uri, "twice(x")
            context = types.ReferenceContext(include_declaration=True)
            shown = await client.text_document_references_async(types.ReferenceParams(context, **place)) or ()
            assert sorted(one.uri for one in shown) == sorted([forms, uri, uri])
            marks = await client.text_document_document_highlight_async(types.DocumentHighlightParams(**place)) or ()
            assert len(marks) == 2

    run(session)


RENAMES = {
    "g = lora": ("gated", ["let gated = lora", "s * gated"]),
    "s = 2": ("scale", ["let scale = 2", "scale * g"]),
    "r = 4": ("rank", ["own(rank = 4)", "r=rank)"]),
    "own(r": ("other", ["method other(", "apply other() as own"]),
    "own\nedit": ("enc", ["as enc", "enc.qv"]),
    "qv at": ("queries", ["edit queries at", "foldable(queries)", "own.queries"]),
}


def test_rename(folder: Path) -> None:
    """A name changes wherever it is meant, and nothing else does."""
    uri, forms = (folder / "own.peft").as_uri(), (folder / "forms.peft").as_uri()
    (folder / "forms.peft").write_text(FORMS)
    user = 'peft 2\nuse twice from "forms.peft"\nedit a at embed { h += twice(x, factor=5) }\n'
    (folder / "user.peft").write_text(user)

    async def session() -> None:
        async with connected(folder) as client:
            client.open(uri, SPEC)
            await client.codes(uri)

            async def rename(words: str, name: str) -> dict[str, str]:
                params = types.RenameParams(new_name=name, **client.place(uri, words))
                edit = await client.text_document_rename_async(params)
                texts = {uri: SPEC, forms: FORMS, (folder / "user.peft").as_uri(): user}
                return {one: applied(texts[one], edits) for one, edits in (edit.changes or {}).items()}

            for words, (name, expected) in RENAMES.items():
                (text,) = (await rename(words, name)).values()
                assert [part for part in expected if part not in text] == []
                assert len(text) - len(SPEC) == len(expected) * (len(name) - len(words.split()[0].split("(")[0]))
            texts = await rename("twice(x", "double")
            assert {one.rpartition("/")[2] for one in texts} == {"own.peft", "forms.peft", "user.peft"}
            assert "form double(x" in texts[forms]
            assert texts[uri].count("double") == 2
            texts = await rename("factor=3", "by")
            assert "form twice(x, by = 2) { param a[d(out)] = 0 f = by * x * a }" in texts[forms]
            assert len(texts) == 3
            for words, name, reason in (
                ("s = 2", "edit", "is not a name"),
                ("s = 2", "a b", "is not a name"),
                ("s = 2", "g", "something else"),
                ("g = lora", "x", "P121"),
                ("mam(l", "mine", "is a standard recipe"),
                ("lora(", "mine", "is a built-in form"),
                ("own_ffn at", "ffn", "P111"),
            ):
                with pytest.raises(JsonRpcException, match=reason):
                    await rename(words, name)
            place = types.PrepareRenameParams(**client.place(uri, "lora("))
            with pytest.raises(JsonRpcException, match="built-in"):
                await client.text_document_prepare_rename_async(place)
            place = types.PrepareRenameParams(**client.place(uri, "s * g"))
            start = client.at(uri, "s * g")
            assert await client.text_document_prepare_rename_async(place) == types.Range(
                start, types.Position(start.line, start.character + 1)
            )

    run(session)
