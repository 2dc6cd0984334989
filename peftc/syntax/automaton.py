"""The LALR(1) automaton, one token at a time: it can be copied, asked and changed by recovery.

It makes plain trees. `peftc.syntax.reducer` runs the same tables over texts without errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from peftc.diagnostics import Span
from peftc.syntax.lexer import Token
from peftc.syntax.tables import END, Rule, State, tables


class Tree(NamedTuple):
    """What a rule of the grammar has matched."""

    rule: str
    children: list[Tree | Token]
    span: Span


Value = Tree | Token


@dataclass(repr=False)  # of states, which lead to each other
class Automaton:
    """A parser between two tokens: its states, and a value for each but the first."""

    end: State
    states: list[State]
    values: list[Value] = field(default_factory=list[Value])

    @classmethod
    def starting(cls, start: str) -> Automaton:
        return cls(tables().ends[start], [tables().starts[start]])

    def copy(self) -> Automaton:
        return Automaton(self.end, self.states[:], self.values[:])

    def feed(self, token: Token) -> bool:
        """Takes `token`, or changes nothing and returns False if it is unexpected."""
        before = self.states[:], self.values[:]
        while True:
            action = self.states[-1].get(token.type)
            if isinstance(action, Rule):
                self._reduce(action)
                if token.type == END and self.states[-1] is self.end:
                    return True
            elif action is None:
                self.states, self.values = before
                return False
            else:
                self.states.append(action)
                self.values.append(token)
                return True

    def _reduce(self, rule: Rule) -> None:
        parts = self.values[-rule.size :]
        del self.values[-rule.size :], self.states[-rule.size :]
        first, *others = (spliced(part) for part in parts)
        children = first if rule.inlined else first[:]  # a list of statements grows in place
        for more in others:
            children += more
        self.states.append(self.states[-1][rule.origin])
        span = parts[0].span.until(parts[-1].span)
        passes = rule.passes and not rule.inlined
        self.values.append(parts[0] if passes else Tree(rule.origin, children, span))

    def accepts(self) -> frozenset[str]:
        """The terminals of which a token would be accepted."""
        return frozenset(terminal for terminal in self.states[-1] if terminal.isupper() and self._allows(terminal))

    def _allows(self, terminal: str) -> bool:
        states = self.states[:]
        while isinstance(action := states[-1].get(terminal), Rule):
            del states[-action.size :]
            states.append(states[-1][action.origin])
            if terminal == END and states[-1] is self.end:
                return True
        return action is not None


def spliced(value: Value) -> list[Value]:
    """A value, or what it has, if its rule only groups."""
    return value.children if isinstance(value, Tree) and value.rule.startswith("_") else [value]


def deeper_than(item: Value, limit: int) -> Value | None:
    """A descendant more than `limit` levels down. Not recursive: a text may nest without bound."""
    stack: list[tuple[Value, int]] = [(item, 0)]
    while stack:
        node, level = stack.pop()
        if level > limit:
            return node
        if isinstance(node, Tree):
            stack.extend((child, level + 1) for child in node.children)
    return None
