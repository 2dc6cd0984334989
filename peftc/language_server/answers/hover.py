"""What an editor shows of the word at a place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

from lsprotocol import types

from peftc.addressing.paths import compress_paths
from peftc.addressing.sites import SiteTable
from peftc.diagnostics import Span
from peftc.diagnostics.codes import CODES
from peftc.diagnostics.suggestions import plural
from peftc.equations.primitives import FUNCTIONS
from peftc.equations.words import INITIAL_VALUES, SIZES
from peftc.forms.form import Form
from peftc.language_server.analysis import Analysis
from peftc.language_server.answers import sites
from peftc.language_server.answers.plans import EditPlan, plans_of_edit
from peftc.language_server.documents import Document
from peftc.language_server.library import Library
from peftc.language_server.names import FileNames
from peftc.language_server.symbols import Symbol, completed, name_of, trees_of, word_of
from peftc.semantics.arguments import interval
from peftc.semantics.form_facts import default_of, form_lines
from peftc.syntax.automaton import Tree, Value
from peftc.syntax.lexer import Token
from peftc.syntax.partial import is_word
from peftc.syntax.vocabulary import LAYER, STATES

_MOST_PATHS = 12  # lines of sites
_CODE = re.compile(r"P\d{3}")
_FACTS: Mapping[str, str] = {
    "trained": "parameters with a gradient",
    "stored": "parameters in the saved adapter",
    "changed": "entries of the base that differ after folding",
    "served": "parameters that inference has beside the base, after folding what folds",
    "sites": "the number of sites of an edit",
    "foldable": "whether an edit can be folded into the weights",
    "identity": "whether an edit leaves the model unchanged before training",
}


@dataclass
class Hover:
    """Answers at one place of a text.

    Attributes:
        tables: of the models of the text that are known, by name.
        analysis: of this version of the text; None if there is none yet.
    """

    document: Document
    offset: int
    library: Library
    tables: Mapping[str, SiteTable]
    analysis: Analysis | None = None

    @cached_property
    def names(self) -> FileNames:
        return self.library.of(self.document)

    def answer(self) -> types.Hover | None:
        """What there is to say; None if that is nothing."""
        comment = self.document.partial.comment_at(self.offset)
        if comment is not None:
            return self._of_comment(comment)
        token = self.document.partial.token_at(self.offset)
        if token is None or not is_word(token):
            return None
        parts = [part for part in self._parts(token) if part]
        return self._hover(parts, token.span) if parts else None

    def _hover(self, parts: Sequence[str], span: Span) -> types.Hover:
        content = types.MarkupContent(types.MarkupKind.Markdown, "\n\n".join(parts))
        return types.Hover(content, self.document.positions.range(span))

    def _of_comment(self, comment: Token) -> types.Hover | None:
        """The title of a code in a comment that suppresses it."""
        for match in _CODE.finditer(comment.text):
            start = comment.span.start + match.start()
            if start <= self.offset <= start + len(match[0]) and (info := CODES.get(match[0])) is not None:
                span = comment.span._replace(start=start, end=start + len(match[0]))
                return self._hover([f"**{match[0]}**: {info.title}"], span)
        return None

    def _parts(self, token: Token) -> Iterator[str]:
        around = self._around
        rules = [tree.rule for tree in around]
        occurrence = self.names.at(self.offset)
        if occurrence is not None:
            yield from self._of_symbol(occurrence.symbol, occurrence.span)
        elif "step" in rules:
            yield from self._of_step(around, token)
        elif (form := self._python_form(token, around)) is not None:
            yield from self._of_form(form)
        elif "form" in rules:
            yield from (row.doc for row in [FUNCTIONS.get(token.text)] if row is not None)
            yield from (words[token.text] for words in (SIZES, INITIAL_VALUES) if token.text in words)
        elif "expect" in rules and token.text in _FACTS:
            yield _FACTS[token.text]
        elif token.text == LAYER and "edit" in rules:
            yield self._of_layer(around) or "the number of the site's layer in its stack, from 0"
        elif token.text in STATES and ("edit" in rules or "train" in rules):
            yield from self._of_state(token.text)

    @cached_property
    def _around(self) -> list[Tree]:
        """The trees around the place, outermost first."""
        trees: list[Tree] = []
        values: Sequence[Value] = completed(self.document.partial.trees)
        while True:
            inside = (v for v in values if isinstance(v, Tree) and v.span.start <= self.offset <= v.span.end)
            tree = max(inside, default=None, key=lambda one: one.span.start)
            if tree is None:
                return trees
            trees.append(tree)
            values = tree.children

    def _python_form(self, token: Token, around: Sequence[Tree]) -> Form | None:
        is_call = any(tree.rule == "call" and tree.children[0].span == token.span for tree in around)
        return self.library.form(token.text, self.names) if is_call else None

    def _of_layer(self, around: Sequence[Tree]) -> str:
        """What `layer` is as the word of an argument: empty where it is a number."""
        for call, keyword in zip(around, around[2:], strict=False):
            if (call.rule, keyword.rule) != ("call", "keyword"):
                continue
            function, name = (word_of(tree.children[0]) for tree in (call, keyword))
            form = None if function is None else self.library.form(function.text, self.names)
            argument = None if form is None or name is None else form.argument(name.text)
            if form is not None and argument is not None and LAYER in argument.choices:
                words = ", ".join(argument.choices)
                return f"a word, one of {words}: `{argument.name}` of `{form.name}`, {argument.doc}"
        return ""

    # Symbols

    def _of_symbol(self, symbol: Symbol, span: Span) -> Iterator[str]:
        match symbol.kind:
            case "form":
                form = self.library.form(symbol.name, self.names)
                yield from () if form is None else self._of_form(form)
            case "argument":
                yield from self._of_argument(symbol)
            case "method":
                yield from self._of_method(symbol)
            case "edit":
                yield from self._of_edit(span)
            case "alias":
                yield f"a prefix for the names of edits: `{symbol.name}.…`"
            case "index":
                yield f"`{symbol.name}` is 0, 1, 2, …"
            case _:
                yield from self._definition(symbol)

    def _of_form(self, form: Form) -> Iterator[str]:
        signature, _, *lines = form_lines(form)
        yield f"```peft\n{signature}\n```"
        text = form.text
        if text is not None:
            yield f"```peft\n{text.strip()}\n```"
            lines = lines[lines.index("", lines.index(text)) :] if text in lines else lines
        yield "```text\n" + "\n".join(lines).strip() + "\n```"
        yield from self._at_sites(form.name)

    def _at_sites(self, form: str) -> Iterator[str]:
        """Shapes and counts of the edit around the place, of a form in it."""
        for plan in self._plans:
            module = import_module("peftc.planning.report.plan")
            instances = [instance for one in plan.site_edits for instance in one.instances]
            own = dict.fromkeys(module.mapping_text(one) for one in instances if one.form.name == form)
            if own:
                lines = "\n".join([*own, plan.summary()])
                yield f"on `{plan.model}`, in this edit:\n\n```text\n{lines}\n```"

    @property
    def _plans(self) -> Sequence[EditPlan]:
        """The plans of the edit that the place is in."""
        name = next((name_of(tree) for tree in self._around if tree.rule in ("edit", "train")), None)
        return [] if name is None or self.analysis is None else [*plans_of_edit(self.analysis, name.span)]

    def _of_argument(self, symbol: Symbol) -> Iterator[str]:
        form = self.library.form(symbol.owner, self.names)
        argument = None if form is None else form.argument(symbol.name)
        if argument is None:
            yield from self._definition(symbol)
            return
        values = f": {', '.join(argument.choices)}" if argument.choices else ""
        limits = f", {interval(argument)}" if not values and (argument.low, argument.high) != (None, None) else ""
        default = default_of(argument).strip("`")
        yield f"`{symbol.name}` of `{symbol.owner}`: {argument.doc}{values}{limits}{f' ({default})' if default else ''}"

    def _of_method(self, symbol: Symbol) -> Iterator[str]:
        names = self.library.file(symbol.path)
        method = None if names is None else names.statement("method", symbol.name)
        if names is None or method is None:
            return
        params = next(trees_of(method, "params"), None)
        end = method.children[1].span.end if params is None else params.span.end
        yield f"```peft\n{names.partial.text[method.span.start : end]}\n```"
        yield "\n".join(_comments_above(names, method))

    def _of_edit(self, span: Span) -> Iterator[str]:
        module = import_module("peftc.planning.report.plan")
        for plan in [] if self.analysis is None else plans_of_edit(self.analysis, span):
            texts = [
                module.render_edit(edit, [s for s in plan.site_edits if s.edit == edit.name]) for edit in plan.edits
            ]
            lines = "\n".join(module.plain_text(text).rstrip() for text in texts)
            yield f"on `{plan.model}`: {plan.summary()}\n\n{plan.details()}\n\n```text\n{lines}\n```"

    def _definition(self, symbol: Symbol) -> Iterator[str]:
        """The line that defines a name."""
        names = self.library.file(symbol.path)
        for one in [] if names is None else self.library.definitions(symbol):
            text = names.partial.text if names is not None else ""
            start = text.rfind("\n", 0, one.span.start) + 1
            end = text.find("\n", one.span.start)
            yield f"```peft\n{text[start : end if end >= 0 else len(text)].strip()[:500]}\n```"
            return

    # Sites and states

    def _of_step(self, around: Sequence[Tree], token: Token) -> Iterator[str]:
        step = next(tree for tree in around if tree.rule == "step")
        starts = [tree.span.start for tree in around if tree.rule == "path"]
        ends = [*(tree.span.start for tree in around if tree.rule == "braces"), step.span.end]
        if len(starts) != len(ends):  # of a path that is not complete
            starts, ends = [step.span.start], [step.span.end]
        selector = "".join(self.document.text[start:end] for start, end in zip(starts, ends, strict=True))
        for model, table in self.tables.items():
            selection = sites.selection_of(selector, table)
            if selection is None:
                continue
            lines = [f"{text} × {count}" if count > 1 else text for text, count in compress_paths(selection.paths)]
            more = [f"… {len(lines) - _MOST_PATHS} more lines"] if len(lines) > _MOST_PATHS else []
            paths = "\n".join([*lines[:_MOST_PATHS], *more])
            yield f"`{selector}` on `{model}`: {plural(len(selection), 'site')}\n\n```text\n{paths}\n```"
        states = sites.states_of(selector, [*self.tables.values()])
        yield "\n".join(f"- `{name}`: {doc}" for name, doc in states.items())

    def _of_state(self, name: str) -> Iterator[str]:
        edit = next((tree for tree in self._around if tree.rule in ("edit", "train")), None)
        children = [] if edit is None else edit.children
        at = next((n for n, one in enumerate(children) if isinstance(one, Token) and one.type == "AT"), None)
        span = None if at is None else children[at + 1].span
        selector = "" if span is None else self.document.text[span.start : span.end]
        yield f"`{name}`: {sites.states_of(selector, [*self.tables.values()]).get(name, STATES[name])}"


def _comments_above(names: FileNames, statement: Tree) -> list[str]:
    """The comments directly above a statement."""
    line, lines = statement.span.line, list[str]()
    for comment in reversed(names.partial.lexemes.comments):
        if comment.span.line == line - 1:
            lines.insert(0, comment.text.lstrip("#").strip())
            line -= 1
    return lines
