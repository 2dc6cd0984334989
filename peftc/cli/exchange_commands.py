"""The commands `export` and `import`."""

from argparse import Namespace

from peftc.exchange import export, import_adapter


def run_export(args: Namespace) -> int:
    """Writes an adapter in the format of another program. Raises: as `peftc.export`."""
    report = export(
        args.adapter,
        args.output,
        to=args.to,
        model=args.model,
        other_weights=args.other_weights,
        trust_remote_code=args.trust_remote_code,
    )
    print(report.model_dump_json(indent=2) if args.json else report)
    return 0


def run_import(args: Namespace) -> int:
    """Makes an adapter of one of another program. Raises: as `peftc.import_adapter`."""
    print(import_adapter(args.source, args.output, model=args.model, trust_remote_code=args.trust_remote_code))
    return 0
