"""Messages for syntax errors: rules in order, of which the first that applies decides.

tests/syntax/malformed.py has examples of each. A comment shows one where the rule does not.
"""

from peftc.diagnostics import Suggestion
from peftc.diagnostics.suggestions import instead_of, join_names, nearest
from peftc.syntax.errors.context import ASSIGNMENTS, BRACES, Error, ErrorContext, needs_version_2
from peftc.syntax.errors.lexical import IN_NAMES, NO_CHOICES
from peftc.syntax.errors.selector_rules import condition_error, selector_error
from peftc.syntax.lexer import CLOSING, excerpt, keywords, spelling

_OPEN = {"LBRACE": "`{`", BRACES: "`{`", "LPAR": "`(`", "LSQB": "`[`"}
_CLOSED_BY = {**CLOSING, BRACES: "RBRACE"}
_CLOSE = frozenset(CLOSING.values())
_TOP_LEVEL = ("form", "method", "use", "apply", "edit", "train", "expect", "let", "moved")
_NAMED = frozenset(
    {"EDIT", "TRAIN", "FORM", "METHOD", "LET", "USE", "APPLY", "AS", "DOT", "MOVED"}
)  # what precedes a name
_OPERAND_ENDS = frozenset({"NUMBER", "NAME", "RPAR"})

_COMMENT = "a comment begins with `#`"
_CASES = (
    "write an edit for each case, `edit NAME at layer[..3].attn.q`, or give a method the value; in version 2, "
    "`where layer < 4` chooses sites, and a list has a value for each layer"
)
_NAMES = {  # a statement whose name is missing, and an example
    "EDIT": "e.g. `edit ffn at layer[*].ffn { … }`",
    "TRAIN": "e.g. `train norms = [w, b] at layer[*].norm`",
    "USE": "name a method: `use NAME from std`",
    "APPLY": "e.g. `apply mam(r=16)`",
    "LET": "e.g. `let width = 8`",
    "METHOD": "e.g. `method mine(r = 8) { … }`",
    "FORM": "e.g. `form mine(x, r) { … }`",
}
_NO_STATEMENTS = {  # the token in the place of a statement, and what to write
    **dict.fromkeys(("SLASH", "STRING"), _COMMENT),
    "FROM": "a method is brought in by `use NAME from std`",
    "PER": "`per task` stands behind the selector: `edit NAME at SELECTOR per task { … }`",
}
_OTHER_STATEMENTS = {  # statements of Python and of other languages
    "import": "a method is brought in by `use NAME from std`",
    "freeze": "the base is frozen; `train NAME = [w, b] at SELECTOR` unfreezes weights",
    "assert": "a fact is required by `expect`",
    "def": "a method is `method NAME(r = 8) { … }`",
    "for": "an edit is at all sites of its selector: `layer[0..5].attn.q`",
    "if": "there are no branches; a method has parameters: `method NAME(r = 8) { … }`",
}
_BRANCH = "a condition stands behind each line that it is about: `f = … if r > 2`"
_NO_COMPARISONS = "max(x, 0) is `relu(x)`; a line of a form has a condition of numbers: `f = … if r > 2`"
_OF_PYTHON = {
    "else": "write a line for each case: `f = a if on` and `f = b if on == false`",
    "elif": "write a line for each case: `f = a if on` and `f = b if on == false`",
    "and": "write a line for each comparison: `require r >= 1` and `require r < d(x)`",
    "or": "a line has one comparison",
    "for": "`sum(i in n, A[i] @ x)` has a term for each i, `product(i in n, A[i])` a factor",
    "while": "`sum(i in n, A[i] @ x)` has a term for each i, `product(i in n, A[i])` a factor",
    "buffer": "what is never trained is `fixed A[r, d(x)] = kaiming`",
}
_PARAMETER = "a parameter is its name, its sizes and its first value: `param A[r, d(x)] = kaiming`"


