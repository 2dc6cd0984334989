"""`python -m tests.mutants.run`: records the tests once, then runs each fault against those that
reach it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from benchmarks.common import RESULTS, machine, save
from tests.mutants.faults import Fault, room, sampled_faults
from tests.mutants.probes import write

ROOT = Path(__file__).resolve().parents[2]
REASONS = Path(__file__).with_name("reasons.json")
SAMPLE = Path(__file__).with_name("sample.json")  # the keys of the faults, drawn once
COPIED = (
    "peftc",
    "tests",
    "grammar",
    "specs",
    "examples",
    "benchmarks",
    "docs",
    "tools",
    "Makefile",
    "mkdocs.yml",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "pyproject.toml",
    "CHANGELOG.md",
)
SEED = 1
BUDGET, MOST = 180.0, 600  # seconds of CPU, and tests, for one fault
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    verdict: str  # "killed", "survived" or "not reached"
    by: str = ""

    @property
    def alive(self) -> bool:
        return self.verdict != "killed"


def environment(root: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CI": "true", **more}


def record(folder: Path, faults: Sequence[Fault], tests: Sequence[str], jobs: int) -> None:
    """Runs the tests once, in a copy with a probe at each fault. Tests that fail there are not used
    later.
    """
    copy(folder / "repository")
    write(folder / "repository", faults)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.recorder"]
    command += ["-n", str(jobs), "--dist", "worksteal", *tests]
    more = environment(folder / "repository", MUTANTS_RECORD=str(folder))
    subprocess.run(command, cwd=folder / "repository", env=more)
    (folder / "faults.json").write_text(json.dumps([fault.key for fault in faults]))


class Reach:
    """Which tests reach a fault, and what each costs.

    Args: `noticed`: by the fault's key, the test that detected it last.
    """

    def __init__(self, folder: Path, faults: Sequence[Fault], noticed: Mapping[str, str]) -> None:
        if json.loads((folder / "faults.json").read_text()) != [fault.key for fault in faults]:
            raise SystemExit(f"{folder} is of other faults: remove it")
        self.noticed = noticed
        self.numbers = {fault: number for number, fault in enumerate(faults)}
        self.seconds: dict[str, float] = {}
        self.reaching: dict[int, list[str]] = defaultdict(list)
        for line in (line for path in folder.glob("reached.*") for line in path.read_text().splitlines()):
            test, seconds, passed, numbers = json.loads(line)
            if passed:
                self.seconds[test] = seconds
                for number in numbers:
                    self.reaching[number].append(test)

    def tests(self, fault: Fault) -> list[str]:
        """The tests that reach the line, within the budget: the one that detected the fault last,
        those of the module's own file, then the cheapest of each file in turn; tests of the same
        package come first, for at most half of the budget. A test that exceeds the remaining budget
        is skipped, a cheaper one after it is not.
        """
        reaching = self.reaching[self.numbers[fault]]
        first = [test for test in reaching if test == self.noticed.get(fault.key)]
        files: dict[str, list[str]] = defaultdict(list)
        for test in sorted(reaching, key=lambda t: (self.seconds[t], t)):
            files[test.partition("::")[0]].append(test)
        own = f"test_{Path(fault.path).stem}.py"
        ranks = [(-1 if Path(f).name == own else i, test) for f, tests in files.items() for i, test in enumerate(tests)]
        turns = [test for _, test in sorted(ranks)]
        near = self.afforded([test for test in turns if test.startswith(f"tests/{room(fault)}/")], BUDGET / 2)
        remaining = BUDGET - sum(self.seconds[test] for test in near)
        far = self.afforded([test for test in turns if test not in near], remaining, always=not near)
        return list(dict.fromkeys([*first, *near, *far]))[:MOST]

    def afforded(self, tests: Sequence[str], budget: float, always: bool = False) -> list[str]:
        """Those of the tests, in order, that fit the budget. `always`: the first in any case."""
        picked = list[str]()
        for test in tests:
            if self.seconds[test] <= budget or (always and not picked):
                picked.append(test)
                budget -= self.seconds[test]
        return picked


def tried(fault: Fault, tests: Sequence[str], seconds: float, root: Path) -> Outcome:
    """Runs the tests on a copy of the repository with the fault. A run of three times the expected
    time counts as a hang, which detects the fault.
    """
    if not tests:
        return Outcome(fault, "not reached")
    path = root / fault.path
    text = path.read_text(encoding="utf-8")
    path.write_text(fault.applied(text), encoding="utf-8")
    limit = int(3 * seconds + 60)
    try:
        done = subprocess.run(
            [*PYTEST, "-x", *tests],
            cwd=root,
            env=environment(root),
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
        )
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return Outcome(fault, "survived", f"{len(tests)} tests")
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Outcome(
        fault, "killed", lines[0].partition(" - ")[0].partition(" ")[2] if lines else f"exit {done.returncode}"
    )


def copy(root: Path) -> Path:
    """A copy of the repository."""
    for name in COPIED:
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return root


def run(faults: Sequence[Fault], reach: Reach, jobs: int) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        roots: Queue[Path] = Queue()
        for number in range(jobs):
            roots.put(copy(Path(folder) / str(number)))

        def one(fault: Fault) -> Outcome:
            tests = reach.tests(fault)
            root = roots.get()
            try:
                outcome = tried(fault, tests, sum(reach.seconds[t] for t in tests), root)
            finally:
                roots.put(root)
            print(f"{outcome.verdict:12} {fault.path}:{fault.line} {fault.before!r} -> {fault.after!r}", flush=True)
            return outcome

        return list(pool.map(one, faults))


def reasons() -> dict[str, str]:
    """By the fault's key, why a surviving fault changes no observable behaviour."""
    return json.loads(REASONS.read_text()) if REASONS.exists() else {}


