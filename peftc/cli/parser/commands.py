"""The commands: what they do, where they are, and their arguments."""

from peftc.cli.parser.adapter_commands import CONVERT, EXPORT, IMPORT, INSPECT, MERGE
from peftc.cli.parser.arguments import (
    A_MODEL,
    CONFIG,
    FORMAT,
    FORMS,
    INCLUDE,
    ISOLATED,
    JSON,
    MODEL,
    MODEL_FORMAT,
    NO_CACHE,
    ON_MODEL,
    OPTIONAL_MODEL,
    OPTIONAL_SPEC,
    PATHS,
    REMOTE_CODE,
    SET,
    SPEC,
    STRICT,
    TASK,
    TASKS,
    argument,
    comma_separated,
    models,
)
from peftc.cli.parser.command import Command
from peftc.cli.parser.library_commands import COMPLETION, DOCTOR, LIST_FORMS, NEW, RECIPES

_CODES = {"type": comma_separated, "action": "extend", "metavar": "CODE,…"}

_CHECK = Command(
    "report errors and warnings in specs, alone or on models",
    "check.command",
    (
        PATHS,
        models(f"also check on this model: {A_MODEL} (repeatable)"),
        TASKS,
        argument("--locked", action="store_true", help="fail if a plan is another than in SPEC.lock.json"),
        argument("--select", values="code", **_CODES, help="report only these warnings: codes or beginnings of codes"),
        argument("--ignore", values="code", **_CODES, default=[], help="do not report these warnings"),
        argument("--statistics", action="store_true", help="print how often each code is there"),
        CONFIG,
        ISOLATED,
        INCLUDE,
        FORMS,
        REMOTE_CODE,
        TASK,
        NO_CACHE,
        FORMAT,
        STRICT,
    ),
    (
        argument("--fix", action="store_true", help="correct what is safe to correct, and report the rest"),
        argument("--diff", action="store_true", help="write nothing; print what --fix would change"),
        argument("--watch", action="store_true", help="check again whenever a file changes"),
    ),
)
_FMT = Command(
    "format specs",
    "fmt_command",
    (
        PATHS,
        argument("--upgrade", action="store_true", help="write specs of version 1 of the language as version 2"),
    ),
    (
        argument("--check", action="store_true", help="write nothing; list the files that would change"),
        argument("--diff", action="store_true", help="write nothing; print the changes"),
    ),
)
_EXPLAIN = Command(
    "explain a diagnostic code or a form; without one, list all codes",
    "explain_command",
    (
        argument("code", values="code or form", nargs="?", metavar="CODE|FORM", help="for example P101, or lora"),
        argument(
            "spec",
            values="spec",
            nargs="?",
            metavar="SPEC",
            help="the spec that defines the form, if it is not built in",
        ),
        FORMS,
    ),
)
_PLAN = Command(
    "print what compiling a spec onto a model would do",
    "plan.commands",
    (
        argument(
            "specs",
            values="spec",
            nargs="+",
            metavar="SPEC",
            help="a spec, a folder of specs, or - for standard input; several are compared",
        ),
        argument(
            "--model",
            values="model",
            action="append",
            required=True,
            metavar="MODEL",
            help=f"{A_MODEL} (repeatable; several are compared)",
        ),
        *ON_MODEL[2:],
        FORMAT,
        NO_CACHE,
        JSON,
        STRICT,
        argument(
            "-o",
            "--output",
            values="file",
            metavar="FILE",
            help="a JSON file for the plan, as `compile --plan` reads it",
        ),
    ),
)
_SHOW = Command(
    "draw what a spec adds to the layers of a model",
    "show_command",
    (
        *ON_MODEL,
        MODEL_FORMAT,
        argument(
            "-o",
            "--output",
            values="file",
            required=True,
            metavar="FILE",
            help="ends in .svg, .html, .md (Mermaid) or .dot",
        ),
        argument("--width", type=int, metavar="PIXELS", help="of layers side by side (default: 560)"),
        NO_CACHE,
        STRICT,
    ),
)
_VERIFY = Command(
    "compile a spec onto a model and check that it computes what the spec says",
    "model_commands",
    (
        *ON_MODEL,
        MODEL_FORMAT,
        argument(
            "--sites",
            choices=("sample", "all"),
            default="sample",
            help="the sites to change one by one: the first, a middle and the last of each kind, or all",
        ),
        argument("--seed", type=int, default=0, metavar="N", help="seed of initial values and of missing weights"),
        JSON,
    ),
)
_COMPILE = Command(
    "compile a spec onto a model and write the generated code",
    "model_commands",
    (
        OPTIONAL_SPEC,
        OPTIONAL_MODEL,
        *ON_MODEL[2:],
        FORMAT,
        argument(
            "--plan",
            values="file",
            metavar="FILE",
            help="apply the plan of `peftc plan -o FILE`, or say how it would differ now",
        ),
        argument(
            "-o",
            "--output",
            values="folder",
            metavar="DIR",
            help="the folder for the generated code, the plan and the spec",
        ),
        argument(
            "--force", action="store_true", help="with -o: overwrite files that were changed since peftc wrote them"
        ),
        argument(
            "--standalone",
            action="store_true",
            help="with -o: write a model that `from_pretrained` loads without peftc, weights included",
        ),
        argument("--seed", type=int, metavar="N", help="seed of the initial values"),
        STRICT,
    ),
)
_LOCK = Command(
    "write what specs do to their models to SPEC.lock.json, for `check --locked`",
    "comparison_commands",
    (
        PATHS,
        models(f"{A_MODEL} (repeatable; default: those of the configuration)"),
        TASKS,
        CONFIG,
        ISOLATED,
        INCLUDE,
        FORMS,
        REMOTE_CODE,
        TASK,
        NO_CACHE,
        MODEL_FORMAT,
    ),
)
_DIFF = Command(
    "print what differs between two specs, revisions, adapters or plans",
    "comparison_commands",
    (
        argument(
            "old",
            values="spec",
            metavar="OLD",
            help="a spec, git:REVISION:PATH, an adapter's folder, or a file of plans",
        ),
        argument("new", values="spec", metavar="NEW", help="the same"),
        argument(
            "--model", values="model", metavar="MODEL", help="compare sites, shapes and counts on this model, too"
        ),
        argument("--format", choices=("text", "markdown", "json"), default="text", help="of the difference"),
        argument("--exit-code", action="store_true", help="exit 1 if there is a difference"),
        REMOTE_CODE,
        TASK,
        INCLUDE,
        FORMS,
        NO_CACHE,
        MODEL_FORMAT,
    ),
)
_BREAKING = Command(
    "print what would break adapters that were saved under an earlier spec",
    "comparison_commands",
    (
        argument("new", values="spec", nargs="+", metavar="NEW", help="a spec, or a folder of specs"),
        argument(
            "--against",
            values="spec",
            required=True,
            metavar="OLD",
            help="as OLD of `diff`; for several specs a folder, or git:REVISION",
        ),
        argument("--model", values="model", metavar="MODEL", help="compare sizes, sites and folds on this model, too"),
        TASKS,
        argument("--format", choices=("text", "markdown", "json"), default="text", help="of the report"),
        REMOTE_CODE,
        TASK,
        INCLUDE,
        FORMS,
        NO_CACHE,
        MODEL_FORMAT,
    ),
)
# By name, in the order of `peftc --help`.
COMMANDS = {
    "check": _CHECK,
    "fmt": _FMT,
    "expand": Command(
        "print a spec with its methods and constants expanded",
        "expand_command",
        (SPEC, SET, INCLUDE, FORMS, FORMAT),
    ),
    "explain": _EXPLAIN,
    "sites": Command(
        "print the sites of a model, which edits can name",
        "plan.commands",
        (
            argument(
                "selector",
                values="selector",
                nargs="?",
                metavar="SELECTOR",
                help="print the sites that this names alone: 'layer[*].attn.q'",
            ),
            MODEL,
            REMOTE_CODE,
            TASK,
            NO_CACHE,
            MODEL_FORMAT,
            JSON,
        ),
    ),
    "plan": _PLAN,
    "show": _SHOW,
    "verify": _VERIFY,
    "compile": _COMPILE,
    "lock": _LOCK,
    "diff": _DIFF,
    "breaking": _BREAKING,
    "inspect": INSPECT,
    "merge": MERGE,
    "export": EXPORT,
    "convert": CONVERT,
    "import": IMPORT,
    "lsp": Command("answer an editor, as a language server over standard input and output", "check.lsp", (FORMS,)),
    "recipes": RECIPES,
    "forms": LIST_FORMS,
    "new": NEW,
    "doctor": DOCTOR,
    "completion": COMPLETION,
}