def syntax_error(c: ErrorContext) -> Error:
    """The diagnostic of the unexpected token, and the token that it underlines."""
    rules = (
        *(_header, _branch, _brackets, _edit_head, condition_error, selector_error, _train_use_method, _expect),
        *(_assignment, _parameter, _expression, _statement),
    )
    message = c.expectation() if len(c.accepts) <= 4 else f"unexpected {c.unexpected} after {c.preceding}"
    return next((error for rule in rules if (error := rule(c))), c.error("P023", message))


def _header(c: ErrorContext) -> Error | None:
    if c.at == 0 and c.allows("PEFT"):
        label = "a spec begins with its language version"
        return c.error("P001", c.expectation("`peft 2`"), "write `peft 2` on the first line", label)
    expectation = c.expectation("the language version after `peft`")  # peft v1
    return c.error("P002", expectation, "versions are 1 and 2: write `peft 2`") if c.previous_type == "PEFT" else None


def _branch(c: ErrorContext) -> Error | None:
    """`if r > 2 { f = … }` in a form, which is skipped whole."""
    if c.branch is None:
        return None
    return c.error("P023", "a form has no branches", _BRANCH, at=c.branch)


def _brackets(c: ErrorContext) -> Error | None:
    if c.open_brackets and _is_unclosed(c):
        line = "" if c.type == "$END" else f" in line {c.token.span.line}"
        help_ = f"close it before {c.unexpected}{line}"
        if line and c.bracket == "LBRACE":
            help_ += "; an edit contains equations and `let`, no other statement"
        return c.error("P006", f"this {_OPEN[c.bracket]} is never closed", help_, "opened here", c.open_brackets[-1])
    if c.type in _CLOSE and not c.open_brackets:
        return c.error("P007", f"unmatched {c.unexpected}", "remove it")
    if c.type in _CLOSE and _CLOSED_BY[c.bracket] != c.type:
        closing = spelling(_CLOSED_BY[c.bracket])
        return c.error("P007", f"unmatched {c.unexpected}: {_OPEN[c.bracket]} is open", f"close it by {closing}")
    return None


def _is_unclosed(c: ErrorContext) -> bool:
    """Whether the token cannot stand inside of the innermost bracket."""
    is_range = c.type == "DOT" and c.previous_type == "DOT_DOT"  # layer[0...6]
    if c.type == "$END" or (c.bracket == "LSQB" and c.allows("RSQB") and c.type in {"DOT", "AT"} and not is_range):
        return True
    if c.bracket == BRACES:
        return c.type == "LBRACE" or c.starts_statement
    if c.bracket in {"LPAR", "LSQB"}:
        return c.type in {"LBRACE", "RBRACE"} or c.starts_statement
    in_edit = c.block is not None and c.block.type == "EDIT"
    return in_edit and c.allows("RBRACE") and c.starts_statement and c.type != "PEFT"


def _edit_head(c: ErrorContext) -> Error | None:
    """What stands before the selector: a name and `at`."""
    if c.allows_only("NAME") and c.previous_type in _NAMED:
        help_ = _NAMES.get(c.statement)
        if c.is_keyword and c.next.type != "NAME":
            help_ = f"`{c.token}` is a keyword; use another name, e.g. `{c.token}_1`"
        return c.error("P011", c.expectation(f"a name after {c.preceding}"), help_)
    if c.allows("AT") and c.statement in {"EDIT", "TRAIN"} and c.type not in _CLOSE:
        is_missing = c.type in {"LBRACE", "$END"} or c.starts_statement
        help_ = "e.g. `at layer[*].ffn`" if is_missing else "write `at` before the selector"
        help_ = IN_NAMES if c.type == "MINUS" else help_  # edit lora-qv
        label = "the selector is missing" if c.type == "LBRACE" else "`at` is missing"
        return c.error("P009", c.expectation("`at` and a selector"), help_, label)
    return None


