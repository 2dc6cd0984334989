"""Arguments that several commands have, and what their values are."""

from dataclasses import dataclass, field
from typing import Any, Literal

from peftc.diagnostics.render import FORMATS

Values = Literal[
    "",
    "spec",
    "model",
    "recipe",
    "form",
    "code",
    "code or form",
    "selector",
    "folder",
    "file",
    "recipe or folder",
]


@dataclass(frozen=True)
class Argument:
    """An argument of `argparse`. `values`: what a shell completes, if there are no choices."""

    names: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    values: Values = ""

    @property
    def is_option(self) -> bool:
        return self.names[0].startswith("-")

    @property
    def is_flag(self) -> bool:
        """Whether it is an option without a value."""
        return self.options.get("action") in ("store_true", "store_false", "store_const")

    @property
    def is_repeatable(self) -> bool:
        return self.options.get("nargs") in ("*", "+") or self.options.get("action") in ("append", "extend")


def argument(*names: str, values: Values = "", **options: Any) -> Argument:
    return Argument(names, options, values)


def comma_separated(text: str) -> list[str]:
    return text.split(",")


A_SPEC = "a spec, or - for standard input"
A_MODEL = "a hub id, a folder, or a config.json"
AN_ADAPTER = "a folder that `peftc.save` wrote"

QUIET = argument(
    "-q", "--quiet", action="store_true", help="print results and diagnostics alone: no progress, no notes"
)
VERBOSE = argument("-v", "--verbose", action="store_true", help="say what is done, from where, and how long it takes")
PATHS = argument(
    "paths", values="spec", nargs="+", metavar="PATH", help="a spec, a folder of specs, or - for standard input"
)
SPEC = argument("spec", values="spec", metavar="SPEC", help=A_SPEC)
OPTIONAL_SPEC = argument("spec", values="spec", nargs="?", metavar="SPEC", help=A_SPEC)
SET = argument(
    "--set", action="append", default=[], metavar="NAME=VALUE", help="override a parameter of the method (repeatable)"
)
INCLUDE = argument(
    "--include",
    values="folder",
    action="append",
    default=[],
    metavar="DIR",
    help="another folder from which `use` may read, besides that of the spec (repeatable)",
)
FORMS = argument(
    "--forms",
    action="append",
    default=[],
    metavar="NAME",
    help="a Python form that an installed package offers as an entry point; its code runs (repeatable)",
)
FORMAT = argument("--output-format", choices=FORMATS, default="text", help="how diagnostics are printed")
MODEL_FORMAT = argument("--output-format", choices=("text", "json"), default="text", help="how diagnostics are printed")
MODEL = argument("--model", values="model", required=True, metavar="MODEL", help=A_MODEL)
OPTIONAL_MODEL = argument("--model", values="model", metavar="MODEL", help=A_MODEL)
BASE_MODEL = argument(
    "--model", values="model", metavar="MODEL", help="the base (default: the one that the adapter names)"
)
REMOTE_CODE = argument(
    "--trust-remote-code",
    action="store_true",
    help="run the Python files that the model's configuration names; without this option they never run",
)
TASK = argument(
    "--task",
    metavar="TASK",
    help="the class of the model: that of an auto class, such as sequence-classification or token-classification "
    "(also `--model MODEL:TASK`; default: the one that the configuration declares)",
)
TASKS = argument(
    "--tasks",
    type=comma_separated,
    metavar="NAME,…",
    help="the tasks for which `per task` edits get parameters (default: a single task)",
)
NO_CACHE = argument(
    "--no-cache", dest="cache", action="store_false", help="trace the model, and keep nothing of it for the next time"
)
JSON = argument("--json", action="store_true", help="print the result as JSON")
STRICT = argument("--strict", action="store_true", help="exit 1 if there are warnings")
ADAPTER = argument("adapter", values="folder", metavar="ADAPTER", help=AN_ADAPTER)
OTHER_WEIGHTS = argument(
    "--other-weights", action="store_true", help="expect a base with other weights than the adapter's"
)
CONFIG = argument(
    "--config", values="file", metavar="FILE", help="a peftc.toml or pyproject.toml (default: of the nearest folder)"
)
ISOLATED = argument("--isolated", action="store_true", help="read no configuration")
ON_MODEL = (SPEC, MODEL, REMOTE_CODE, TASK, SET, INCLUDE, FORMS, TASKS)


def models(help: str) -> Argument:
    """`--model`, which may be there several times."""
    return argument("--model", values="model", action="append", default=[], metavar="MODEL", help=help)
