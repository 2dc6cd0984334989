"""The commands on what comes with peftc."""

from peftc.cli.parser.arguments import A_MODEL, FORMS, JSON, MODEL_FORMAT, NO_CACHE, REMOTE_CODE, TASK, argument, models
from peftc.cli.parser.command import Command

RECIPES = Command(
    "list the methods of the literature that come with peftc, or print one",
    "library.recipes_command",
    (
        argument("names", values="recipe", nargs="*", metavar="NAME", help="a recipe (default: all)"),
        models(f"also print what they cost on this model: {A_MODEL} (repeatable)"),
        REMOTE_CODE,
        TASK,
        NO_CACHE,
        MODEL_FORMAT,
        JSON,
    ),
)
LIST_FORMS = Command(
    "list the functions that equations call, or explain one",
    "library.forms_command",
    (argument("name", values="form", nargs="?", metavar="NAME", help="a form (default: all)"), FORMS, JSON),
)
NEW = Command(
    "write a spec: a recipe, or what a configuration of PEFT says",
    "library.new_command",
    (
        argument(
            "source",
            values="recipe or folder",
            metavar="RECIPE|DIR",
            help="a name of `peftc recipes`, or a folder with adapter_config.json (./NAME beside a recipe NAME)",
        ),
        argument(
            "-o",
            "--output",
            values="file",
            metavar="FILE",
            help="the file, or - for standard output (default: the name with .peft, here)",
        ),
        argument(
            "--model",
            values="model",
            metavar="MODEL",
            help="of a configuration: name the modules by their roles in this model",
        ),
        REMOTE_CODE,
        TASK,
        MODEL_FORMAT,
    ),
)
DOCTOR = Command(
    "print versions, devices and caches, and test peftc on a small model: for reports of bugs",
    "doctor.command",
    (FORMS, JSON),
)
COMPLETION = Command(
    "print a script with which a shell completes commands, options, models, recipes and files",
    "completion.command",
    (argument("shell", choices=("bash", "zsh", "fish"), help="for example: source <(peftc completion bash)"),),
)