def _train_use_method(c: ErrorContext) -> Error | None:
    in_list = any(c.allows_only(*terminals) for terminals in (("LSQB",), ("NAME",), ("COMMA", "RSQB")))
    if c.statement == "TRAIN" and (in_list or c.allows("EQUAL")):
        help_ = "`train NAME = [w, b] at SELECTOR` names the parameters of the base to train"
        return c.error("P021", c.expectation(), help_)
    in_use = c.statement == "USE" and (c.allows("FROM") or c.previous_type == "FROM")
    correction = c.quotes("FROM") if c.statement == "USE" else None
    if in_use or correction is not None:
        help_ = '`use NAME from std`, or from a file: `use NAME from "file.peft"`'
        if c.type == "COMMA":
            help_ = "write one `use` for each name"
        return c.error("P022", c.expectation(c.expected if in_use else "a statement"), help_, correction=correction)
    if c.statement == "MOVED":
        help_ = "`moved OLD -> NEW` names an edit, or FORM.PARAMETER; sites are `moved EDIT at OLD -> NEW`"
        return c.error("P023", c.expectation(), help_)
    if c.statement == "METHOD" and c.bracket == "LPAR" and c.allows_only("EQUAL"):
        help_ = f"give it a default, e.g. `{c.previous} = 8`: every method can be planned without arguments"
        if c.type in {"COMMA", "RPAR"}:
            return c.error("P019", f"the parameter {c.preceding} has no default", help_, at=c.previous)
        return c.error("P019", c.expectation(f"`=` after {c.preceding}"), help_)
    return None


def _expect(c: ErrorContext) -> Error | None:
    if c.statement != "EXPECT":
        return None
    if c.type == "NAME" and str(c.token) in {"and", "or"}:
        return c.error("P025", f"{c.unexpected} does not join facts", "write one `expect` for each fact")
    if c.type == "NAME" and str(c.previous) == "not":
        return c.error(
            "P025", "`not` is no part of an `expect`", f"write `expect {c.token}(…) == false`", at=c.previous
        )
    if c.type not in {"EQUAL", "COMPARISON"}:
        return None
    if c.type == "EQUAL" and c.next.type == "COMPARISON":  # =<
        return c.error("P025", "`=` is not a comparison", Suggestion(f"write `{c.next}=`", "=", ""))
    if c.type == "EQUAL":
        return c.error("P025", f"{c.unexpected} is not a comparison", Suggestion("write `==`", "=", "=="))
    if c.operand_missing:
        return c.error("P025", f"expected a fact before {c.unexpected}")
    return c.error("P025", "comparisons cannot be chained", "write one `expect` for each comparison")


def _assignment(c: ErrorContext) -> Error | None:
    if c.allows_only("EQUAL") or c.allows_only("AT", "DOT", "EQUAL"):  # let r += 4
        is_let = c.statement == "LET"
        help_ = "`let NAME = …` binds a value once, `let NAME at …` names sites" if is_let else "write `NAME = value`"
        return c.error("P012", c.expectation(f"`=` after {c.preceding}"), help_)
    if not c.allows_only(*ASSIGNMENTS):
        return None
    state = str(c.previous)
    in_form = c.block is not None and c.block.type == "FORM"
    keyword = nearest(state, ("let", "param", "fixed", "require", "save") if in_form else ("let",))
    if state == "return":
        help_ = "the value of a form is `f = …`" if in_form else "an equation assigns a state: `h = …`"
        return c.error("P013", "expected an equation, found `return`", help_, at=c.previous)
    if in_form and state in _OF_PYTHON:  # f = a if on else b
        return c.error("P013", f"expected a line of a form, found `{state}`", _OF_PYTHON[state], at=c.previous)
    if keyword is not None:  # lett g = …
        return c.error("P013", f"expected an equation, found {c.preceding}", instead_of(state, keyword), at=c.previous)
    if c.type == "LPAR" and c.at > 1 and c.tokens[c.at - 2].type in _OPERAND_ENDS:  # 4 lora(…)
        factor = c.tokens[c.at - 2]
        help_ = Suggestion("a product is written with `*`", state, f"* {state}", "unsafe")
        message = f"expected an operator between `{excerpt(str(factor))}` and {c.preceding}"
        return c.error("P023", message, help_, at=c.previous)
    if in_form and c.type == "LSQB":  # A[r, d(x)] = kaiming
        return c.error("P013", f"expected a line of a form, found {c.preceding}", _PARAMETER, at=c.previous)
    if c.type in {"MINUS", "SLASH"} and c.next.type == "EQUAL":  # h -= …
        alternative = f"{state} += -(…)" if c.type == "MINUS" else f"{state} *= 1 / (…)"
        help_ = f"there is no `{c.token}=`; write `{alternative}`"
    elif c.type in {"PLUS", "STAR"} and c.next.type == "EQUAL":  # h + = …
        help_ = f"write `{c.token}=` without a space"
    elif c.type == "COMPARISON":  # h == …, h <- …
        help_ = Suggestion("write `=`", str(c.token), "=") if str(c.token) == "==" else "write `=`"
    else:
        example = f"h += {state}(…)" if c.type == "LPAR" else f"{state} += …"
        help_ = f"an equation assigns a state: `{example}`"
    return c.error("P012", c.expectation(f"`=`, `+=` or `*=` after {c.preceding}"), help_)


