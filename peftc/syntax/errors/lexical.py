"""Errors within a token: unknown characters, strings that do not end, malformed numbers."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from unicodedata import name, normalize

from peftc.diagnostics import Diagnostic, Suggestion
from peftc.diagnostics.suggestions import instead_of
from peftc.syntax.lexer import CLOSING, NEED_VERSION_2, Token, excerpt
from peftc.syntax.numbers import is_number

# Characters from papers and word processors: the terminal and the text that they stand for.
_LOOKALIKES = {
    **dict.fromkeys("×·⊙∗", ("STAR", "*")),
    **dict.fromkeys("−–—", ("MINUS", "-")),
    "÷": ("SLASH", "/"),
    "≤": ("COMPARISON", "<="),
    "≥": ("COMPARISON", ">="),
    "≠": ("COMPARISON", "!="),
    "←": ("EQUAL", "="),
    "…": ("DOT_DOT", ".."),
}
_HELP = {
    ";": "statements and equations need no separator",
    "^": "there is no power: write a product, `x * x`",
    "%": "there is no remainder; `%` follows a number: `0.5%`",
    **dict.fromkeys("σφ", "an activation is an argument of a form: `adapter(x, r=8, act=sigmoid)`"),
    "&": "selectors are joined by `|`; write an `expect` for each fact",
    "!": "`!=` compares; `foldable(…) == false` negates",
    "$": "a parameter of a method is named without a sign: `r`",
    "Δ": "a change of the weight is written `w += …`",
    **dict.fromkeys("'‘’`", 'use double quotes: "file.peft"'),
    **dict.fromkeys("“”„", 'use straight quotes: `"`'),
    "@": f"the matrix product belongs to version 2 of the language: {NEED_VERSION_2}",
    "\xa0": "this is a no-break space; write an ordinary one",
}


# Letters of other alphabets that look like Latin ones, by these.
_LETTERS = {
    letter: latin
    for latin, letters in {
        "a": "аα", "b": "Ь", "c": "сϲ", "d": "ԁ", "e": "еҽ", "g": "ɡ", "h": "һ", "i": "іι", "j": "ј", "k": "κк",
        "l": "ӏ",
        "m": "м", "n": "п", "o": "оο", "p": "рρ", "q": "ԛ", "r": "г", "s": "ѕ", "t": "тτ", "u": "υ", "v": "νѵ",
        "w": "ԝω", "x": "хχ", "y": "уγ", "z": "ᴢ",
        "A": "АΑ", "B": "ВΒ", "C": "С", "E": "ЕΕ", "H": "НΗ", "K": "КΚ", "M": "МΜ", "O": "ОΟ", "P": "РΡ", "T": "ТΤ",
        "X": "ХΧ",
    }.items()
    for letter in letters
}  # fmt: skip
_STRAIGHT = {**dict.fromkeys("'‘’`“”„", '"'), "\xa0": " "}
_QUOTES = {"'": "'", "`": "`", "‘": "’", "“": "”", "„": "“"}  # around words: the first one and the last one


_BRACES = "several names stand in braces behind a `.`: `layer[*].attn.{q, v}`"
NO_CHOICES = "equations have no choices: write an edit for each case; a line of a form may end with `if …`"
IN_NAMES = "a name has letters from a to z, digits and `_`"


def _help(char: str, tokens: Sequence[Token], at: int) -> str | None:
    """What to do about an unknown character at a place."""
    following = tokens[at + 1]
    if char == "@" and at > 1 and tokens[at - 2].type in {"EDIT", "TRAIN"}:
        return Suggestion("write `at` before the selector", "@", "at")
    text = _HELP.get(char)
    touches = [token.type == "NAME" for token in (tokens[at - 1], following)]
    if (latin := _LETTERS.get(char)) is not None and (any(touches) or char not in _HELP):
        return Suggestion(f"this is {name(char)}, which looks like `{latin}`: write `{latin}`", char, latin)
    if char == "'" and following.type in {"EQUAL", "PLUS_EQUAL", "STAR_EQUAL"}:  # h' = …
        return "the new value is assigned to the state itself: `h = h + …`"
    if text is None and len(ascii_ := normalize("NFKC", char)) == 1 and ascii_.isascii() and ascii_ != char:
        return Suggestion(f"this is {name(char)}: write `{ascii_}`", char, ascii_)  # ，
    if text is None:
        return IN_NAMES if char.isalpha() else None
    return text if char not in _STRAIGHT else Suggestion(text, char, _STRAIGHT[char])


def _colon(tokens: Sequence[Token], at: int, bracket: str) -> tuple[str, tuple[str, str] | None]:
    """What to do about a colon in a bracket of that type, and what it stands for."""
    before = tokens[at - 1].type if at else ""
    if before == "PEFT":
        return Suggestion("the version follows without a sign: `peft 2`", ":", ""), None
    if tokens[at + 1].type == "EQUAL":  # h := …
        return Suggestion("write `=`", ":", ""), None
    if bracket == "LSQB":
        statements = [token.type for token in tokens[:at] if token.type in {"FORM", "EDIT", "TRAIN", "METHOD"}]
        if statements[-1:] == ["FORM"]:  # A[0:4]
            return "some rows of a parameter, or features of a value, are `narrow(A, start, count)`", None
        return "a range of layers is written `0..5`, with both ends included", ("DOT_DOT", "..")
    if bracket == "LPAR":
        return Suggestion("an argument is written `r=8`", ":", "="), ("EQUAL", "=")
    if before == "NAME" and tokens[at + 1].type == "LSQB":  # train norms: [w, b]
        return Suggestion("write `=`", ":", " ="), ("EQUAL", "=")
    return "the body of an edit, a method or a form stands in braces: `{ … }`", None


def _closed(text: str) -> str:
    """What to do about a string that is not closed. One that is a word ends with it."""
    help_ = 'a string ends on its line with `"`'
    word = re.match(r'"[^\s"{}]+', text)
    return Suggestion(help_, word[0], f'{word[0]}"') if word else help_


def _end_of_names(tokens: Sequence[Token], at: int) -> int | None:
    """The number of the bracket that closes `attn{q, v}`, `attn.(q | v)` or `attn.[q, v]`."""
    before, bracket = tokens[at - 1] if at else None, tokens[at]
    is_behind_point = before is not None and before.type == "DOT"
    if before is None or before.span.end != bracket.span.start or is_behind_point == (bracket.type == "LBRACE"):
        return None
    if not is_behind_point and (bracket.type != "LBRACE" or before.type not in {"NAME", "RSQB"}):
        return None
    end = at + 1
    while [token.type for token in tokens[end : end + 2]] in (["NAME", "COMMA"], ["NAME", "BAR"]):
        end += 2
    is_list = end > at + 1 and [token.type for token in tokens[end : end + 2]][:1] == ["NAME"]
    return end + 1 if is_list and tokens[end + 1].type == CLOSING[bracket.type] else None


def _closing(tokens: Sequence[Token], at: int) -> int | None:
    """The number of the bracket that closes another."""
    depth = 0
    for number in range(at, len(tokens)):
        depth += (tokens[number].type in CLOSING) - (tokens[number].type in CLOSING.values())
        if depth == 0:
            return number
    return None


def _joined(tokens: Sequence[Token]) -> Iterator[Token]:
    """Selectors with `|` in the place of commas between them."""
    depth = 0
    for token in tokens:
        depth += (token.type in CLOSING) - (token.type in CLOSING.values())
        yield token if depth or token.type != "COMMA" else token._replace(type="BAR")


def _closing_quote(tokens: Sequence[Token], at: int) -> int | None:
    """The number of the quote that ends a string on the line of its first one, a foreign quote."""
    line, quote = tokens[at].span.line, _QUOTES[tokens[at].text]
    quotes = (number for number in range(at + 1, len(tokens)) if tokens[number].text in (quote, tokens[at].text))
    end = next(quotes, None)
    is_string = end is not None and end > at + 1 and tokens[end].span.line == line and tokens[end].text == quote
    return end if is_string and tokens[at - 1].span.end < tokens[at].span.start else None


def _word(tokens: Sequence[Token], at: int) -> Token:
    """The word of a letter that looks like a Latin one."""
    first = last = at
    while first and tokens[first - 1].span.end == tokens[first].span.start and _is_letters(tokens[first - 1]):
        first -= 1
    while tokens[last + 1].span.start == tokens[last].span.end and _is_letters(tokens[last + 1]):
        last += 1
    text = "".join(token.text for token in tokens[first : last + 1])
    return Token("NAME", text, tokens[first].span.until(tokens[last].span))


def _not_latin(word: Token) -> Diagnostic:
    latin = "".join(_LETTERS.get(letter, letter) for letter in word.text)
    message = f"some letters of `{excerpt(word.text)}` are not Latin ones, and look like them"
    return Diagnostic("P003", message, word.span, help=Suggestion(f"write `{excerpt(latin)}`", word.text, latin))


def _is_letters(token: Token) -> bool:
    return token.text.isidentifier()


def _is_import(tokens: Sequence[Token], at: int) -> bool:
    """Whether a statement is `from std import mam`, or `from std use mam`."""
    is_statement = at < 2 or tokens[at - 2].type != "USE"
    types, words = ([getattr(one, part) for one in tokens[at + 1 : at + 4]] for part in ("type", "text"))
    return is_statement and types[:1] in (["NAME"], ["STRING"]) and types[2:] == ["NAME"] and words[1] in _IMPORTS


_IMPORTS = ("import", "use")
_NO_CHOICE = frozenset({"COMMA", "EQUAL", "PLUS_EQUAL", "STAR_EQUAL", "LBRACE", "QUESTION"})  # behind `?`


def _colon_of_choice(tokens: Sequence[Token], at: int) -> int | None:
    """The number of the `:` of `a ? b : c`, whose `?` stands at a place."""
    depth = 0
    for number in range(at + 1, len(tokens)):
        token = tokens[number]
        depth += (token.type in CLOSING) - (token.type in CLOSING.values())
        if depth == 0 and token.text == ":":
            return number
        if depth < 0 or token.type in _NO_CHOICE:
            return None
    return None


def _names(tokens: Sequence[Token]) -> str:
    return f"`{excerpt(' '.join(token.text for token in tokens).replace(' ,', ','))}`"


def _braced(tokens: Sequence[Token], before: Sequence[str]) -> list[Token]:
    """A list of names in any brackets as `{q, v}`, with terminals in front that have no text."""
    first, *inner, last = tokens
    kinds = {"BAR": "COMMA"}
    names = [token._replace(type=kinds.get(token.type, token.type)) for token in inner]
    opening = [Token(terminal, "", first.span) for terminal in before]
    return [*opening, first._replace(type="LBRACE"), *names, last._replace(type="RBRACE")]


def other_format(tokens: Sequence[Token]) -> Diagnostic | None:
    """P001 of a text that is JSON or YAML, by its first words."""
    first, second = tokens[0], tokens[min(1, len(tokens) - 1)]
    is_yaml = first.type == "NAME" and second.text == ":"
    if first.type not in {"LBRACE", "LSQB"} and not is_yaml:
        return None
    message = f"expected `peft 2`, found {'YAML' if is_yaml else 'JSON'}"
    help_ = "this is not a spec; `peftc new FOLDER` writes one for a configuration of PEFT"
    return Diagnostic("P001", message, first.span, help=help_, label="a spec begins with its language version")


def repair_tokens(tokens: Sequence[Token]) -> tuple[list[Token], list[Diagnostic]]:
    """The tokens with lexical errors repaired (or removed), and a diagnostic for each."""
    repaired: list[Token] = []
    errors: list[Diagnostic] = []
    open_brackets: list[str] = []
    skipped = range(0)
    for at, token in enumerate(tokens):
        text = token.text
        if at in skipped:
            continue
        match token.type:
            case "STRAY" if text in _QUOTES and (end := _closing_quote(tokens, at)) is not None:
                pairs = pairwise(tokens[at:end])
                inner = "".join(" " * (after.span.start - token.span.end) + after.text for token, after in pairs)
                help_ = f'use {"straight" if text in "“„" else "double"} quotes: "{inner}"'
                help_ = Suggestion(help_, f"{text}{inner}{tokens[end].text}", f'"{inner}"')
                error = ("P003", f"unknown character `{text}` around `{excerpt(inner)}`", help_)
                skipped, replacement = range(at, end + 1), ("STRING", f'"{inner}"')
            case "FROM" if _is_import(tokens, at):
                file, _, method = tokens[at + 1 : at + 4]
                error = ("P013", "expected a statement, found `from`", f"write `use {method} from {file}`")
                repaired += [Token("USE", "use", token.span), method, token, file]
                skipped, replacement = range(at, at + 4), None
            case "QUESTION" if (end := _colon_of_choice(tokens, at)) is not None:
                error = ("P023", "there is no choice `… ? … : …`", NO_CHOICES)
                skipped, replacement = range(at, end + 1), ("PLUS", "+")
            case "LSQB" if at and tokens[at - 1].type == "AT" and (end := _closing(tokens, at)) is not None:
                error = ("P016", "a selector stands in no brackets", "`a | b` is both, `a - b` is `a` without `b`")
                repaired += _joined(tokens[at + 1 : end])
                skipped, replacement = range(at, end + 1), None
            case "STRAY":
                replacement = _LOOKALIKES.get(text)
                help_ = instead_of(text, replacement[1]) if replacement else None
                if text == ":":
                    help_, replacement = _colon(tokens, at, open_brackets[-1] if open_brackets else "")
                elif help_ is None:
                    help_ = _help(text[0], tokens, at)
                if isinstance(help_, Suggestion) and help_.new == "at":
                    replacement = ("AT", "at")
                if _LETTERS.keys() >= {*text}:
                    before = errors[-1].span if errors else None
                    if before is not None and before.end > token.span.start:  # an error for each word
                        continue
                    word = _word(tokens, at)
                    if before is not None and before.start >= word.span.start:
                        errors[-1] = _not_latin(word)
                        continue
                    if len(text) > 1:
                        errors.append(_not_latin(word))
                        continue
                error = ("P003", f"unknown character `{excerpt(text)}`", help_)
            case "OPEN_STRING":
                error = ("P004", "this string is never closed", _closed(text))
                replacement = ("STRING", f'{text}"')
            case "BAD_NUMBER":
                help_ = "a number is digits, at most one point and one of `%`, `K`, `M`, `B`; names begin with a letter"
                if is_number(corrected := text.replace("_", "").upper()):
                    help_ = instead_of(text, corrected)
                error = ("P005", f"`{excerpt(text)}` is not a number", help_)
                replacement = ("NUMBER", "1")
            case "LBRACE" | "LPAR" | "LSQB" if (end := _end_of_names(tokens, at)) is not None:
                error = ("P016", f"expected `.{{` before {_names(tokens[at + 1 : end])}", _BRACES)
                repaired += _braced(tokens[at : end + 1], [] if tokens[at - 1].type == "DOT" else ["DOT"])
                skipped, replacement = range(at, end + 1), None
            case _:
                repaired.append(token)
                if token.type in CLOSING:
                    open_brackets.append(token.type)
                elif token.type in CLOSING.values() and open_brackets:
                    open_brackets.pop()
                continue
        code, message, help_ = error
        span = token.span if at not in skipped or token.type == "LSQB" else token.span.until(tokens[skipped[-1]].span)
        errors.append(Diagnostic(code, message, span, help=help_))
        repaired += [Token(*replacement, token.span)] if replacement else []
    return repaired, errors
