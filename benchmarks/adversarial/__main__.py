"""Tries to break peftc, and counts: tracebacks (an exception that is no diagnostic, or a P9xx),
hangs, losses.

    python -m benchmarks.adversarial [--specs 20000] [--files 1000] [--kills 150] [--seed 0]

Writes `results/adversarial.json` and `.md`. Exit code 1 where anything broke.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from benchmarks.adversarial import adapters, files, kills, specs
from benchmarks.adversarial.outcome import SECONDS, Tally
from benchmarks.common import machine, provenance, save, table

BROKEN = ("tracebacks", "hangs", "losses")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", type=int, default=20_000, help="mutated specs")
    parser.add_argument("--files", type=int, default=1_000, help="mutated locks, files of plans, and configurations")
    parser.add_argument("--kills", type=int, default=150, help="saves killed at random, beside those at every boundary")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tallies = {name: Tally() for name in ("mutated specs", "mutated files", "malicious adapters", "killed saves")}
    start = time.process_time()
    kills.run(options.kills, options.seed, tallies["killed saves"])
    adapters.run(options.seed, tallies["malicious adapters"])
    specs.run(options.specs, options.seed, tallies["mutated specs"])
    files.run(options.files, options.seed, tallies["mutated files"])
    results: dict[str, Any] = {
        name: {
            **{key: tally.counts[key] for key in ("run", "accepted", "refused", *BROKEN)},
            "of these": {
                key: n for key, n in tally.counts.items() if key not in ("run", "accepted", "refused", *BROKEN)
            },
            "codes": dict(tally.codes.most_common()),
            "failures": tally.failures[:50],
        }
        for name, tally in tallies.items()
    }
    seconds = round(time.process_time() - start)
    save(
        "adversarial",
        {"seed": options.seed, "seconds": seconds, "results": results},
        report(results),
        provenance() | machine(),
    )
    print(report(results), *(line for tally in tallies.values() for line in tally.failures), sep="\n")
    return 1 if any(tally.counts[kind] for tally in tallies.values() for kind in BROKEN) else 0


def report(results: dict[str, Any]) -> str:
    rows = [
        [name, *(f"{counts[key]:,}" for key in ("run", "accepted", "refused", *BROKEN))]
        for name, counts in results.items()
    ]
    return f"""# Adversarial input

Made by `python -m benchmarks.adversarial` (`make adversarial`); the numbers in full are in
`adversarial.json`. *Refused*: with a diagnostic. *Tracebacks*: any other exception, or a P9xx.
*Hangs*: more than {SECONDS:.0f} s of CPU. *Losses*: a model that an error has changed, a
message that shows another file, or an adapter that is lost after a kill.

{table(["", "run", "accepted", "refused", *BROKEN], rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