def report(outcomes: Sequence[Outcome], requested: int, seed: int) -> None:
    """Writes the results. A survivor without observable effect has its reason in `reasons.json`.

    Args: `requested`: how many faults were tried now; the verdicts of the others are from an
    earlier run.
    """
    why = reasons()
    alive = [o for o in outcomes if o.alive]
    counts, living = (Counter(room(o.fault) for o in some) for some in (outcomes, alive))
    killed = len(outcomes) - len(alive)
    again = "" if requested == len(outcomes) else f" {requested} of them, which had survived, were tried again."
    text = [f"{len(outcomes)} faults, {killed} killed ({100 * killed / len(outcomes):.1f} %). Seed {seed}.{again}", ""]
    text += ["| package | faults | killed |", "| --- | ---: | ---: |"]
    text += [f"| {name} | {count} | {count - living[name]} |" for name, count in sorted(counts.items())]
    text += ["", "Survivors:", ""] if alive else []
    text += [
        f"* `{o.fault.key}` (line {o.fault.line}, {o.verdict}): {why.get(o.fault.key, 'no reason yet')}" for o in alive
    ]
    results: dict[str, Any] = {
        "seed": seed,
        "faults": len(outcomes),
        "killed": killed,
        "asked": requested,
        "outcomes": [{"fault": o.fault.key, "line": o.fault.line, "verdict": o.verdict, "by": o.by} for o in outcomes],
    }
    save("mutants", results, "\n".join(text), machine())
    print("\n".join(text))


def previous_outcomes(faults: Sequence[Fault]) -> list[Outcome]:
    """The outcomes in the last results, of faults that still exist."""
    text = (RESULTS / "mutants.json").read_text()
    by_key = {one["fault"]: one for one in json.loads(text)["outcomes"]}
    return [Outcome(f, by_key[f.key]["verdict"], by_key[f.key]["by"]) for f in faults if f.key in by_key]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--faults", type=int, default=160, help="about how many")
    parser.add_argument("--seed", type=int, default=SEED, help="another one draws a sample that is not kept")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--record", type=Path, default=ROOT / "build" / "mutants", help="kept, and used again if it is there"
    )
    parser.add_argument(
        "--survivors",
        action="store_true",
        help="only those of the last results that have no reason; the others stay as they are",
    )
    parser.add_argument("--only", default="", help="faults of paths that begin so")
    parser.add_argument("tests", nargs="*", help="tests to choose from (all)")
    options = parser.parse_args(arguments)
    before = json.loads(SAMPLE.read_text()) if SAMPLE.exists() and options.seed == SEED else []
    faults = sampled_faults(ROOT, options.faults, options.seed, before)
    if options.seed == SEED:
        SAMPLE.write_text(json.dumps([fault.key for fault in faults], indent=0) + "\n")
    if not (options.record / "faults.json").exists():
        record(options.record, faults, options.tests, options.jobs)
    last = previous_outcomes(faults)
    reach = Reach(options.record, faults, {o.fault.key: o.by for o in last if not o.alive})
    settled = [o for o in last if not o.alive or o.fault.key in reasons()] if options.survivors else []
    remaining = [fault for fault in faults if fault not in {o.fault for o in settled}]
    requested = run([fault for fault in remaining if fault.path.startswith(options.only)], reach, options.jobs)
    outcomes = sorted([*settled, *requested], key=lambda o: faults.index(o.fault))
    if not options.only and not options.tests:
        report(outcomes, len(requested), options.seed)
    return int(any(o.alive and o.fault.key not in reasons() for o in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
