"""Completion: what the grammar allows at a place, and the names that fit there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from lsprotocol import types

from peftc.addressing.sites import SiteTable
from peftc.equations.primitives import FUNCTIONS
from peftc.equations.table import FORMS
from peftc.equations.words import INITIAL_VALUES, NUMBERS, SIZES
from peftc.filesystem import resources
from peftc.language_server.answers import sites
from peftc.language_server.documents import Document
from peftc.language_server.library import Library
from peftc.language_server.names import FileNames
from peftc.language_server.symbols import name_of, statements_of, trees_of, word_of
from peftc.semantics.arguments import interval
from peftc.semantics.form_facts import default_of
from peftc.syntax.automaton import Tree
from peftc.syntax.lexer import Token, keywords
from peftc.syntax.partial import Place
from peftc.syntax.vocabulary import CONCAT, EDIT_FACTS, FROZEN_MODULES, LAYER, PARAMETERS, PLAN_COUNTS, STATES, WEIGHT

Kind = types.CompletionItemKind
_DEFINES = frozenset({"METHOD", "FORM", "EDIT", "TRAIN", "LET", "PARAM", "FIXED", "AS"})  # before a new name
_VALUE = "TRUE"  # a terminal that stands only where an expression may
_STEP = "DOUBLE_STAR"  # one that stands only in a selector
_NO_NAMES: Mapping[str, str] = {}


def item(label: str, kind: Kind, detail: str = "", text: str | None = None) -> types.CompletionItem:
    return types.CompletionItem(label, kind=kind, detail=detail or None, insert_text=text)


@dataclass
class Completer:
    """Completes at one place of a text.

    Attributes:
        tables: of the models of the text, if they are known.
    """

    document: Document
    offset: int
    library: Library
    tables: Sequence[SiteTable] = ()

    @cached_property
    def names(self) -> FileNames:
        return self.library.of(self.document)

    @cached_property
    def place(self) -> Place:
        return self.document.partial.before(self.offset)

    @cached_property
    def last(self) -> str:
        """The terminal before the place."""
        return self.place.tokens[-1].type if self.place.tokens else ""

    def items(self) -> list[types.CompletionItem]:
        """What may be written at the place."""
        if self.document.partial.comment_at(self.offset) is not None:
            return []
        if (string := self._string()) is not None:
            return [*self._in_string(string)]
        if not self.place.tokens:
            return [item("peft 2", Kind.Keyword, "the version of the language, on the first line")]
        accepts = self.place.accepts
        words = (text for terminal, text in sorted(keywords().items()) if terminal in accepts)
        items = [*self._names(), *(item(word, Kind.Keyword) for word in words)]
        return list({one.label: one for one in reversed(items)}.values())[::-1]

    def _names(self) -> Iterator[types.CompletionItem]:
        accepts = self.place.accepts
        if self.last == "PEFT":
            yield from (item(number, Kind.Value, "a version of the language") for number in ("2", "1"))
        if "NAME" not in accepts or self.last in _DEFINES:
            return
        match self.last:
            case "USE":
                yield from (item(name, Kind.Module, "a standard recipe") for name in resources.recipes())
            case "FROM":
                yield item("std", Kind.Module, "the standard recipes")
            case "APPLY":
                yield from (item(name, Kind.Method) for name in self._methods())
            case "PER":
                yield from (
                    item(word, Kind.Keyword) for word in (("task",) if self._owner == "EDIT" else ("site", "group"))
                )
            case _ if _STEP in accepts:
                yield from self._steps()
            case _ if _VALUE in accepts:
                yield from self._values()
            case _:
                yield from self._targets()

    # Names of the text

    def _groups(self) -> list[str]:
        """The groups of sites that are named so far."""
        return [name for name, symbol in self.names.visible(self.offset).items() if symbol.kind == "group"]

    def _methods(self) -> list[str]:
        words = (name_of(s) for s in self.names.statements if s.rule in ("method", "use"))
        return [word.text for word in words if word is not None]

    @cached_property
    def _owner(self) -> str:
        """The statement that the place is in: the terminal that begins it."""
        begins = ("EDIT", "TRAIN", "FORM", "EXPECT", "LET", "METHOD", "APPLY", "REQUIRE", "SAVE")
        return next((word.type for _, word in self.place.open_words() if word.type in begins), "")

    def _is_inside(self, terminal: str) -> bool:
        """Whether the place is in the braces of a statement."""
        words = [word.type for _, word in self.place.open_words()]
        return "LBRACE" in words and terminal in words[words.index("LBRACE") :]

    @cached_property
    def _selector(self) -> str:
        """The text of the selector of the edit that the place is in."""
        types_ = [value.type if isinstance(value, Token) else "" for value in self.place.values]
        if "EDIT" not in types_:
            return ""
        edit = len(types_) - 1 - types_[::-1].index("EDIT")
        if "AT" not in types_[edit:]:
            return ""
        at = types_.index("AT", edit)
        end = types_.index("LBRACE", at) if "LBRACE" in types_[at:] else len(types_)
        parts = [v for v in self.place.values[at + 1 : end] if not (isinstance(v, Tree) and v.rule == "scope")]
        return self.document.text[parts[0].span.start : parts[-1].span.end] if parts else ""

    # Selectors

    def _steps(self) -> Iterator[types.CompletionItem]:
        written = self._written_path()
        for name, text, detail in sites.next_steps(written, self.tables):
            yield item(name, Kind.Field, detail, None if text == name else text)
        if not written:
            yield from (item(name, Kind.Variable, "group of sites") for name in self._groups())

    def _written_path(self) -> str:
        """The steps of the path that is being written, with the point behind them.

        In `attn.{q, ` these are the ones before the braces.
        """
        tokens, written = self.place.tokens, ""
        number = len(tokens) - 1
        while number >= 0:
            word, start = tokens[number], number
            if word.type in ("RSQB", "RBRACE"):
                start = _opening(tokens[:number], word.type)
            elif word.type in ("COMMA", "LBRACE"):  # an alternative: the path goes on before its brace
                number = _opening(tokens[: number + 1], "RBRACE") - 1 if word.type == "COMMA" else number - 1
                if number < 0 or tokens[number].type != "DOT":
                    break
                continue
            elif word.type not in ("DOT", "NAME", "DOUBLE_STAR"):
                break
            written = "".join(token.text for token in tokens[start : number + 1]) + written
            number = start - 1
        return written if written.endswith(".") else ""

    def _string(self) -> Token | None:
        """The string that the place is in, closed or not."""
        tokens = (token for token in self.document.partial.tokens if token.type == "STRING")
        inside = (token for token in tokens if token.span.start < self.offset <= token.span.end)
        return next((token for token in inside if self.offset < token.span.end or not self._is_closed(token)), None)

    def _is_closed(self, string: Token) -> bool:
        start, end = string.span.start, string.span.end
        return end - start > 1 and self.document.text[end - 1] == '"'

    def _in_string(self, string: Token) -> Iterator[types.CompletionItem]:
        before = self.document.partial.before(string.span.start)
        last = before.tokens[-1].type if before.tokens else ""
        end = string.span.end - 1 if self._is_closed(string) else self.offset
        at = self.document.positions.between(string.span.start + 1, end)
        if last == "FROM":
            labels, kind = self._files(), Kind.File
        elif _STEP in before.accepts:
            labels, kind = sites.module_names(self.tables), Kind.Module
        else:
            return
        for label in labels:
            yield types.CompletionItem(label, kind=kind, text_edit=types.TextEdit(at, label))

    def _files(self) -> list[str]:
        """The specs beside the text, which `use` may name."""
        folder = self.document.folder
        names = sorted(path.name for path in folder.glob("*.peft")) if folder is not None and folder.is_dir() else []
        return [name for name in names if folder is None or folder / name != Path(self.document.path)]

    # Expressions

    def _targets(self) -> Iterator[types.CompletionItem]:
        """What stands on the left of an equation, or in the list of `train`."""
        if self._owner == "TRAIN":
            yield from (item(name, Kind.Variable, STATES[name]) for name in PARAMETERS)
        elif self._is_inside("EDIT") and self.last != "DOT":
            yield from self._states()
        elif self._is_inside("FORM") and self.last != "DOT":
            yield from self._visible()

    def _states(self) -> Iterator[types.CompletionItem]:
        for name, doc in sites.states_of(self._selector, self.tables).items():
            yield item(name, Kind.Variable, doc)

    def _visible(self) -> Iterator[types.CompletionItem]:
        for name, symbol in self.names.visible(self.offset).items():
            if symbol.kind != "group":
                yield item(name, Kind.Variable, symbol.kind)

    def _values(self) -> Iterator[types.CompletionItem]:
        call = self._call()
        if call is not None and self.last == "EQUAL":
            yield from self._choices(call[0])
            yield from self._visible()
            if self._is_inside("EDIT"):
                yield item(LAYER, Kind.Variable, "the number of the site's layer")
            return
        if call is not None:
            yield from self._arguments(call[0])
            if call[1] == "APPLY":
                return
        if self._owner == "EXPECT":
            yield from self._facts(call)
            return
        yield from self._visible()
        if self._is_inside("FORM"):
            yield from self._functions()
        else:
            if self._is_inside("EDIT"):
                yield from self._states()
                yield from (item(name, Kind.Function, text=f"{name}(") for name in (*FROZEN_MODULES, CONCAT, WEIGHT))
            yield from (item(name, Kind.Function, "form", f"{name}(") for name in self._forms)

    def _call(self) -> tuple[str, str] | None:
        """The function or the method whose arguments are written here, and the word before it."""
        values = self.place.values
        for number, word in self.place.open_words():
            if word.type in ("LSQB", "LBRACE") or number < 1:
                return None
            if word.type == "LPAR":
                function, before = values[number - 1], values[number - 2] if number > 1 else None
                name = word_of(function)
                is_definition = isinstance(before, Token) and before.type in ("METHOD", "FORM")
                keyword = before.type if isinstance(before, Token) else ""
                return None if name is None or is_definition else (name.text, keyword)
        return None

    def _facts(self, call: tuple[str, str] | None) -> Iterator[types.CompletionItem]:
        if call is not None and call[0] in EDIT_FACTS:
            methods = [v for v in self.place.values if isinstance(v, Token) and v.type == "METHOD"]
            method = self._open_method() if methods else ""
            yield from (item(name, Kind.Reference, "edit") for name in self._edits(method))
            return
        yield from (item(name, Kind.Property, "parameters of the plan") for name in PLAN_COUNTS)
        yield from (item(name, Kind.Function, "a fact about an edit", f"{name}(") for name in EDIT_FACTS)

    def _open_method(self) -> str:
        values = self.place.values
        number = next(n for n, word in self.place.open_words() if word.type == "METHOD")
        word = word_of(values[number + 1]) if number + 1 < len(values) else None
        return "" if word is None else word.text

    def _edits(self, method: str) -> Iterable[str]:
        if not method:
            return self.names.edits()
        before = [name for tree in statements_of(self.place.values) for name in _edit_names(tree)]
        return dict.fromkeys((*before, *self.names.edits(method)))

    # Forms

    @cached_property
    def _forms(self) -> Mapping[str, None]:
        """The names of forms: the built-in ones, those of the text, and those that it uses."""
        words = (name_of(s) for s in self.names.statements if s.rule in ("form", "use"))
        own = [word.text for word in words if word is not None and self.names.definition("form", word.text)]
        return dict.fromkeys((*own, *FORMS))

    def _functions(self) -> Iterator[types.CompletionItem]:
        """What equations of forms call."""
        yield from (item(name, Kind.Function, row.doc, f"{name}(") for name, row in FUNCTIONS.items())
        yield from (item(name, Kind.Function, doc, f"{name}(") for name, doc in SIZES.items())
        yield from (item(name, Kind.Function, "a function of numbers", f"{name}(") for name in NUMBERS)
        yield from (item(name, Kind.Constant, doc) for name, doc in INITIAL_VALUES.items())

    def _arguments(self, function: str) -> Iterator[types.CompletionItem]:
        """The arguments of a form, or the parameters of a method, that are not there yet."""
        written = {token.text for token, behind in self._pairs() if behind.type == "EQUAL"}
        for name, detail in self._parameters(function).items():
            if name not in written:
                yield item(f"{name}=", Kind.Property, detail)

    def _pairs(self) -> Iterator[tuple[Token, Token]]:
        """The words of the call that is open, each with the next one."""
        start = next((word.span.start for _, word in self.place.open_words() if word.type == "LPAR"), 0)
        tokens = [token for token in self.place.tokens if token.span.start > start]
        return pairwise(tokens)

    def _parameters(self, function: str) -> Mapping[str, str]:
        if (form := self.library.form(function, self.names)) is not None:
            return {a.name: " ".join((a.doc, default_of(a).strip("`"))).strip() for a in form.arguments}
        symbol = self.names.definition("method", function)
        names = None if symbol is None else self.library.file(symbol.path)
        method = None if names is None else names.statement("method", function)
        if names is None or method is None:
            return _NO_NAMES
        params = (param for group in trees_of(method, "params") for param in trees_of(group, "param"))
        return {w.text: self._default(p, names) for p in params if (w := word_of(p.children[0])) is not None}

    def _default(self, param: Tree, names: FileNames) -> str:
        value = param.children[2] if len(param.children) > 2 else None
        return "" if value is None else f"= {names.partial.text[value.span.start : value.span.end]}"

    def _choices(self, function: str) -> Iterator[types.CompletionItem]:
        """The values of the argument before the place."""
        form = self.library.form(function, self.names)
        argument = None if form is None else form.argument(self.place.tokens[-2].text)
        if argument is None:
            return
        if argument.type == "bool":
            yield from (item(word, Kind.Keyword, argument.doc) for word in ("true", "false"))
        suffix = "(" if argument.type == "call" else ""
        yield from (item(word, Kind.EnumMember, argument.doc, f"{word}{suffix}") for word in argument.choices)
        if argument.default is None and not argument.required and "none" not in argument.choices:
            yield item("none", Kind.EnumMember, argument.doc)
        if not argument.choices and argument.default is not None and argument.type != "bool":
            limits = interval(argument) if (argument.low, argument.high) != (None, None) else ""
            yield item(f"{argument.default}", Kind.Value, f"{argument.doc} {limits}".strip())


def _opening(tokens: Sequence[Token], closing: str) -> int:
    """The number of the bracket that is open behind some words, and is closed by a terminal; -1."""
    opening, depth = {"RSQB": "LSQB", "RBRACE": "LBRACE"}[closing], 0
    for number in range(len(tokens) - 1, -1, -1):
        depth += (tokens[number].type == closing) - (tokens[number].type == opening)
        if depth < 0:
            return number
    return -1


def _edit_names(tree: Tree) -> Iterator[str]:
    if tree.rule in ("edit", "train") and (word := name_of(tree)) is not None:
        yield word.text
