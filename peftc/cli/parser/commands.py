"""The commands: what they do, where they are, and their arguments."""

from dataclasses import dataclass

from peftc.cli.parser.arguments import (
    A_MODEL,
    ADAPTER,
    BASE_MODEL,
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
    OTHER_WEIGHTS,
    PATHS,
    QUIET,
    REMOTE_CODE,
    SET,
    SPEC,
    STRICT,
    TASKS,
    VERBOSE,
    Argument,
    argument,
    comma_separated,
    models,
)


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        help: what it does.
        module: the one of `peftc.cli` with its function, `run_NAME`.
        arguments: all that may be there together.
        exclusive: of which one may be there.
    """

    help: str
    module: str
    arguments: tuple[Argument, ...]
    exclusive: tuple[Argument, ...] = ()

    @property
    def every_argument(self) -> tuple[Argument, ...]:
        return (*self.arguments, *self.exclusive, *COMMON)


COMMON = (QUIET, VERBOSE)  # of all commands; not both
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
        argument("code", values="code", nargs="?", metavar="CODE|FORM", help="for example P101, or lora"),
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
        INCLUDE,
        FORMS,
        NO_CACHE,
        MODEL_FORMAT,
    ),
)
_MERGE = Command(
    "merge saved adapters into a safetensors checkpoint, tensor by tensor",
    "merge_command",
    (
        argument("base", values="model", metavar="BASE", help="a folder with safetensors, or a hub id"),
        argument(
            "adapters",
            values="folder",
            nargs="+",
            metavar="ADAPTER",
            help="a folder that `peftc.save` wrote; several act in this order",
        ),
        argument("-o", "--output", values="folder", metavar="DIR", help="a new folder for the merged checkpoint"),
        argument("--partial", action="store_true", help="keep edits that do not fold, as an adapter in DIR/adapter"),
        argument("--widen", action="store_true", help="make bottlenecks beside ffns hidden units of these"),
        argument(
            "--untie", action="store_true", help="make two matrices of a tied embedding and head, so that edits fold"
        ),
        argument("--dequantize", action="store_true", help="write the weights of a quantised base out in full"),
        OTHER_WEIGHTS,
        argument("--dry-run", action="store_true", help="say what would be merged, and write nothing"),
        argument("--verify", action="store_true", help="read the new files again, and compare, before they appear"),
        argument("--jobs", type=int, default=1, metavar="N", help="processes on this machine"),
        argument(
            "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where sums are computed (default: auto)"
        ),
        REMOTE_CODE,
        FORMS,
        MODEL_FORMAT,
        JSON,
    ),
)
_EXPORT = Command(
    "write an adapter in the format of another program",
    "exchange_commands",
    (
        ADAPTER,
        argument("--to", choices=("peft", "vllm", "adapterhub"), default="peft", help="the format (default: peft)"),
        argument("--max-rank", type=int, metavar="N", help="the highest rank that the other program takes"),
        argument("--svd", action="store_true", help="write the nearest change of this rank, where none is exact"),
        argument("-o", "--output", values="folder", required=True, metavar="DIR", help="a new folder"),
        BASE_MODEL,
        OTHER_WEIGHTS,
        REMOTE_CODE,
        FORMS,
        MODEL_FORMAT,
        JSON,
    ),
)
_CONVERT = Command(
    "write an adapter as one of LoRA alone",
    "exchange_commands",
    (
        ADAPTER,
        argument("--to", choices=("lora",), default="lora", help="the form (default: lora)"),
        argument("--rank", type=int, required=True, metavar="R", help="of each LoRA, at most"),
        argument("-o", "--output", values="folder", required=True, metavar="DIR", help="a new folder for the adapter"),
        BASE_MODEL,
        OTHER_WEIGHTS,
        REMOTE_CODE,
        FORMS,
        MODEL_FORMAT,
    ),
)
_IMPORT = Command(
    "make an adapter of one of another program",
    "exchange_commands",
    (
        argument(
            "source",
            values="folder",
            metavar="DIR|HUB_ID",
            help="a folder that PEFT or AdapterHub wrote, or a hub id",
        ),
        argument(
            "-o", "--output", values="folder", required=True, metavar="ADAPTER", help="a new folder for the adapter"
        ),
        BASE_MODEL,
        REMOTE_CODE,
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
        (MODEL, REMOTE_CODE, NO_CACHE, MODEL_FORMAT, JSON),
    ),
    "plan": _PLAN,
    "show": _SHOW,
    "verify": _VERIFY,
    "compile": _COMPILE,
    "lock": _LOCK,
    "diff": _DIFF,
    "inspect": Command(
        "print a saved adapter: its spec, base and counts, and how much each edit changes",
        "exchange_commands",
        (ADAPTER, BASE_MODEL, REMOTE_CODE, FORMS, MODEL_FORMAT, JSON),
    ),
    "merge": _MERGE,
    "export": _EXPORT,
    "convert": _CONVERT,
    "import": _IMPORT,
    "lsp": Command("answer an editor, as a language server over standard input and output", "check.lsp", (FORMS,)),
}
