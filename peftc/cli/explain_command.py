"""The command `explain`, which reads the explanations of codes and the rows of forms."""

import re
from argparse import Namespace
from collections.abc import Mapping

from peftc.cli.output import report_error
from peftc.cli.spec_files import Unusable, display_path, read
from peftc.diagnostics import PeftcError
from peftc.diagnostics.codes import CODES
from peftc.diagnostics.suggestions import did_you_mean
from peftc.equations.table import FORMS, form_errors, forms_of
from peftc.forms.form import Form
from peftc.semantics.form_facts import form_lines
from peftc.syntax import ast
from peftc.syntax.parser import parse_text


def run_explain(args: Namespace) -> int:
    if args.code is None:
        print("\n".join(f"{code}  {info.title}" for code, info in sorted(CODES.items())))
        return 0
    if re.fullmatch(r"[Pp]\d+", args.code) and args.spec is None:
        return _explain_code(args.code)
    try:
        forms = FORMS if args.spec is None else _forms(parse_text(read(args.spec), display_path(args.spec)))
    except PeftcError as error:
        return report_error(error, args)
    if args.code not in forms:
        known = (*forms, *CODES)
        help_ = did_you_mean(args.code, known) or "`peftc explain` lists all codes, docs/forms.md has all forms"
        raise Unusable(f"there is no form and no code {args.code}; {help_}")
    print("\n".join(form_lines(forms[args.code])))
    return 0


def _forms(spec: ast.Spec) -> Mapping[str, Form]:
    """The forms of a spec. Raises: PeftcError for errors in their texts."""
    if errors := [error.with_source(spec.source) for error in form_errors(spec)]:
        raise PeftcError(errors)
    return forms_of(spec)


def _explain_code(word: str) -> int:
    code = word.upper()
    if code not in CODES:
        help_ = did_you_mean(code, CODES) or "`peftc explain` lists all codes"
        raise Unusable(f"there is no code {word}; {help_}")
    print(f"{code}: {CODES[code].title}\n\n{CODES[code].explanation.rstrip()}")
    return 0
