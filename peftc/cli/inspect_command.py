"""`inspect`: what a saved adapter is, and how much it changes."""

from argparse import Namespace

from peftc.exchange.inspection import inspect


def run_inspect(args: Namespace) -> int:
    """Prints an adapter. Raises: as `peftc.inspect`."""
    result = inspect(args.adapter, model=args.model, trust_remote_code=args.trust_remote_code)
    print(result.model_dump_json(indent=2) if args.json else result)
    return 0
