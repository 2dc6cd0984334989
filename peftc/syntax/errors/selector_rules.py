"""Messages for syntax errors in selectors and in conditions on sites."""

from peftc.diagnostics import Suggestion
from peftc.diagnostics.suggestions import nearest
from peftc.syntax.errors.context import ASSIGNMENTS, BRACES, Error, ErrorContext, needs_version_2
from peftc.syntax.vocabulary import SITES

_JOINS = "`a | b` is both, `a - b` is `a` without `b`"
_ALTERNATIVES = "several names stand in braces behind a `.`: `layer[*].attn.{q, v}`"
_BODIES = {
    "EDIT": "write the equation in braces: `{ h += … }`",
    "METHOD": "write the statements in braces: `method NAME(r = 8) { edit … }`",
    "FORM": "write the lines in braces: `form NAME(x, r) { … }`",
}
_SELECTORS = {  # the token in the place of a selector or a site, and what to write
    "STAR": "`**` is every module below; a pattern on module names stands in quotes",
    "SLASH": 'a pattern stands in quotes: `*` is a part of a name, `**` any parts: `"**.q_proj"`',
    **dict.fromkeys(("LBRACE", "LPAR", "LSQB"), _ALTERNATIVES),
}
_WITH_SELECTOR = frozenset({"EDIT", "TRAIN", "APPLY", "LET"})
_LONGEST_CONDITION = 100  # in words, for messages


def condition_error(c: ErrorContext) -> Error | None:
    """`where d(x) >= 1024` before the body of an edit, or behind the sites of `train`."""
    head = range(c.at - 1, max(c.at - _LONGEST_CONDITION, -1), -1)
    first = next((i for i in head if c.tokens[i].type in {"WHERE", "AT"}), -1)
    if c.statement not in {"EDIT", "TRAIN"} or first < 0 or c.tokens[first].type == "AT":
        return None
    if str(c.token) in {"and", "or"}:
        help_ = "write one `where` for each condition, all of which hold: `where d(x) >= 1024 where layer < 6`"
        return c.error("P025", f"{c.unexpected} does not join conditions", help_)
    if c.type == "EQUAL":
        return c.error("P025", f"{c.unexpected} is not a comparison", Suggestion("write `==`", "=", "=="))
    if c.type == "COMPARISON" and not c.operand_missing:
        return c.error("P025", "comparisons cannot be chained", "write one `where` for each comparison")
    if c.allows("COMPARISON") and c.bracket in {"", "LBRACE"} and c.type in {"LBRACE", "PER", "WHERE"}:
        return c.error("P025", c.expectation("a comparison"), "e.g. `where d(x) >= 1024`")
    return None