def _parameter(c: ErrorContext) -> Error | None:
    """A `param` or `fixed` of a form: its sizes and its first value."""
    if c.allows("EQUAL") and c.allows("COMMON") and c.previous is not None:
        if c.type == "LPAR":  # param A(r, d(x)) = kaiming
            return c.error("P023", c.expectation("`[` or `=`"), _PARAMETER)
        return c.error("P023", f"the first value is missing after {c.preceding}", _PARAMETER, at=c.previous)
    return None


def _expression(c: ErrorContext) -> Error | None:
    """Numbers and operators that other languages write in another way."""
    number = c.next if c.next.type == "NUMBER" else None
    if c.type == "DOT" and number is not None and c.operand_missing:  # .5
        return c.error("P015", c.expectation("a number"), Suggestion(f"write `0.{number}`", ".", "0."))
    in_list = c.bracket in {"LPAR", "LSQB"}
    if c.type == "COMMA" and not in_list and c.previous_type == "NUMBER" and number is not None:  # 0,5
        return c.error(
            "P023", "a number has a point, not a comma", Suggestion(f"write `{c.previous}.{number}`", ",", ".")
        )
    if c.type == "COMMA" and c.statement == "EQUATION" and not in_list:
        return c.error("P023", f"unexpected `,` after {c.preceding}", "equations need no separator")
    if c.type == "DOUBLE_STAR" and c.allows("STAR"):
        return c.error("P023", "there is no power", _power(str(c.previous), str(c.next)))
    if c.type == "DOUBLE_STAR" and c.allows("RPAR"):
        return c.error("P015", c.expectation("an argument"), "each argument is written: `r=8`")
    if c.type == "QUESTION":
        return c.error("P023", f"unexpected `?` after {c.preceding}", f"`?` ends an arm of a selector; {NO_CHOICES}")
    if c.type == "EQUAL" and c.previous_type == "STRING" and c.bracket == "LPAR":
        name = str(c.previous).strip('"')
        help_ = Suggestion(f"the name of an argument has no quotes: `{name}=…`", str(c.previous), name)
        return c.error("P020", f"expected the name of an argument, found {c.preceding}", help_, at=c.previous)
    return None


def _power(base: str, exponent: str) -> str:
    """What to write for `base ** exponent`."""
    if base.isdecimal() and exponent.isdecimal() and int(base) < 100 and int(exponent) <= 16:
        return f"write the number: `{int(base) ** int(exponent)}`"
    return "write a product, `x * x`"


