"""Checks of a form that need no place."""

from peftc.equations.checks.form import check_form, check_forms

__all__ = ["check_form", "check_forms"]
