"""On which models of other libraries, and on which hand-written ones, peftc works.

    python -m benchmarks.foreign [--only PATTERN] [--library NAME] [--failed] [--quick] [--jobs 2]

Each model has a role table that was written from its source (benchmarks/foreign_models). Writes
benchmarks/results/foreign.json and .md; `--only`, `--library` and `--failed` rerun a part and merge
it into what is there. The libraries are installed by `make foreign`; those that cannot be imported
are listed with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.families.pool import run
from benchmarks.foreign_checks.report import grouped, read, summary, write
from benchmarks.foreign_models import broken, every
from benchmarks.foreign_models.case import Case

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS = 300.0


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    previous = read(options.results / "foreign.json")
    known = list(every())
    selection = [(module, case) for module, case in known if _is_selected(case, options, previous)]
    start = time.perf_counter()
    rows = dict(_rows(selection, options))
    names = {case.name for _, case in known}
    merged = {name: row for name, row in {**previous, **rows}.items() if name in names}
    if not options.dry:
        write(merged if options.only or options.library or options.failed else rows, broken(), options.results)
    print("\n".join(grouped(rows)))
    for name, value in summary(rows).items():
        print(f"{name:20} {value}")
    print(f"{len(rows)} in {time.perf_counter() - start:.0f} s")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only cases whose name matches: timm/*, or several, with commas")
    parser.add_argument("--library", help="only the cases of this library")
    parser.add_argument("--failed", action="store_true", help="only what does not pass in the results there are")
    parser.add_argument("--edits", default="abcde", help="only these edits")
    parser.add_argument("--quick", action="store_true", help="without torch.compile, most of the time")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of each case")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of foreign.json and .md")
    parser.add_argument("--dry", action="store_true", help="print, and write no files")
    return parser.parse_args(arguments)


def _is_selected(case: Case, options: argparse.Namespace, previous: dict[str, Any]) -> bool:
    if options.failed and previous.get(case.name, {}).get("verdict") == "pass":
        return False
    if options.library and case.library != options.library:
        return False
    return not options.only or any(fnmatch(case.name, one) for one in options.only.split(","))


def _rows(selection: list[tuple[str, Case]], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    jobs = [
        {"module": module, "name": case.name, "edits": options.edits, "dynamo": not options.quick}
        for module, case in selection
    ]
    libraries = {case.name: case.library for _, case in selection}
    answers = run(jobs, options.jobs, options.seconds, "benchmarks.foreign_checks.worker")
    for count, (job, answer) in enumerate(answers, 1):
        name = job["name"]
        row = {"library": libraries[name], "dynamo": job["dynamo"], **answer}
        row.setdefault("verdict", "error" if "error" in answer else "not run")
        print(f"{count}/{len(jobs)} {name}: {row['verdict']}", file=sys.stderr)
        yield name, row


if __name__ == "__main__":
    raise SystemExit(main())
