"""The commands `export`, `import`, `convert` and `inspect`, on adapters."""

from argparse import Namespace

from peftc.diagnostics.activity import activity
from peftc.exchange import convert, export, import_adapter
from peftc.exchange.inspection import inspect


def run_export(args: Namespace) -> int:
    """Writes an adapter in the format of another program. Raises: as `peftc.export`."""
    with activity(f"exporting {args.adapter}"):
        report = export(
            args.adapter,
            args.output,
            to=args.to,
            model=args.model,
            max_rank=args.max_rank,
            svd=args.svd,
            other_weights=args.other_weights,
            trust_remote_code=args.trust_remote_code,
        )
    print(report.model_dump_json(indent=2) if args.json else report)
    return 0


def run_import(args: Namespace) -> int:
    """Makes an adapter of one of another program. Raises: as `peftc.import_adapter`."""
    with activity(f"importing {args.source}"):
        result = import_adapter(args.source, args.output, model=args.model, trust_remote_code=args.trust_remote_code)
    print(result)
    return 0


def run_convert(args: Namespace) -> int:
    """Writes an adapter as one of LoRA alone. Raises: as `peftc.convert`."""
    with activity(f"converting {args.adapter}"):
        result, modules = convert(
            args.adapter,
            args.output,
            rank=args.rank,
            model=args.model,
            other_weights=args.other_weights,
            trust_remote_code=args.trust_remote_code,
        )
    print(result)
    for one in modules:
        if one.error is not None:
            print(f"approximated {one.module}: relative error {one.error:.2g}")
    return 0


def run_inspect(args: Namespace) -> int:
    """Prints an adapter. Raises: as `peftc.inspect`."""
    with activity(f"measuring {args.adapter}"):
        result = inspect(args.adapter, model=args.model, trust_remote_code=args.trust_remote_code)
    print(result.model_dump_json(indent=2) if args.json else result)
    return 0
