"""Verifies every recipe on every model of tests/zoo.py that has its sites.

    python -m benchmarks.verification [--recipes lora,mam] [--models bart,llama] [--layers 2]

Prints a line for each pair that has a finding or a site that is not witnessed, and the counts. A
run over all pairs writes `results/verification.json` and `.md`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence

import peftc
from benchmarks.common import machine, provenance, save, table
from tests.verification.pairs import compiled, everything


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    counts: Counter[str] = Counter()
    lines: list[str] = []
    start = time.process_time()
    for recipe, name in everything():
        if (options.recipes and recipe not in options.recipes) or (options.models and name not in options.models):
            continue
        counts["pairs"] += 1
        if message := verified(recipe, name, options.layers, counts):
            lines.append(f"{recipe} on {name}: {message}")
            print(lines[-1], flush=True)
    counts["seconds of CPU"] = round(time.process_time() - start)
    rows = [[what, f"{count:,}"] for what, count in counts.items()]
    for what, count in rows:
        print(f"{what:24} {count}")
    if not (options.recipes or options.models):
        text = f"Every recipe on every model of `tests/zoo.py` that has its sites.\n\n{table(['', 'count'], rows)}"
        save("verification", {"counts": counts, "lines": lines}, text, provenance() | machine())
    return 1 if counts["findings"] else 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--models", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--layers", type=int, default=2, help="of each stack")
    return parser.parse_args(arguments)


def verified(recipe: str, name: str, layers: int, counts: Counter[str]) -> str:
    """The report on a pair, in one line."""
    try:
        model = compiled(recipe, name, layers)
    except peftc.PeftcError as error:
        counts["pairs that do not compile"] += 1
        return str(error.diagnostics[0])
    report = peftc.verify(model)
    counts["sites"] += report.sites
    counts["sites witnessed"] += report.witnessed
    counts["edits perturbed alone"] += sum(edit.perturbed for edit in report.edits)
    counts["of these inert"] += sum(edit.inert for edit in report.edits)
    counts["findings"] += len(report.findings)
    counts["checks"] += sum(check.outcome == "holds" for check in report.checks)
    reasons = Counter(one.reason for edit in report.edits for one in edit.not_witnessed)
    messages = [str(diagnostic) for diagnostic in report.diagnostics]
    return "; ".join([*messages, *(f"{count} × {reason}" for reason, count in reasons.items())])


if __name__ == "__main__":
    raise SystemExit(main())
