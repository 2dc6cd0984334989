"""The page of forms and recipes, `docs/forms.md`: made of the rows of the forms and the texts of the recipes.

python -m peftc.manual > docs/forms.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from peftc import resources
from peftc.forms import FORMS, Form, Param
from peftc.semantics.arguments import interval, signature
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.print_expressions import expression

HEAD = """# Forms and recipes

This page is made of the registry and of `specs/` by `make docs`; a test compares. `h`, `x` and the other states are those of the
site at which a form stands. Counts are exact: `peftc plan` prints them for a model.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD, "## Forms\n"]
    parts += [form_section(FORMS[name]) for name in sorted(FORMS)]
    parts += ["## Recipes\n", "`use NAME from std`, then `apply NAME(…)`; or `peftc plan specs/NAME.peft --model …`.\n"]
    parts += [recipe_section(name, path) for name, path in sorted(resources.recipes().items())]
    return "\n".join(parts)


def form_section(form: Form) -> str:
    """One form: how it is called, its equation, its arguments, its paper."""
    lines = [f"### `{form.name}`", "", f"    {signature(form)}", "", f"{form.equation}", ""]
    lines += ["| argument | | default |", "|---|---|---|", *map(argument_row, form.params), ""]
    if form.common_count is not None:
        lines += ["All sites of the edit have a part in common.", ""]
    return "\n".join([*lines, f"Source: {form.paper}", ""])


def argument_row(param: Param) -> str:
    """`| r | width of the bottleneck; at least 1 | |`"""
    said = [param.doc]
    if param.choices:
        said.append(" or ".join(f"`{choice}{'(…)' if param.type == 'call' else ''}`" for choice in param.choices))
    elif param.low is not None or param.high is not None:
        said.append(interval(param))
    return f"| `{param.name}` | {'; '.join(said)} | {default_of(param)} |"


def default_of(param: Param) -> str:
    if param.required:
        return "required"
    if param.default is None:
        return ""
    return f"`{str(param.default).lower()}`" if isinstance(param.default, bool) else f"`{param.default}`"


def recipe_section(name: str, path: Path) -> str:
    """One recipe: what its file says of it, and the parameters of its method."""
    text = path.read_text(encoding="utf-8")
    method = next(s for s in parse_text(text, str(path)).statements if isinstance(s, ast.Method))
    parameters = ", ".join(f"{p.name} = {expression(p.default)}" for p in method.params)
    return "\n".join([f"### `{name}`", "", *comment_of(text), "", f"`method {method.name}({parameters})`", ""])


def comment_of(text: str) -> Iterator[str]:
    """The comment at the head of a file, which says what the recipe is and where it comes from."""
    for line in text.splitlines()[1:]:
        if line.startswith("#"):
            yield line.removeprefix("#").strip()
        elif line.strip():
            return


if __name__ == "__main__":
    print(page(), end="")
