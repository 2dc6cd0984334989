"""The formatter behind `peftc fmt`: AST to text in one layout, with the fewest parentheses.

Laws (tests/syntax): parse(print(s)) == s, print(parse(print(s))) == print(s), and the output
contains every comment exactly once.
"""

from collections.abc import Iterator, Sequence

from peftc.syntax import ast

_SUM, _PRODUCT, _FACTOR, _MATRIX_PRODUCT, _OPERAND = 1, 2, 3, 4, 5
_PRECEDENCE = {"+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT, "@": _MATRIX_PRODUCT}
WIDTH = 100
_INDENT = "    "


def print_expression(value: ast.Expr, precedence: int = 0) -> str:
    """`value` where an operand of at least `precedence` is expected: 0 is anything."""
    match value:
        case ast.Number(amount, unit):
            return f"{amount!r}{unit}"
        case ast.Boolean(truth):
            return "true" if truth else "false"
        case ast.Name(name):
            return name
        case ast.String(text):
            return f'"{text}"'
        case ast.Call(function, args, kwargs):
            named = (f"{keyword.name}={print_expression(keyword.value)}" for keyword in kwargs)
            return f"{function}({', '.join([*map(print_expression, args), *named])})"
        case ast.Negative(operand):
            text = f"-{print_expression(operand, _FACTOR)}"
            return f"({text})" if precedence > _FACTOR else text
        case ast.List(items):
            return f"[{_print_all(items)}]"
        case ast.Pair(first, second):
            return f"({_print_all((first, second))})"
        case ast.Item(owner, indices):
            return f"{print_expression(owner, _OPERAND)}[{_print_all(indices)}]"
        case ast.Binding(name, count):
            return f"{name} in {print_expression(count)}"
        case ast.Attribute(owner, name):
            text = print_expression(owner, _OPERAND)
            is_group = text[0] == "(" and not isinstance(owner, ast.Pair)
            return f"{text}.{name}" if isinstance(owner, ast.Call | ast.Item) or is_group else f"({text}).{name}"
        case ast.Binary("@", left, right):  # from the right
            text = f"{print_expression(left, _OPERAND)} @ {print_expression(right, _MATRIX_PRODUCT)}"
            return f"({text})" if precedence > _MATRIX_PRODUCT else text
        case ast.Binary(op, left, right):
            own = _PRECEDENCE[op]
            text = f"{print_expression(left, own)} {op} {print_expression(right, own + 1)}"
            return f"({text})" if own < precedence else text


def _print_all(values: Sequence[ast.Expr]) -> str:
    return ", ".join(map(print_expression, values))


def print_selector(value: ast.Selector, nested: bool = False) -> str:
    """`value`; if `nested` in another selector, a union or difference stands in parentheses."""
    match value:
        case ast.Path(steps, optional) | ast.BracedPath(steps, optional):
            return ".".join(map(print_step, steps)) + "?" * optional
        case ast.Glob(pattern, optional):
            return f'"{pattern}"' + "?" * optional
        case ast.Union(arms):
            text = " | ".join(print_selector(arm, nested=True) for arm in arms)
        case ast.Difference(left, right):
            first = print_selector(left, nested=not isinstance(left, ast.Difference))
            text = f"{first} - {print_selector(right, nested=True)}"
    return f"({text})" if nested else text


def print_step(value: ast.Step | ast.Braces) -> str:
    """`layer[0, 3..5]`, `{q, v}`"""
    if isinstance(value, ast.Braces):
        return f"{{{', '.join(map(print_selector, value.paths))}}}"
    return value.name if value.indices is None else f"{value.name}[{', '.join(map(print_index, value.indices))}]"


def print_index(value: ast.Index) -> str:
    """`*`, `3`, `0..5`, `6..`, `..5`"""
    if value.start is None and value.stop is None:
        return "*"
    if value.start == value.stop:
        return str(value.start)
    start, stop = ("" if end is None else str(end) for end in (value.start, value.stop))
    return f"{start}..{stop}"


def print_spec(spec: ast.Spec) -> str:
    """The canonical text of `spec` with its comments, ending in a newline."""
    lines = [*spec.header, _with_comment(f"peft {spec.version}", spec.header_trailing)]
    previous: ast.Statement | None = None
    for statement in spec.statements:
        if isinstance(statement, ast.Form) and statement.built_in:
            continue
        between_methods = isinstance(previous, ast.Method | ast.Form) or isinstance(statement, ast.Method | ast.Form)
        if previous is None or between_methods or statement.leading[:1] == ("",):
            lines.append("")
        lines += _statement(statement, "")
        previous = statement
    if spec.closing:
        lines += ["", *_without_extra_blanks(spec.closing)]
    return "\n".join(lines) + "\n"


def print_statement(statement: ast.Statement) -> str:
    """One statement as `print_spec` prints it."""
    return "\n".join(_statement(statement, ""))


def _statement(statement: ast.Statement, indent: str) -> list[str]:
    match statement:
        case ast.Method():
            lines = _method(statement, WIDTH - len(indent))
        case ast.Form():
            lines = _form(statement, WIDTH - len(indent))
        case ast.Edit():
            lines = _edit(statement, WIDTH - len(indent))
        case _:
            lines = [_with_comment(print_line(statement), statement.trailing)]
    return _indented([*_without_extra_blanks(statement.leading), *lines], indent)


def _indented(lines: Sequence[str], indent: str) -> list[str]:
    return [indent + line if line else "" for line in lines]


def _without_extra_blanks(comments: Sequence[str]) -> list[str]:
    """`comments` without blank lines at the start, and with single blank lines between."""
    return [line for number, line in enumerate(comments) if line or (number and comments[number - 1])]


def _trimmed(comments: Sequence[str]) -> list[str]:
    """As `_without_extra_blanks`, without a blank line at the end."""
    lines = _without_extra_blanks(comments)
    return lines[:-1] if lines and not lines[-1] else lines


def _with_comment(line: str, comment: str | None) -> str:
    return f"{line}  {comment}" if comment else line


def print_line(statement: ast.Statement) -> str:
    """The text of a statement of one line, without comments."""
    match statement:
        case ast.Equation(target, op, value, condition):
            return f"{target} {op} {print_expression(value)}{_condition(condition)}"
        case ast.Let(name, value, condition):
            return f"let {name} = {print_expression(value)}{_condition(condition)}"
        case ast.SiteGroup(name, selector):
            return f"let {name} at {print_selector(selector)}"
        case ast.Require(left, op, right, condition):
            return f"require {print_expression(left)} {op} {print_expression(right)}{_condition(condition)}"
        case ast.Save(call, condition):
            return f"save {print_expression(call)}{_condition(condition)}"
        case ast.Parameter():
            return _parameter(statement)
        case ast.Train(name, states, at):
            return f"train {name} = [{', '.join(states)}] at {print_selector(at)}{print_where(statement)}"
        case ast.Expect(left, op, right):
            comparison = f" {op} {print_expression(right)}" if right is not None else ""
            return f"expect {print_expression(left)}{comparison}"
        case ast.Moved(old, new, None):
            return f"moved {old} -> {new}"
        case ast.Moved(old, _, ast.Path() as at, ast.Path() as to):
            return f"moved {old} at {print_selector(at)} -> {print_selector(to)}"
        case ast.Use(name, source):
            return f"use {name} from " + ("std" if source is None else f'"{source}"')
        case ast.Apply(name, args, at, alias):
            arguments = ", ".join(f"{arg.name}={print_expression(arg.value)}" for arg in args)
            selector = "" if at is None else f" at {print_selector(at)}"
            return f"apply {name}({arguments}){selector}" + (f" as {alias}" if alias else "")
        case _:
            raise TypeError(f"not a statement of one line: {type(statement).__name__}")


def _parameter(parameter: ast.Parameter) -> str:
    sizes = f"[{_print_all(parameter.sizes)}]" if parameter.sizes else ""
    scope = (f" per {parameter.scope}" if parameter.scope else "") + (" common" if parameter.common else "")
    kind = "fixed" if parameter.fixed else "param"
    condition = _condition(parameter.condition)
    return f"{kind} {parameter.name}{sizes}{scope} = {print_expression(parameter.value)}{condition}"


def _condition(condition: ast.Condition | None) -> str:
    if condition is None:
        return ""
    right = "" if condition.right is None else f" {condition.op} {print_expression(condition.right)}"
    return f" if {print_expression(condition.left)}{right}"


def print_where(statement: ast.Edit | ast.Train) -> str:
    """` where d(x) >= 1024`; empty without conditions."""
    texts = (_condition(condition).removeprefix(" if ") for condition in statement.where)
    return "".join(f" where {text}" for text in texts)


def _form(form: ast.Form, width: int) -> list[str]:
    params = [p.name if p.default is None else f"{p.name} = {print_expression(p.default)}" for p in form.params]
    return [*_head(f"form {form.name}", form, params, width), *_block(form.body, form.closing)]


def _head(start: str, block: ast.Method | ast.Form, params: Sequence[str], width: int) -> list[str]:
    """The first line of a method or form, or one for each parameter if these have comments."""
    lines = [_with_comment(f"{start}({', '.join(params)}) {{", block.trailing)]
    if len(lines[0]) > width or any(param.leading or param.trailing for param in block.params):
        lines = [f"{start}("]
        for param, text in zip(block.params, params, strict=True):
            lines += _indented(_trimmed(param.leading), _INDENT)
            lines.append(_with_comment(f"{_INDENT}{text},", param.trailing))
        lines.append(_with_comment(") {", block.trailing))
    return lines


def _edit(edit: ast.Edit, width: int) -> list[str]:
    """On one line if it has at most one equation, no comments inside, and fits."""
    tail = print_where(edit) + (" per task" if edit.per_task else "")
    head = f"edit {edit.name} at {print_selector(edit.selector)}{tail}"
    if len(edit.body) <= 1 and not edit.closing and not any(line.leading or line.trailing for line in edit.body):
        body = "".join(f"{print_line(line)} " for line in edit.body)
        whole = _with_comment(f"{head} {{ {body}}}", edit.trailing)
        if len(whole) <= width:
            return [whole]
    heads = [_with_comment(f"{head} {{", edit.trailing)]
    if len(heads[0]) > width and isinstance(edit.selector, ast.Union):  # one line for each arm
        first, *others = (print_selector(arm, nested=True) for arm in edit.selector.arms)
        heads = [f"edit {edit.name} at {first}", *(f"{_INDENT}| {arm}" for arm in others)]
        heads[-1] = _with_comment(f"{heads[-1]}{tail} {{", edit.trailing)
    return [*heads, *_block(edit.body, edit.closing)]


def _block(body: Sequence[ast.Statement], closing: Sequence[str]) -> Iterator[str]:
    """The statements of a block, its last comments, and its closing brace."""
    for number, statement in enumerate(body):
        if number and statement.leading[:1] == ("",):
            yield ""
        yield from _statement(statement, _INDENT)
    if body and closing[:1] == ("",):
        yield ""
    yield from _indented(_trimmed(closing), _INDENT)
    yield "}"


def _method(method: ast.Method, width: int) -> list[str]:
    params = [f"{param.name} = {print_expression(param.default)}" for param in method.params]
    lines = _head(f"method {method.name}", method, params, width)
    if not method.body and not method.closing and not method.trailing:
        return [*lines[:-1], f"{lines[-1]} }}"]
    return [*lines, *_block(method.body, method.closing)]