def _statement(c: ErrorContext) -> Error | None:
    """Arguments, statements in the wrong place, misspelled statements, missing operands."""
    is_condition = c.type == "IF" or str(c.token) in {"if", "else"}
    if is_condition and c.bracket in {"LPAR", "LSQB"} and c.allows("COMMA"):  # r=8 if …
        return c.error("P023", f"{c.unexpected} is no part of an argument", _CASES)
    if c.type == "COMPARISON" and c.bracket == "LPAR" and c.previous_type == "NAME" and str(c.token) == "==":  # r==8
        return c.error("P023", "an argument is given by `=`, found `==`", Suggestion("write `=`", "==", "="))
    if c.type == "COMPARISON" and c.allows("PLUS") and c.block is not None:  # (x > 0) * x
        return c.error("P023", f"a comparison is no value: unexpected {c.unexpected}", _NO_COMPARISONS)
    if c.type == "NAME" and str(c.token) in {"percent", "per"} and c.previous_type == "NUMBER":  # 2 percent
        return c.error(
            "P023", f"unexpected `{c.token}` after {c.preceding}", f"a percentage is written `{c.previous}%`"
        )
    starts_operand = c.type in {"NAME", "NUMBER", "STRING", "TRUE", "FALSE", "LPAR"}
    if starts_operand and c.allows("COMMA") and c.bracket in {"LPAR", "LSQB"}:
        return c.error("P008", f"expected `,` before {c.unexpected}", "arguments are separated by commas")
    if c.allows("EDIT") and c.type == "NAME" and c.next.type in ASSIGNMENTS:  # h += … at the top of a file
        help_ = "move it into one: `edit NAME at SELECTOR { … }`"
        if c.next.type == "EQUAL":
            help_ = f"a constant is bound by `let {c.token} = …`; an equation stands in an edit"
        return c.error("P014", f"the equation of {c.unexpected} stands outside an edit", help_)
    in_block = c.allows("EDIT") or c.allows("RBRACE")
    if c.type == "PEFT" and in_block:
        return c.error("P014", "`peft` stands only once, at the top of a file", "remove it")
    if c.starts_statement and in_block:  # method m() { use mam from std }
        help_ = "move it out of the method, or add the missing `}` above"
        return c.error("P014", f"{c.unexpected} cannot stand in a method", help_)
    if c.allows("EDIT") and c.type == "SLASH" and c.next.type in {"SLASH", "STAR", "DOUBLE_STAR"}:
        comment = c.with_next()
        return c.error("P013", f"`{comment}` begins no comment", _COMMENT, at=comment)
    if c.allows("EDIT") and c.bracket in {"", "LBRACE"} and c.type in _NO_STATEMENTS:
        return c.error("P013", c.expectation("a statement"), _NO_STATEMENTS[c.type])
    if c.allows("EDIT") and c.type == "NAME" and c.next.type == "LPAR":  # mam(r = 16)
        help_ = Suggestion(f"a method is applied: `apply {c.token}(…)`", str(c.token), f"apply {c.token}", "unsafe")
        return c.error("P013", c.expectation("a statement"), help_)
    if c.allows("EDIT") and c.type == "NAME" and c.bracket in {"", "LBRACE"}:  # edti a at …
        words = [text for terminal, text in keywords().items() if terminal in c.accepts and text in _TOP_LEVEL]
        if str(c.token) in (keywords()["FORM"], keywords()["MOVED"]):  # in version 1, where they are names
            return needs_version_2(c)
        suggestion = nearest(str(c.token), words)
        help_ = (
            instead_of(str(c.token), suggestion) if suggestion else f"statements begin with {join_names(words, 'or')}"
        )
        if (other := _OTHER_STATEMENTS.get(str(c.token))) is not None:
            help_ = other
        return c.error("P013", c.expectation("a statement"), help_)
    if c.operand_missing and c.type == "SLASH" and c.previous_type == "SLASH":  # a // b
        return c.error("P015", c.expectation("an expression"), "a quotient is rounded down by `floor(a / b)`")
    if c.operand_missing:
        wanted = "an argument" if c.allows("RPAR") else "an expression"
        help_ = "e.g. `lora(x, r=8)`" if c.statement == "EQUATION" and not c.open_brackets[1:] else "write a value"
        if c.is_keyword and not c.starts_statement:
            help_ = f"`{c.token}` is a keyword"
        return c.error("P015", c.expectation(f"{wanted} after {c.preceding}"), help_)
    return None
