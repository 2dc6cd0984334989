"""The commands on saved adapters."""

from peftc.cli.parser.arguments import (
    ADAPTER,
    BASE_MODEL,
    FORMS,
    JSON,
    MODEL_FORMAT,
    OTHER_WEIGHTS,
    REMOTE_CODE,
    TASK,
    argument,
)
from peftc.cli.parser.command import Command

INSPECT = Command(
    "print a saved adapter: its spec, base and counts, and how much each edit changes",
    "exchange_commands",
    (ADAPTER, BASE_MODEL, REMOTE_CODE, TASK, FORMS, MODEL_FORMAT, JSON),
)
MERGE = Command(
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
        TASK,
        FORMS,
        MODEL_FORMAT,
        JSON,
    ),
)
EXPORT = Command(
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
        TASK,
        FORMS,
        MODEL_FORMAT,
        JSON,
    ),
)
CONVERT = Command(
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
        TASK,
        FORMS,
        MODEL_FORMAT,
    ),
)
IMPORT = Command(
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
        TASK,
        MODEL_FORMAT,
    ),
)
