"""Error recovery: parsing continues after a syntax error, so that one run reports all of them.

First a repair of one token is tried: delete the unexpected token, insert one before it, or
replace it. The best repair is the one after which most of the following tokens parse. If none
helps, panic mode skips tokens up to one that begins a statement or closes a block, and unwinds the
parser's stack to a state that accepts it.
"""

from collections.abc import Sequence
from itertools import accumulate

from peftc.diagnostics.suggestions import nearest
from peftc.syntax.automaton import Automaton
from peftc.syntax.errors.context import ASSIGNMENTS
from peftc.syntax.lexer import Token, keywords, unknown_terminals

_LOOKAHEAD = 16  # tokens by which a repair is judged
_MIN_PROGRESS = 3  # tokens that must parse after a repair
_STATEMENTS = frozenset({"FORM", "METHOD", "USE", "APPLY", "EDIT", "TRAIN", "EXPECT", "LET", "MOVED"})
_BRACES = {"LBRACE": 1, "RBRACE": -1}
_PARENTHESES = {"LPAR": 1, "RPAR": -1}
_INVALID = frozenset({"BAD_NUMBER", "OPEN_STRING", "STRAY", "COMMENT"})


Resumption = tuple[Automaton, int]  # the parser after recovery, and the index of its next token


def accepted_terminals(parser: Automaton, version: str | None = None) -> frozenset[str]:
    """The terminals that may follow in a spec of a version."""
    return parser.accepts() - _INVALID - unknown_terminals(version)


def resume(
    parser: Automaton, tokens: Sequence[Token], at: int, accepts: frozenset[str], skips: bool = False
) -> Resumption | None:
    """Recovers from the unexpected `tokens[at]`; None if no token is left to continue at.

    `skips`: without a repair.
    """
    missing_braces = -sum(_BRACES.get(token.type, 0) for token in tokens[at:])  # `}` that is missing before `at`
    if tokens[at].type in _STATEMENTS and missing_braces > 0:
        return _skip(parser, tokens, at + 1)
    return (None if skips else _repair(parser, tokens, at, accepts)) or _skip(parser, tokens, at)


def with_braces(tokens: Sequence[Token], at: int, accepts: frozenset[str]) -> Sequence[Token] | None:
    """The tokens with braces in the place of the parentheses around a body; None without these."""
    if tokens[at].type != "LPAR" or "LBRACE" not in accepts or tokens[at - 1].type == "DOT":
        return None
    depths = accumulate(_PARENTHESES.get(token.type, 0) for token in tokens[at:])
    end = next((at + number for number, depth in enumerate(depths) if not depth), None)
    if end is None:
        return None
    types = {at: "LBRACE", end: "RBRACE"}
    return [Token(types[i], one.text, one.span) if i in types else one for i, one in enumerate(tokens)]


def _repair(parser: Automaton, tokens: Sequence[Token], at: int, accepts: frozenset[str]) -> Resumption | None:
    best: Resumption | None = None
    best_score = -1
    spellings = {text: terminal for terminal, text in keywords().items() if terminal in accepts}
    similar = spellings.get(nearest(tokens[at].text, spellings) or "")  # the keyword to try first
    for inserted in (None, *sorted(accepts - {"$END"}, key=lambda terminal: (terminal != similar, terminal))):
        for skip in (0, 1):
            if (inserted is None and not skip) or at + skip >= len(tokens):
                continue
            if inserted in ASSIGNMENTS and tokens[at].type == "LPAR" and not skip:  # a call without its equation
                continue
            trial = parser.copy()
            if inserted and not trial.feed(Token(inserted, "", tokens[at].span)):
                continue
            probe, window = trial.copy(), tokens[at + skip : at + skip + _LOOKAHEAD]
            progress = next((number for number, token in enumerate(window) if not probe.feed(token)), len(window))
            score = 2 * progress - skip
            if progress >= min(_MIN_PROGRESS, len(tokens) - at - skip) and score > best_score:
                best, best_score = (trial, at + skip), score
    return best


def _skip(parser: Automaton, tokens: Sequence[Token], at: int) -> Resumption | None:
    while at < len(tokens):
        token = tokens[at]
        if token.type == "LBRACE":  # continues after the brace that closes it
            depths = accumulate(_BRACES.get(token.type, 0) for token in tokens[at:])
            at += 1 + next((length for length, depth in enumerate(depths) if not depth), len(tokens) - 1 - at)
            continue
        first_of_line = at == 0 or tokens[at - 1].span.end_line != token.span.line
        equation = first_of_line and token.type == "NAME" and tokens[at + 1].type in ASSIGNMENTS
        if token.type in _STATEMENTS or token.type == "RBRACE" or equation:
            # The assignment must fit, too: a name alone would continue the expression before it.
            unwound = _unwind(parser, tokens[at : at + 1 + equation])
            if unwound:
                return unwound, at
        at += 1
    return None


def _unwind(parser: Automaton, tokens: Sequence[Token]) -> Automaton | None:
    """The parser with the least of its stack removed so that it accepts `tokens`."""
    trial = parser.copy()
    while trial.values:
        probe = trial.copy()
        if all(probe.feed(token) for token in tokens):
            return trial
        trial.states.pop()
        trial.values.pop()
    return None
