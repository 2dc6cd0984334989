"""The tables of the parser, which `tools/parser_tables.py` makes of the grammar.

They are data: JSON in the package. No program of the user's needs the tool that makes them.
"""

import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from peftc.filesystem import resources

END = "$END"


@dataclass(frozen=True, eq=False, slots=True)
class Rule:
    """A reduction: `size` symbols become one of the name `origin`.

    Attributes:
        several: the symbols that may be several, which the rule takes one by one.
        inlined: whether the result is its symbols, for the rule around it.
        passes: whether the result is its only symbol.
    """

    origin: str
    size: int
    several: tuple[int, ...]
    inlined: bool
    passes: bool


# What a symbol does in a state: a shift to a state, or a goto after a reduction; or a reduction.
State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Tables:
    """Terminals in the order in which they are tried, keywords by text, and the LALR(1) states."""

    terminals: tuple[tuple[str, str], ...]
    ignored: frozenset[str]
    keywords: dict[str, str]
    spellings: dict[str, str]
    rules: tuple[Rule, ...]
    starts: dict[str, State]
    ends: dict[str, State]
    short_starts: dict[str, State]  # of states in which one shift or goto does what follows without a choice
    short_ends: dict[str, State]

    @cached_property
    def lexer(self) -> re.Pattern[str]:
        """A pattern that finds one lexeme after the other, without groups."""
        return re.compile("|".join(pattern for _, pattern in self.terminals))

    @cached_property
    def classifier(self) -> re.Pattern[str]:
        """A pattern whose group tells the terminal of a lexeme that has no spelling of its own."""
        several = (pair for pair in self.terminals if pair[0] not in self.spellings)
        return re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in several))


@cache
def tables() -> Tables:
    """The tables of grammar/peft.lark."""
    data = json.loads(resources.parser_tables())
    rules = _rules(data["rules"])
    states, short = _states(data["states"], rules), _states(data["states"], rules)
    _shorten(short)
    return Tables(
        terminals=tuple((name, pattern) for name, pattern in data["terminals"]),
        ignored=frozenset(data["ignored"]),
        keywords={data["spellings"][name]: name for name in data["keywords"]},
        spellings=data["spellings"],
        rules=rules,
        starts={name: states[number] for name, number in data["starts"].items()},
        ends={name: states[number] for name, number in data["ends"].items()},
        short_starts={name: short[number] for name, number in data["starts"].items()},
        short_ends={name: short[number] for name, number in data["ends"].items()},
    )


def _states(rows: list[dict[str, int]], rules: tuple[Rule, ...]) -> list[State]:
    states: list[State] = [{} for _ in rows]
    for state, row in zip(states, rows, strict=True):
        state.update({symbol: states[to] if to >= 0 else rules[-1 - to] for symbol, to in row.items()})
    return states


def _shorten(states: list[State]) -> None:
    """Leads gotos past the states that only rename their last symbol: `_atom`, `_factor`.

    An unexpected token is noticed some reductions later, before the next shift.
    """
    renamed: dict[int, str] = {}
    for state in states:
        actions = {*state.values()} if all(isinstance(action, Rule) for action in state.values()) else set[Rule]()
        if len(actions) == 1 and (rule := actions.pop()).passes:
            renamed[id(state)] = rule.origin
    for state in states:
        for symbol, to in state.items():
            while id(to) in renamed:
                to = state[renamed[id(to)]]
            state[symbol] = to


def _rules(rows: list[tuple[str, list[str], bool]]) -> tuple[Rule, ...]:
    inlined = [(origin, symbols) for origin, symbols, _ in rows if origin.startswith("_")]
    several = {origin for origin, symbols in inlined if len(symbols) > 1}
    while more := {origin for origin, symbols in inlined if not several.isdisjoint(symbols)} - several:
        several |= more
    return tuple(
        Rule(
            origin,
            size=len(symbols),
            several=tuple(number for number, symbol in enumerate(symbols) if symbol in several),
            inlined=origin.startswith("_"),
            passes=len(symbols) == 1 and (is_alias or origin.startswith("_")),
        )
        for origin, symbols, is_alias in rows
    )
