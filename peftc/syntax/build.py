"""The phrases of statements to AST, with the comments of each statement."""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from peftc.diagnostics import Diagnostic, Source, Span, Suggestion
from peftc.syntax import ast
from peftc.syntax.lexer import VERSIONS, CommentCursor, Lexemes
from peftc.syntax.reducer import Phrase

_SELECTORS = (ast.Path, ast.BracedPath, ast.Glob, ast.Union, ast.Difference)


class Builder:
    """Builds a `Spec` in the order of the text, since the comments are read in it."""

    def __init__(self, source: Source, lexemes: Lexemes) -> None:
        self.errors: list[Diagnostic] = []  # those that the grammar cannot express
        self._source = source
        self._words, self._types = lexemes.words, lexemes.types
        self._span = lexemes.span
        self._comments = CommentCursor(lexemes)

    def spec(self, phrase: Phrase) -> ast.Spec:
        header, *statements = phrase.children
        at = self._place(header)
        leading = self._comments.leading(at, at.end, first=True)
        trailing = self._comments.trailing(at)
        version = header.last
        number = self._words[version]
        if number not in VERSIONS:
            message = f"this spec is in version {number} of the language; this peftc reads versions 1 and 2"
            first = str(self._words[version]).partition(".")[0]
            help_ = f"write `peft {first}`" if first in VERSIONS else "write `peft 2`, or update peftc"
            self._error("P002", message, version, help_)
        return ast.Spec(
            int(number) if number in VERSIONS else 1,
            tuple([self._statement(statement, False) for statement in statements]),
            header=leading,
            header_trailing=trailing,
            closing=self._comments.closing(len(self._source.text) + 1),
            source=self._source,
            span=self._place(phrase),
        )

    def _place(self, phrase: Phrase) -> Span:
        return self._span(phrase.first, phrase.last)

    def _statement(self, phrase: Phrase, first: bool) -> Any:
        """A statement; `first` of its block."""
        if phrase.rule in ("edit", "method", "form"):
            return self._block(phrase, first)
        build: Callable[..., ast.Statement] = getattr(self, f"_{phrase.rule}")
        at = self._place(phrase)
        leading = self._comments.leading(at, at.end, first)
        return build(phrase.children, leading=leading, trailing=self._comments.trailing(at), span=at)

    def _error(self, code: str, message: str, word: int, help_: str | None = None) -> None:
        self.errors.append(Diagnostic(code, message, self._span(word, word), help=help_))

    def _index(self, phrase: Phrase, terminal: str) -> int:
        """The number of a child that is a word; the grammar guarantees that it is there."""
        types = self._types
        return next(at for at, part in enumerate(phrase.children) if type(part) is int and types[part] == terminal)

    # Blocks

    def _block(self, phrase: Phrase, first: bool) -> ast.Edit | ast.Method | ast.Form:
        """An edit, a method or a form, with the comments above it, in it and next to its braces."""
        place = self._place(phrase)
        number = self._index(phrase, "LBRACE")
        brace = phrase.children[number]
        opening, closing = self._span(brace, brace), self._span(phrase.last, phrase.last)
        params = _optional(phrase, "params") or _optional(phrase, "form_params")
        end = opening.start if params is None else self._span(params.first, params.first).start
        leading = self._comments.leading(place, end, first)
        parameters = () if params is None else self._params(params)
        leading += self._comments.inner(opening.start)
        trailing = self._comments.trailing(opening)
        statements = phrase.children[number + 1 : -1]
        body = tuple([self._statement(statement, not number) for number, statement in enumerate(statements)])
        comments = self._comments.closing(closing.start, first=not body)
        last = self._comments.trailing(closing)
        if trailing and last:
            comments += (last,)
        common = {"leading": leading, "trailing": trailing or last, "closing": comments, "span": place}
        if phrase.rule == "method":
            return ast.build(ast.Method, name=self._words[phrase.children[1]], params=parameters, body=body, **common)
        if phrase.rule == "form":
            return self._form(phrase, parameters, body, **common)
        return self._edit(phrase, body, **common)

    def _edit(self, phrase: Phrase, body: tuple[Any, ...], **common: Any) -> ast.Edit:
        name, selector = phrase.children[1], phrase.children[3]
        per_task = _optional(phrase, "scope")
        if per_task is not None and (word := self._words[per_task.last]) != "task":
            self._error("P023", f"expected `task` after `per`, found `{word}`", per_task.last)
        return ast.build(
            ast.Edit,
            name=name.id,
            selector=selector,
            body=body,
            per_task=per_task is not None,
            where=self._where(phrase.children),
            name_span=name.span,
            **common,
        )

    def _form(self, phrase: Phrase, params: tuple[Any, ...], body: tuple[Any, ...], **common: Any) -> ast.Form:
        name = phrase.children[1]
        for line in body:
            if isinstance(line, ast.Equation) and line.op != "=":
                self.errors.append(
                    Diagnostic("P012", f"expected `=` after `{line.target}`, found `{line.op}`", line.target_span)
                )
        return ast.build(
            ast.Form,
            name=self._words[name],
            params=params,
            body=body,
            name_span=self._span(name, name),
            **common,
        )

    def _params(self, phrase: Phrase) -> tuple[Any, ...]:
        """The parameters of a method, or of a form."""
        params: list[ast.Param | ast.FormParam] = []
        kind = ast.FormParam if phrase.rule == "form_params" else ast.Param
        for param, following in zip_longest(phrase.children, phrase.children[1:]):
            if isinstance(param, int):
                continue
            at = self._place(param)
            leading = self._comments.leading(at, at.end, first=True)
            comma = isinstance(following, int) and self._types[following] == "COMMA"
            trailing = self._comments.trailing(self._span(following, following) if comma else at)
            name, *default = param.children
            value: Any = default[1] if default else None
            params.append(kind(self._words[name], value, leading=leading, trailing=trailing, span=at))
        return tuple(params)

    # Statements of one line

    def _equation(self, children: list[Any], **common: Any) -> ast.Equation:
        target, op, value = children
        words = self._words
        at = self._span(target, target)
        return ast.build(ast.Equation, target=words[target], op=words[op], value=value, target_span=at, **common)

    def _value(self, children: list[Any], **common: Any) -> ast.Equation:
        condition = self._condition(children[3:])
        return self._equation(children[:3], condition=condition, **common)

    def _part(self, children: list[Any], **common: Any) -> ast.Let:
        _, name, _, value, *condition = children
        common["condition"] = self._condition(condition)
        return ast.build(ast.Let, name=self._words[name], value=value, **common)

    def _condition(self, phrases: list[Any]) -> ast.Condition | None:
        phrase = next((part for part in phrases if isinstance(part, Phrase) and part.rule == "condition"), None)
        if phrase is None:
            return None
        _, left, *comparison = phrase.children
        op, right = (self._words[comparison[0]], comparison[1]) if comparison else ("", None)
        return ast.build(ast.Condition, left=left, op=op, right=right, span=self._place(phrase))

    def _where(self, phrases: list[Any]) -> tuple[ast.Condition, ...]:
        own = (part for part in phrases if isinstance(part, Phrase) and part.rule == "where")
        parts = ((part, part.children[1:]) for part in own)
        return tuple(
            ast.build(ast.Condition, left=left, op=self._words[op], right=right, span=self._place(part))
            for part, (left, op, right) in parts
        )

    def _require(self, children: list[Any], **common: Any) -> ast.Require:
        _, left, op, right, *condition = children
        common["condition"] = self._condition(condition)
        return ast.build(ast.Require, left=left, op=self._words[op], right=right, **common)

    def _save(self, children: list[Any], **common: Any) -> ast.Save:
        _, call, *condition = children
        common["condition"] = self._condition(condition)
        return ast.build(ast.Save, call=call, **common)

    def _parameter(self, children: list[Any], **common: Any) -> ast.Parameter:
        kind, name, *parts = children
        phrases = {part.rule: part.children for part in parts if isinstance(part, Phrase)}
        words = [at for at, part in enumerate(parts) if type(part) is int]
        is_common, equal = self._types[parts[words[0]]] == "COMMON", words[-1]
        return ast.build(
            ast.Parameter,
            name=self._words[name],
            sizes=tuple(phrases.get("sizes", ())[1:-1:2]),
            value=parts[equal + 1],
            fixed=self._types[kind] == "FIXED",
            scope=self._words[phrases["scope"][1]] if "scope" in phrases else "",
            common=is_common,
            condition=self._condition(parts),
            name_span=self._span(name, name),
            **common,
        )

    def _let(self, children: list[Any], **common: Any) -> ast.Let:
        _, name, _, value = children
        return ast.build(ast.Let, name=name.id, value=value, **common)

    def _group_of_sites(self, children: list[Any], **common: Any) -> ast.SiteGroup:
        _, name, _, selector = children
        return ast.SiteGroup(name.id, selector, name_span=name.span, **common)

    def _train(self, children: list[Any], **common: Any) -> ast.Train:
        _, name, _, states, _, selector, *where = children
        words, common["where"] = states.children[1::2], self._where(where)
        common["states"] = tuple([self._words[word] for word in words])
        common["state_spans"] = tuple([self._span(word, word) for word in words])
        return ast.build(ast.Train, name=name.id, selector=selector, name_span=name.span, **common)

    def _expect(self, children: list[Any], **common: Any) -> ast.Expect:
        _, left, *comparison = children
        op, right = (self._words[comparison[0]], comparison[1]) if comparison else (None, None)
        return ast.build(ast.Expect, left=left, op=op, right=right, **common)

    def _moved(self, children: list[Any], **common: Any) -> ast.Moved:
        _, old, *places, new = children
        at, to = (places[1], new) if len(places) > 1 else (None, None)
        name = new.id if at is None else old.id
        for path in (at, to):
            if isinstance(path, ast.BracedPath):
                help_ = "write a `moved` for each of its paths"
                self.errors.append(Diagnostic("P016", "`moved` takes a path without braces", path.span, help=help_))
        spans = {"old_span": old.span if at is None else at.span, "new_span": new.span}
        return ast.build(ast.Moved, old=old.id, new=name, at=at, to=to, **spans, **common)

    def _use(self, children: list[Any], **common: Any) -> ast.Use:
        _, name, _, file = children
        word, source = self._words[file], None
        if self._types[file] == "STRING":
            source = word[1:-1]
        elif word != "std":
            help_ = Suggestion(f'`from std`, or from a file: `from "{word}.peft"`', word, f'"{word}.peft"', "unsafe")
            self._error("P022", f"expected `std` or a file in quotes, found `{word}`", file, help_)
        spans = {"name_span": self._span(name, name), "source_span": self._span(file, file)}
        return ast.build(ast.Use, name=self._words[name], source=source, **spans, **common)

    def _apply(self, children: list[Any], **common: Any) -> ast.Apply:
        _, name, *parts = children
        args, kwargs = next((part for part in parts if type(part) is tuple), ((), ()))
        for value in args:
            help_ = "write `NAME=value` for each parameter of the method"
            self.errors.append(Diagnostic("P020", "arguments of a method are named", value.span, help=help_))
        at = next((part for part in parts if isinstance(part, _SELECTORS)), None)
        alias = next((part.id for part in parts if isinstance(part, ast.Name)), None)
        common["name_span"] = self._span(name, name)
        return ast.build(ast.Apply, name=self._words[name], args=kwargs, at=at, alias=alias, **common)


def _optional(phrase: Phrase, rule: str) -> Phrase | None:
    """The phrase of a rule among the children of another."""
    parts = (part for part in phrase.children if isinstance(part, Phrase))
    return next((part for part in parts if part.rule == rule), None)
