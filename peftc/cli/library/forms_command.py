"""The command `forms`."""

import json
import re
from argparse import Namespace
from typing import Any

from peftc.cli.console import show
from peftc.cli.library.lists import render_list
from peftc.cli.spec_files import Unusable
from peftc.diagnostics.suggestions import did_you_mean
from peftc.equations.table import FORMS
from peftc.forms.form import Form
from peftc.semantics.arguments import signature
from peftc.semantics.form_facts import facts_of, form_lines


def run_forms(args: Namespace) -> int:
    """Lists forms, or prints one as `explain` does."""
    if args.name is not None and args.name not in FORMS:
        raise Unusable(f"there is no form `{args.name}`; {did_you_mean(args.name, FORMS) or '`peftc forms` lists all'}")
    if args.name is not None and not args.json:
        print("\n".join(form_lines(FORMS[args.name])))
        return 0
    chosen = [FORMS[name] for name in ([args.name] if args.name else FORMS)]
    if args.json:
        print(json.dumps([form_data(form) for form in chosen], indent=2, ensure_ascii=False))
    else:
        rows = [(form.name, _folds(form), _plain(form.paper)) for form in chosen]
        show(lambda width: render_list(("form", "folds", "what it is, and its paper"), rows, width))
    return 0


def form_data(form: Form) -> dict[str, Any]:
    """A form as `--json` prints it."""
    return {
        "name": form.name,
        "signature": signature(form),
        "text": form.text,
        "equation": form.equation,
        "paper": form.paper,
        "arguments": [{"name": one.name, "doc": one.doc, "choices": list(one.choices)} for one in form.arguments],
        "facts": {name: _plain(fact) for name, fact in facts_of(form).items()},
    }


def _folds(form: Form) -> str:
    return "yes" if facts_of(form).get("Folds", "").startswith("yes") else "no"


def _plain(text: str) -> str:
    return re.sub("`", "", text)