def selector_error(c: ErrorContext) -> Error | None:
    """A selector, its indices, and the brace behind it."""
    if c.bracket == BRACES:
        return _in_braces(c)
    if c.type == "QUESTION" and c.statement in _WITH_SELECTOR:
        help_ = "`?` ends one path or pattern, which may match nothing: `layer[*].ffn.gate?`"
        return c.error("P016", f"unexpected `?` after {c.preceding}", help_)
    if c.statement == "LET" and c.type == "LBRACE" and c.allows("BAR"):  # let a at layer[*].ffn { … }
        help_ = "`let NAME at SELECTOR` is a name for sites; an equation stands in `edit NAME at SELECTOR { … }`"
        return c.error("P016", f"unexpected `{{` after {c.preceding}", help_)
    if c.previous_type == "QUESTION" and c.type in {"DOT", "LSQB"} and c.statement in _WITH_SELECTOR:
        return c.error("P016", f"`?` ends an arm of a selector, found {c.unexpected} behind it", "write it at the end")
    is_joined = c.bracket != "LPAR" and c.allows("DOT", "BAR")
    if is_joined and c.type == "NAME" and c.previous_type == "RSQB":  # layer[*]ffn
        return c.error("P016", f"expected `.` before {c.unexpected}")
    in_head = c.statement in {"EDIT", "TRAIN", "APPLY"}
    if in_head and c.allows("BAR", "MINUS") and (c.type in {"COMMA", "PLUS"} or str(c.token) in {"and", "or"}):
        return c.error("P016", f"{c.unexpected} does not join selectors", _JOINS)
    if in_head and c.previous is not None and str(c.previous) in {"not", "all"} and c.type == "NAME":
        return c.error("P016", f"{c.preceding} is no part of a selector", _JOINS, at=c.previous)
    if in_head and c.allows("DOT", "LSQB") and c.type == "LPAR" and c.next.type in {"NUMBER", "STAR"}:  # layer(0)
        return c.error("P016", c.expectation("`[`"), f"an index stands in brackets: `{c.previous}[{c.next}]`")
    if in_head and c.allows("DOT") and c.type == "SLASH":  # layer[*]/attn
        return c.error("P016", c.expectation("`.`"), Suggestion("names are joined by `.`", "/", "."))
    if c.allows("LBRACE") and c.previous_type != "DOT" and c.statement in _BODIES and c.bracket in {"", "LBRACE"}:
        if str(c.token) == "where" and c.type == "NAME":  # in version 1, where it is a name
            return needs_version_2(c)
        label = f"the body of the {c.statement.lower()} stands in braces"
        is_scope = c.statement == "EDIT" and str(c.token).startswith("per")  # pertask
        help_ = "write `per task`" if is_scope else _BODIES[c.statement]
        return c.error("P010", c.expectation("`{`"), help_, label)
    if c.previous_type == "DOT" and c.type == "STAR" and c.allows("DOUBLE_STAR"):  # layer.*.attn
        owner = nearest(str(c.tokens[c.at - 2]), ("layer", "experts"))
        help_ = f"all of them are `{owner}[*]`, one is `{owner}[0]`; " if owner else ""
        help_ += "every module below is `**`, and a pattern on module names stands in quotes"
        quotes = None if owner else c.quotes("AT")
        return c.error("P016", c.expectation(f"a site after {c.preceding}"), help_, correction=quotes)
    if c.allows("DOUBLE_STAR") and (c.allows("STRING") or c.previous_type == "DOT"):  # at { … }; layer.*
        help_ = _SELECTORS.get(c.type, "`layer[*].attn.q` is the query projection of each layer")
        if c.is_keyword and c.next.type != "NAME":
            help_ = f"`{c.token}` is a keyword"
        elif c.type == "BAR":
            help_ = Suggestion("one `|` joins selectors", "|", "")
        elif c.type == "LBRACE" and not c.is_list_of_names:
            help_ = "name the sites: `at layer[*].ffn { h += … }`"
        elif c.type == "NUMBER":
            help_ = f"an index stands in brackets: `layer[{c.token}]`"
        elif c.previous_type == "MINUS" and c.type == "COMPARISON":  # at layer[*] -> …
            help_ = _BODIES["EDIT"]
        wanted = "a selector" if c.allows("STRING") else "a site"
        is_module = c.type == "NUMBER" and c.at > 1 and str(c.tokens[c.at - 2]) not in SITES  # model.layers.0.mlp
        correction = c.quotes("AT") if c.type == "STAR" or is_module else None
        if is_module and correction is not None:
            help_ = f"the name of a module stands in quotes: {correction.replacements[0].text}"
        return c.error("P016", c.expectation(f"{wanted} after {c.preceding}"), help_, correction=correction)
    if c.bracket == "LSQB" and c.statement in {"EDIT", "TRAIN", "APPLY", "MOVED"}:
        after_index = c.allows("RSQB") and c.previous_type in {"STAR", "NUMBER"}
        if after_index or c.allows("DOT_DOT") or c.previous_type in {"MINUS", "DOT_DOT"}:
            if c.type == "DOT" and c.previous_type == "DOT_DOT":  # layer[0...3]
                dots = c.with_previous()
                help_ = Suggestion("write `..`", str(dots), "..")
                return c.error("P017", f"a range has two points, found `{dots}`", help_, at=dots)
            help_ = "`3` is an index, `-1` the last, `*` all, `0..5` a range with both ends, `0, 2` two of them"
            return c.error("P017", c.expectation("an index" if c.allows("STAR") else c.expected), help_)
    return None


def _in_braces(c: ErrorContext) -> Error:
    """In `attn.{q, v}`."""
    if c.type in ASSIGNMENTS:  # layer[*]. { h += … }
        help_, brace = "name a site, or leave out the `.`", c.open_brackets[-1]
        return c.error("P016", "expected a site after `.`, found `{`", help_, at=brace)
    if not c.allows("COMMA"):
        return c.error("P016", c.expectation("a site"), _ALTERNATIVES)
    if c.type == "RBRACE":
        help_ = "leave the braces out, or write several names: `{q, v}`"
        return c.error("P016", "braces are for several names", help_, at=c.open_brackets[-1])
    if c.type == "BAR" or str(c.token) in {"and", "or"}:
        return c.error(
            "P016", f"{c.unexpected} does not join names in braces", Suggestion("write `,`", str(c.token), ",")
        )
    return c.error("P008", f"expected `,` before {c.unexpected}", "names in braces are separated by commas")
