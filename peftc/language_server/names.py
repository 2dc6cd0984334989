"""What the names of a text stand for: forms, methods, their arguments, lets, edits. The text may
have errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Literal

from peftc.language_server.symbols import (
    Kind,
    Occurrence,
    Symbol,
    alias_of,
    calls_in,
    completed,
    name_of,
    statements_of,
    trees_of,
    word_of,
)
from peftc.syntax.automaton import Tree, Value
from peftc.syntax.lexer import Token
from peftc.syntax.partial import PartialText
from peftc.syntax.vocabulary import EDIT_FACTS

_MOST_EDITS = 1_000
_LETS: Mapping[str, Kind] = {"let": "let", "group_of_sites": "group"}
_SELECTORS = frozenset({"union", "difference", "selection", "optional"})
Names = Mapping[str, Symbol]
Used = Callable[["FileNames", Tree], "FileNames | None"]  # the names of the file that a `use` names


class FileNames:
    """The names of a text.

    Args:
        path: of its file.
        partial: the text.
        used: how other files are read.
        built_in: the file of a built-in form, by the name of the form.
    """

    def __init__(self, path: str, partial: PartialText, used: Used, built_in: Callable[[str], str | None]) -> None:
        self.path, self.partial, self._used, self._built_in = path, partial, used, built_in
        self._edits: dict[str, dict[str, Symbol]] = {}

    @cached_property
    def statements(self) -> tuple[Tree, ...]:
        """The statements of the file, and those of one that is not complete."""
        return tuple(statements_of(completed(self.partial.trees)))

    def definition(self, kind: Literal["form", "method"], name: str, seen: set[str] | None = None) -> Symbol | None:
        """The form or the method of a name, of this file or of one that it uses."""
        seen = {self.path} if seen is None else seen
        for statement in self._named(name):
            if statement.rule == kind:
                return Symbol(kind, self.path, name)
            other = self._used(self, statement) if statement.rule == "use" else None
            if other is None or other.path in seen:
                continue
            seen.add(other.path)
            if (symbol := other.definition(kind, name, seen)) is not None:
                return symbol
        path = self._built_in(name) if kind == "form" else None
        return None if path is None else Symbol("form", path, name)

    def _named(self, name: str) -> Iterable[Tree]:
        """The statements that define or use a name."""
        return (s for s in self.statements if (word := name_of(s)) is not None and word.text == name)

    def statement(self, kind: Literal["form", "method"], name: str) -> Tree | None:
        """The statement of this file that defines a form or a method."""
        return next((statement for statement in self._named(name) if statement.rule == kind), None)

    def edits(self, method: str = "") -> Names:
        """The edits of the file, or of a method, by name: its own, and those of what it applies."""
        if (known := self._edits.get(method)) is not None:
            return known
        edits = self._edits.setdefault(method, {})  # methods may apply each other
        for statement in self._body(method):
            word = name_of(statement)
            if word is None or len(edits) > _MOST_EDITS:
                continue
            if statement.rule in ("edit", "train"):
                edits.setdefault(word.text, Symbol("edit", self.path, word.text, method))
            elif statement.rule == "apply":
                prefix = "" if (alias := alias_of(statement)) is None else f"{alias.text}."
                applied = [*self._edits_of_method(word.text).items()]
                edits |= {f"{prefix}{name}": symbol for name, symbol in applied if f"{prefix}{name}" not in edits}
        return edits

    def _edits_of_method(self, method: str) -> Names:
        """The edits of a method of this file, or of one that it uses."""
        symbol = self.definition("method", method)
        if symbol is None:
            return {}
        if symbol.path == self.path:
            return self.edits(method)
        uses = (self._used(self, statement) for statement in self._named(method) if statement.rule == "use")
        return next((other._edits_of_method(method) for other in uses if other is not None), {})

    def _body(self, method: str) -> Iterable[Tree]:
        if not method:
            return self.statements
        own = self.statement("method", method)
        return () if own is None else tuple(statements_of(own.children))

    # Occurrences

    @cached_property
    def occurrences(self) -> tuple[Occurrence, ...]:
        """All names of the text, in order."""
        return tuple(sorted(_Walk(self).all(), key=lambda one: one.span.start))

    def at(self, offset: int) -> Occurrence | None:
        """The name at a place, or the one that ends there."""
        return next((one for one in self.occurrences if one.span.start <= offset <= one.span.end), None)

    def visible(self, offset: int) -> dict[str, Symbol]:
        """What plain names may stand for at a place: parameters, lets, values of forms."""
        return _Walk(self, offset).visible()


Scope = dict[str, Symbol]


class _Walk:
    """Goes through a text in order. `stop`: the place at which visible names are asked for."""

    def __init__(self, file: FileNames, stop: int | None = None) -> None:
        self.file, self.stop = file, stop
        self.occurrences: list[Occurrence] = []
        self.scopes: list[Scope] = []
        self._visible: dict[str, Symbol] | None = None

    def all(self) -> list[Occurrence]:
        self.scopes = [self._constants()]
        self._statements(self.file.statements, "")
        return self.occurrences

    def visible(self) -> dict[str, Symbol]:
        self.scopes = [self._constants()]
        self._statements(self.file.statements, "")
        return self._flat() if self._visible is None else self._visible

    def _flat(self) -> dict[str, Symbol]:
        return {name: symbol for scope in self.scopes for name, symbol in scope.items()}

    def _leave(self, end: int) -> None:
        """Ends a scope; its names are visible at a place in it."""
        if self.stop is not None and self._visible is None and self.stop <= end:
            self._visible = self._flat()
        self.scopes.pop()

    def _before(self, start: int) -> None:
        if self.stop is not None and self._visible is None and len(self.scopes) > 1 and self.stop < start:
            self._visible = self._flat()

    def _constants(self) -> Scope:
        lets = ((let, word_of(let.children[1])) for let in self.file.statements if let.rule in _LETS)
        symbols: Scope = {}
        for let, word in lets:
            if word is not None:
                symbols.setdefault(word.text, self._let(let, word))
        return symbols

    def _let(self, let: Tree, word: Token) -> Symbol:
        return Symbol(_LETS[let.rule], self.file.path, word.text, f"@{word.span.start}")

    def add(self, symbol: Symbol | None, word: Token | None, is_definition: bool = False) -> None:
        if symbol is not None and word is not None:
            self.occurrences.append(Occurrence(symbol, word.span, is_definition))

    def find(self, name: str) -> Symbol | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    # Statements

    def _statements(self, statements: Iterable[Tree], method: str) -> None:
        for statement in statements:
            self._before(statement.span.start)
            match statement.rule:
                case "use":
                    self._use(statement)
                case "method":
                    self._method(statement)
                case "form":
                    self._form(statement)
                case "edit" | "train":
                    self._edit(statement, method)
                case "apply":
                    self._apply(statement, method)
                case "let" | "group_of_sites":
                    self._statement_let(statement, bool(method))
                case "expect":
                    self._expect(statement, method)
                case "header":
                    pass
                case _:
                    self._expressions(statement)

    def _use(self, use: Tree) -> None:
        if (word := name_of(use)) is not None:
            method = self.file.definition("method", word.text)
            form = self.file.definition("form", word.text) if method is None else None
            self.add(method or form, word)

    def _method(self, method: Tree) -> None:
        word = name_of(method)
        if word is None:
            return
        self.add(Symbol("method", self.file.path, word.text), word, True)
        self.scopes.append({})
        for params in trees_of(method, "params"):
            for param in trees_of(params, "param"):
                name = word_of(param.children[0])
                self._expressions(*param.children[2:])
                if name is not None:
                    symbol = Symbol("parameter", self.file.path, name.text, word.text)
                    self.add(symbol, name, True)
                    self.scopes[-1][name.text] = symbol
        self._statements(statements_of(method.children[2:]), word.text)
        self._leave(method.span.end)

    def _statement_let(self, let: Tree, is_inner: bool) -> None:
        word = word_of(let.children[1])
        self._expressions(*let.children[2:])
        self._groups(*let.children[2:])
        if word is not None:
            symbol = self._let(let, word)
            self.add(symbol, word, True)
            if is_inner:
                self.scopes[-1][word.text] = symbol

    def _edit(self, edit: Tree, method: str) -> None:
        if (word := name_of(edit)) is not None:
            self.add(Symbol("edit", self.file.path, word.text, method), word, True)
        self._groups(*edit.children[2:])
        self.scopes.append({})
        for line in trees_of(edit, "equation", "let"):
            self._before(line.span.start)
            if line.rule == "let":
                self._statement_let(line, True)
            else:
                self._expressions(*line.children[2:])
        self._leave(edit.span.end)

    def _groups(self, *values: Value) -> None:
        """The names of groups of sites in a selector: paths of one step."""
        for value in values:
            if not isinstance(value, Tree):
                continue
            if value.rule == "path":
                word = next((word_of(step.children[0]) for step in trees_of(value, "step")), None)
                symbol = None if word is None or word.span != value.span else self.find(word.text)
                self.add(symbol if symbol is not None and symbol.kind == "group" else None, word)
            elif value.rule in _SELECTORS:
                self._groups(*value.children)

    def _apply(self, apply: Tree, method: str) -> None:
        word = name_of(apply)
        symbol = None if word is None else self.file.definition("method", word.text)
        self.add(symbol, word)
        for arguments in trees_of(apply, "arguments"):
            self._arguments(arguments, None if symbol is None else ("parameter", symbol))
        self._groups(*apply.children[2:])
        if (alias := alias_of(apply)) is not None:
            self.add(Symbol("alias", self.file.path, alias.text, method), alias, True)

    def _expect(self, expect: Tree, method: str) -> None:
        edits = self.file.edits(method)
        for call in calls_in(expect.children):
            function = word_of(call.children[0])
            if function is not None and function.text in EDIT_FACTS:
                for name in (tree for arguments in trees_of(call, "arguments") for tree in trees_of(arguments, "name")):
                    self._edit_name(name, edits, method)
        self._expressions(*expect.children)

    def _edit_name(self, name: Tree, edits: Names, method: str) -> None:
        words = [child for child in name.children if isinstance(child, Token) and child.type == "NAME"]
        symbol = edits.get(".".join(word.text for word in words))
        self.add(symbol, words[-1])
        if symbol is not None and len(words) > 1:
            self.add(Symbol("alias", self.file.path, words[0].text, method), words[0])

    # Forms

    def _form(self, form: Tree) -> None:
        word = name_of(form)
        if word is None:
            return
        self.add(Symbol("form", self.file.path, word.text), word, True)
        self.scopes.append({})
        for params in trees_of(form, "form_params"):
            for param in trees_of(params, "form_param"):
                self._expressions(*param.children[2:])
                self._define("argument", word_of(param.children[0]), word.text)
        for line in trees_of(form, "require", "parameter", "part", "value", "save"):
            self._before(line.span.start)
            number = {"parameter": 1, "part": 1, "value": 0}.get(line.rule)
            self._expressions(*(child for i, child in enumerate(line.children) if i != number))
            if number is not None:
                self._define("value", word_of(line.children[number]), word.text)
        self._leave(form.span.end)

    def _define(self, kind: Kind, word: Token | None, form: str) -> None:
        """A name of a form. Several lines may define one, if conditions choose among them."""
        if word is not None:
            symbol = self.scopes[-1].setdefault(word.text, Symbol(kind, self.file.path, word.text, form))
            self.add(symbol, word, True)

    # Expressions

    def _expressions(self, *values: Value) -> None:
        for value in values:
            if not isinstance(value, Tree):
                continue
            match value.rule:
                case "name":
                    word = word_of(value)
                    self.add(None if word is None else self.find(word.text), word)
                case "call":
                    self._call(value)
                case "path" | "glob" | "union" | "difference" | "selection" | "step" | "scope" | "states":
                    pass
                case _:
                    self._expressions(*value.children)

    def _call(self, call: Tree) -> None:
        function, *others = call.children
        word = word_of(function)
        symbol = None if word is None else self.find(word.text) or self.file.definition("form", word.text)
        is_fact = word is not None and word.text in EDIT_FACTS
        self.add(symbol, word)
        for arguments in others:
            if isinstance(arguments, Tree) and not is_fact:
                self._arguments(
                    arguments, ("argument", symbol) if symbol is not None and symbol.kind == "form" else None
                )

    def _arguments(self, arguments: Tree, owner: tuple[Kind, Symbol] | None) -> None:
        inner: Scope = {}
        for binding in trees_of(arguments, "binding"):
            word = word_of(binding.children[0])
            self._expressions(*binding.children[1:])
            if word is not None:
                symbol = Symbol("index", self.file.path, word.text, f"@{word.span.start}")
                self.add(symbol, word, True)
                inner[word.text] = symbol
        self.scopes.append(inner)
        for child in arguments.children:
            if isinstance(child, Tree) and child.rule == "keyword":
                word = word_of(child.children[0])
                if word is not None and owner is not None:
                    kind, symbol = owner
                    self.add(Symbol(kind, symbol.path, word.text, symbol.name), word)
                self._expressions(*child.children[1:])
            elif not (isinstance(child, Tree) and child.rule == "binding"):
                self._expressions(child)
        self.scopes.pop()
