"""Named groups of sites: `let attn_qv at layer[*].attn.{q, v}`, then `edit qv at attn_qv { … }`."""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean
from peftc.syntax import ast
from peftc.syntax.vocabulary import SITES, STACK_CHOICES, STACKS, TOWERS
from peftc.syntax.walk import spell_out, united

Groups = Mapping[str, ast.Selector]
_RESERVED = frozenset({*SITES, *STACKS, *TOWERS, *STACK_CHOICES})


def expand_selectors(statement: ast.Statement, groups: Groups) -> ast.Statement:
    """A statement whose selector has paths and patterns alone. Raises: PeftcError P208."""
    match statement:
        case ast.Edit(selector=selector) | ast.Train(selector=selector) | ast.SiteGroup(selector=selector):
            return replace(statement, selector=expand_selector(selector, groups))
        case ast.Apply(at=at) if at is not None:
            return replace(statement, at=expand_selector(at, groups))
        case _:
            return statement


def expand_selector(selector: ast.Selector, groups: Groups) -> ast.Selector:
    """A selector with braces spelled out, and with the sites of groups in place of their names.

    Raises: PeftcError P208 for steps behind or in front of a group, and for a misspelled group.
    """
    selector = spell_out(selector)
    match selector:
        case ast.Path() if groups:
            return _of_group(selector, groups)
        case ast.Union(parts):
            return replace(selector, arms=tuple(arm for part in parts for arm in united(expand_selector(part, groups))))
        case ast.Difference(left, right):
            return replace(selector, left=expand_selector(left, groups), right=expand_selector(right, groups))
        case _:
            return selector


def _of_group(path: ast.Path, groups: Groups) -> ast.Selector:
    first, *_ = path.steps
    for step in path.steps:
        if step.name in groups and (len(path.steps) > 1 or step.indices is not None):
            help_ = "name its sites in the group, or write the path in full"
            message = f"`{step.name}` is a group of sites, which stands alone"
            raise PeftcError(Diagnostic("P208", message, step.span, help=help_))
    name = first.name
    if name in groups:
        return _optional(groups[name]) if path.optional else groups[name]
    if len(path.steps) == 1 and name not in _RESERVED and (help_ := did_you_mean(name, groups)) is not None:
        raise PeftcError(Diagnostic("P208", f"there is no site and no group `{name}`", first.span, help=help_))
    return path


def _optional(selector: ast.Selector) -> ast.Selector:
    """A selector of which every arm may match nothing."""
    match selector:
        case ast.Union(parts):
            return replace(selector, arms=tuple(map(_optional, parts)))
        case ast.Difference(left, right):
            return replace(selector, left=_optional(left), right=_optional(right))
        case _:
            return replace(selector, optional=True)


def bind_group(group: ast.SiteGroup, groups: MutableMapping[str, ast.Selector], others: Iterable[str] = ()) -> None:
    """Adds a group to those that are bound above it, as paths and patterns.

    Raises: PeftcError P121 for the name of a site, P111 for a name that is bound already, P208.
    """
    name = group.name
    if name in _RESERVED:
        message = f"`{name}` is the name of a site of models"
        raise PeftcError(Diagnostic("P121", message, group.name_span, help="use another name"))
    if name in groups or name in others:
        raise PeftcError(Diagnostic("P111", f"`{name}` is bound twice", group.name_span, help="use another name"))
    groups[name] = expand_selector(group.selector, groups)
