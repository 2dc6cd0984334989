"""The command `new`."""

import os
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

from peftc.checking.run import Checker
from peftc.cli.library.recipes_command import recipe_of
from peftc.cli.output import tell
from peftc.cli.spec_files import Unusable
from peftc.diagnostics import PeftcError
from peftc.filesystem.resources import recipes

CONFIG = "adapter_config.json"


def run_new(args: Namespace) -> int:
    """Writes a spec that passes `check`. Raises: P5xx, P80x (a configuration); Unusable."""
    path = Path(args.source)
    is_recipe = args.source in recipes()  # a folder of this name is `./NAME`
    is_config = os.path.isfile(path / CONFIG) or (path.name == CONFIG and path.is_file())
    if is_config and not is_recipe:
        folder = path.parent if path.name == CONFIG else path
        make = import_module("peftc.exchange.config_spec").spec_of_config
        text, name = make(folder, args.model, args.trust_remote_code), folder.resolve().name
    elif args.model is not None:
        folder = f"; the folder is ./{args.source}" if is_config else ""
        raise Unusable(f"--model is for a configuration of PEFT: a recipe is for any model{folder}")
    elif path.is_dir() and not is_recipe:
        raise Unusable(f"there is no {CONFIG} in {args.source}")
    else:
        recipe = recipe_of(args.source)
        text, name = recipe.text, recipe.path.stem
    check(text, name)
    if args.output == "-":
        sys.stdout.write(text)
        return 0
    write(Path(args.output or f"{name}.peft"), text, args)
    return 0


def check(text: str, name: str) -> None:
    """Raises: PeftcError if `check` would report an error."""
    errors = [one for one in Checker().alone(text, f"{name}.peft") if one.severity == "error"]
    if errors:
        raise PeftcError(errors)


def write(target: Path, text: str, args: Namespace) -> None:
    """Writes a new file. Raises: Unusable, for one that is there too."""
    try:
        with target.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        raise Unusable(f"{target} is there already: name another file with -o") from None
    except OSError as error:
        raise Unusable(f"cannot write {target}: {error.strerror}") from None
    tell(args, f"wrote {target}; `peftc plan {target} --model MODEL` says what it costs", sys.stdout)
