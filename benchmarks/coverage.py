"""On which model types peftc works: every type of the installed transformers in six auto mappings,
as a tiny random model.

    python -m benchmarks.coverage [--types a,b] [--mapping causal-lm] [--failed] [--build-only]
    [--jobs 2]

Writes benchmarks/results/coverage.json and .md; `--types`, `--mapping` and `--failed` rerun a part
and merge it into what is there.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.families import MAPPINGS, Pair, pairs
from benchmarks.families.pool import SECONDS, run
from benchmarks.families.report import failed, grouped, read, summary, write

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    options = _options()
    previous = read(options.results / "coverage.json")
    selection = [p for p in pairs() if _is_selected(p, options, previous)]
    start = time.perf_counter()
    rows = dict(_rows(selection, options))
    print(f"{len(rows)} in {time.perf_counter() - start:.0f} s")
    if options.build_only:
        _print_builds(rows)
        return 0
    merged = {**previous, **rows} if options.types or options.mapping or options.failed else rows
    write(merged, options.results)
    print("\n".join(grouped(rows)))
    for name, value in summary(merged).items():
        print(f"{name:14} {value}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", type=lambda text: set(text.split(",")), help="only these model types")
    parser.add_argument("--mapping", choices=list(MAPPINGS), help="only this auto mapping")
    parser.add_argument(
        "--failed", action="store_true", help="only what failed, or did not build, in the results there are"
    )
    parser.add_argument(
        "--build-only", action="store_true", help="build and run the plain forward; no checks, no files"
    )
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of each type")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of coverage.json and .md")
    return parser.parse_args()


def _is_selected(pair: Pair, options: argparse.Namespace, previous: dict[str, Any]) -> bool:
    row = previous.get(pair.key)
    if options.failed and row and row.get("ran") and not failed(row):
        return False
    if options.types and pair.type not in options.types:
        return False
    return not options.mapping or pair.mapping == options.mapping


def _rows(selection: list[Pair], options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    jobs = [{"mapping": p.mapping, "type": p.type, "build_only": options.build_only} for p in selection]
    rows = []
    for job, answer in run(jobs, options.jobs, options.seconds):
        key = f"{job['mapping']}/{job['type']}"
        rows.append((key, {"mapping": job["mapping"], "type": job["type"], **answer}))
        print(f"{len(rows)}/{len(jobs)} {key}", file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n")
    return rows


def _print_builds(rows: dict[str, dict[str, Any]]) -> None:
    for key, row in sorted(rows.items()):
        if not row.get("ran"):
            print(f"{key}: {row.get('why_not') or row.get('error')}")
    print(
        f"built {sum(r.get('built', False) for r in rows.values())}, "
        f"ran {sum(r.get('ran', False) for r in rows.values())}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
