"""`grammar/peft.tables.json`: what the parser reads, made of `grammar/peft.lark` by lark.

    python -m tools.parser_tables > grammar/peft.tables.json

The data are the terminals in the order in which a lexer tries them, the keywords, and the LALR(1)
automaton: of each state, what a symbol does. A number from 0 is the state after a shift or a goto,
a negative one reduces by the rule `-1 - number`.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from lark import Lark, Token
from lark.lark import PostLex
from lark.parsers.lalr_analysis import Shift

from peftc.filesystem import resources

STARTS = ("spec", "expression")


class UnusedTerminals(PostLex):
    """Makes Lark keep the terminals that no rule uses: comments and invalid tokens."""

    always_accept = ("COMMENT", "BAD_NUMBER", "OPEN_STRING", "STRAY")

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        return stream


def lark(**options: Any) -> Lark:
    """The grammar in lark. A conflict in it raises an exception."""
    common = {"lexer": "basic", "start": list(STARTS), "maybe_placeholders": False, "postlex": UnusedTerminals()}
    return Lark(resources.grammar(), **common, **options)


def tables() -> dict[str, Any]:
    """The data of the parser's tables."""
    parser = lark(parser="lalr", strict=True)
    lexer = lark(parser=None)._build_lexer(True)
    terminals = lexer.scanner.terminals  # which also makes the callbacks
    (names,) = (callback.scanner.terminals for callback in lexer.callback.values())
    spellings = {term.name: term.pattern.value for term in parser.terminals if term.pattern.type == "str"}
    return {
        "terminals": [[terminal.name, pattern(terminal.pattern.to_regexp())] for terminal in terminals],
        "ignored": sorted(lark(parser=None).ignore_tokens),
        "keywords": [name for name in spellings if name in {terminal.name for terminal in names}],
        "spellings": spellings,
        **automaton(parser),
    }


def pattern(regexp: str) -> str:
    """A regular expression without groups that capture, so that the lexer has none but its own."""
    return re.sub(r"(?<!\\)\((?!\?)", "(?:", regexp)


def automaton(parser: Lark) -> dict[str, Any]:
    """Rules and states, numbered in the order in which they are reached."""
    assert not any(rule.alias for rule in parser.rules)
    table = parser.parser.parser._parse_table
    rules = {rule: number for number, rule in enumerate(parser.rules)}
    order = [table.start_states[start] for start in STARTS]
    for state in order:
        row = table.states[state]
        targets = [row[symbol][1] for symbol in sorted(row) if row[symbol][0] is Shift]
        order += [target for target in dict.fromkeys(targets) if target not in order]
    numbers = {state: number for number, state in enumerate(order)}
    rows = [
        {symbol: numbers[to] if action is Shift else -1 - rules[to] for symbol, (action, to) in sorted(row.items())}
        for row in (table.states[state] for state in order)
    ]
    return {
        "rules": [
            [rule.origin.name, [symbol.name for symbol in rule.expansion], rule.options.expand1] for rule in rules
        ],
        "starts": {start: numbers[table.start_states[start]] for start in STARTS},
        "ends": {start: numbers[table.end_states[start]] for start in STARTS},
        "states": rows,
    }


def text() -> str:
    """The tables as JSON, with a line for each rule and state, for the sake of diffs."""
    parts = (f"{dump(name)}: {layout(value)}" for name, value in tables().items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def layout(value: Any) -> str:
    nested = isinstance(value, list) and not isinstance(value[0], str)
    return "[\n" + ",\n".join(map(dump, value)) + "\n]" if nested else dump(value)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    print(text(), end="")
