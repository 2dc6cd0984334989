"""What a client shows of a file that several texts read."""

from __future__ import annotations

from pathlib import Path

import pytest

from peftc.language_server.analysis import Published, analyse
from peftc.language_server.diagnostics import by_file
from peftc.language_server.documents import Documents, Settings

METHOD = "peft 1\nmethod m(r = 8) { edit a at layer[*].ffn { h += adaptr(x, r=r) } }\n"
USER = 'peft 1\nuse m from "other.peft"\napply m(r=4)\n'


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["own first", "user first"])
def test_an_error_of_a_file_is_shown_once(tmp_path: Path, order: tuple[int, int]) -> None:
    """The text of the file and a text that uses it both report the same error.

    The text's own report is the one shown: its notes name no other file.
    """
    documents, published = Documents(), Published()
    uris = [(tmp_path / name).as_uri() for name in ("other.peft", "own.peft")]
    texts = [documents.open(uri, text, 1, "utf-16") for uri, text in zip(uris, (METHOD, USER), strict=True)]
    for index in order:
        analysis = analyse(texts[index], Settings(), documents.texts(), on_models=False)
        published.replace(texts[index].uri, by_file(analysis, documents))
    (error,) = published.diagnostics(uris[0])
    assert error.code == "P101"
    assert not error.notes
    assert not published.diagnostics(uris[1])
    published.replace(uris[0], {})
    (error,) = published.diagnostics(uris[0])
    assert error.notes
