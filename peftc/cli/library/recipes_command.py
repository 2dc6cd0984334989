"""The command `recipes`."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from peftc.cli.console import show
from peftc.cli.library.lists import render_list
from peftc.cli.spec_files import Unusable
from peftc.diagnostics.suggestions import did_you_mean
from peftc.semantics.recipes import Recipe, recipes


def run_recipes(args: Namespace) -> int:
    """Lists recipes, or prints one; with models also what they cost. Raises: as `run_plan`."""
    chosen = [recipe_of(name) for name in args.names] or [one for _, one in sorted(recipes().items())]
    if args.json and not args.model:
        print(json.dumps([recipe_data(one) for one in chosen], indent=2, ensure_ascii=False))
        return 0
    if len(args.names) == 1 and not args.json:
        sys.stdout.write(chosen[0].text)
    elif not args.json and not args.model:
        show(lambda width: render_list(("recipe", "paper", "edits", "what it is"), _rows(chosen), width))
    return _costs(args, chosen) if args.model else 0


def recipe_of(name: str) -> Recipe:
    """A recipe by its name or that of its file. Raises: Unusable."""
    recipe = recipes().get(name.replace("-", "_"))
    if recipe is None:
        help_ = did_you_mean(name, recipes()) or "`peftc recipes` lists all"
        raise Unusable(f"there is no recipe `{name}`; {help_}")
    return recipe


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """A recipe as `--json` prints it."""
    authors, title, number = recipe.paper
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "authors": authors,
        "title": title,
        "arxiv": number,
        "parameters": recipe.parameters,
        "edits": recipe.places,
        "text": recipe.text,
    }


def _rows(chosen: Sequence[Recipe]) -> list[tuple[str, ...]]:
    return [(one.name, one.paper[0], ", ".join(one.places), one.summary) for one in chosen]


def _costs(args: Namespace, chosen: Sequence[Recipe]) -> int:
    if len(args.names) == 1 and not args.json:
        print()
    args.specs, args.set, args.include, args.tasks = [str(one.path) for one in chosen], [], [], None
    args.strict = False
    return import_module("peftc.cli.plan.comparison").compare_plans(args, list(dict.fromkeys(args.model)))
