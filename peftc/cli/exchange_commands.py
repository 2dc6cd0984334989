"""The command `export`."""

from argparse import Namespace

from peftc.exchange import export


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
