"""The figures in README.md and docs/ are those of `benchmarks/results`, and every result has its
date, commit, machine and versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
README, MODELS, PROMISES = (
    (ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "docs/models.md", "docs/promises.md")
)
SENTENCES = " ".join(README.split())  # of README.md, whatever its lines


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def rows(page: str, first: str) -> list[list[str]]:
    """The rows of the table of a page whose head, or first row, begins with `first`."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    cells: list[list[str]] = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return [row for row in cells if not row[0].startswith("---")]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_have_date_commit_and_versions(path: Path) -> None:
    data = json.loads(path.read_text())
    provenance = data.get("machine") or data["versions"]
    assert {"date", "commit", "torch", "transformers"} <= provenance.keys()
    assert all(provenance[key] for key in ("date", "commit"))


def test_the_time_to_compile() -> None:
    seconds = {(row["kind"], row["shape"], row["layers"]): row for row in results("compile_time")["seconds"]}
    shapes = [shape for kind, shape, _ in seconds if kind == "PEFT"]
    _, *table = rows(PROMISES, "| | PEFT | peftc | ÷ | next process, ÷ | second model, ÷ |")
    for shape, row in zip(shapes, table, strict=True):
        peft, peftc, cached = (seconds[kind, shape, 0] for kind in ("PEFT", "peftc", "cached"))
        pairs = ((peftc["first"], peft["first"]), (cached["first"], peft["first"]), (peftc["later"], peft["later"]))
        ratios = [f"{ours / theirs:.2f}" for ours, theirs in pairs]
        assert row == [shape, f"{peft['first']:.2f} s", f"{peftc['first']:.2f} s", *ratios]
    _, *table = rows(PROMISES, "| | shallow | deep | ÷ |")
    deep = [("peftc", "LLaMA 405B", 12, 126)]
    deep += [("plan", shape, 8, 0) for kind, shape, layers in seconds if kind == "plan" and not layers]
    for (kind, shape, few, many), row in zip(deep, table, strict=True):
        shallow, all_layers = (seconds[kind, shape, layers]["first"] for layers in (few, many))
        assert row[1:] == [f"{shallow:.2f} s", f"{all_layers:.2f} s", f"{all_layers / shallow:.1f}"]


def test_the_overhead() -> None:
    _, *table = rows(PROMISES, "| | | peftc | PEFT | merged |")
    measured = results("overhead")["results"]
    for one, row in zip(measured, table, strict=True):
        costs = [f"{100 * one['over'][name]:+.0f} %" for name in ("peftc", "PEFT", "merged")]
        assert (row[0].partition(" ")[0], row[1], row[2:]) == (
            one["shape"],
            one["work"],
            [*costs, f"{100 * one['floor']:.0f} %"],
        )


def test_the_peers() -> None:
    _, *table = rows(PROMISES, "| | | peftc | PEFT | kept by peftc |")
    measured = results("peers")["results"]
    for one, row in zip(measured, table, strict=True):
        costs = [f"{100 * one['over'][name]:+.0f} %" for name in ("peftc", "PEFT")]
        memory = [
            f"{one['saved'][name] / 2**20:.1f} MiB" if one["work"] == "train" else "" for name in ("peftc", "PEFT")
        ]
        assert row == [one["method"], one["work"], *costs, *memory]


def test_the_device() -> None:
    _, *table = rows(PROMISES, "| | | beside | speed of peftc |")
    for one, row in zip(results("gpu")["results"], table, strict=True):
        speed = [f"{one['speed'][name]:.2f}" if name in one["speed"] else "" for name in ("peftc", "inlined")]
        peaks = [f"{one['bytes'][n] / 2**30:.2f} GiB" if n in one["bytes"] else "" for n in ("peftc", "PEFT")]
        shape, *_ = one["shape"].split()
        assert row == [shape, one["task"], one["beside"], *speed, str(one["goal"]), *peaks]


def test_the_coverage() -> None:
    summary = results("coverage")["summary"]
    shares = [summary[key].partition("(")[2].rstrip(")") for key in ("a, b, c, e", "d")]
    assert [row[-1] for row in rows(MODELS, "| LoRA on q and v, a parallel adapter")] == shares
    assert f"{summary['ran']} models run" in MODELS
    assert f"{float(shares[0].rstrip(' %')):.0f} % of the models of transformers take all edits" in SENTENCES


def test_the_coverage_of_other_libraries() -> None:
    summary = results("foreign")["summary"]
    table = dict(rows(MODELS, "| models that run, of how many libraries"))
    assert list(table.values()) == [
        f"{summary['ran']} of {summary['libraries']}",
        summary["with every edit"].partition("(")[2].rstrip(")"),
        str(summary["ever wrong"]),
        str(summary["without torch.compile"]),
    ]
    passed, _, ran = summary["with every edit"].partition(" ")[0].partition("/")
    assert f"and so do {passed} of {ran} models of other libraries" in SENTENCES


def test_the_promises() -> None:
    broken = results("adversarial")["results"]
    specs, adapters, kills = (broken[name] for name in ("mutated specs", "malicious adapters", "killed saves"))
    interrupts, mutants = results("interrupts"), results("mutants")
    merges = list(results("kills")["jobs"].values())
    assert [row[-1] for row in rows(PROMISES, "| Bad input")] == [
        f"{specs['run']:,} mutated specs, {adapters['run']:,} malicious "
        f"adapters: {specs['tracebacks'] + adapters['tracebacks']} tracebacks, "
        f"{specs['hangs'] + adapters['hangs']} hangs",
        f"{kills['run']:,} SIGKILLs, at random and at every boundary: {kills['losses']} losses",
        (
            f"SIGINT at {interrupts['lines']:,} lines of {len(interrupts['operations'])} "
            f"operations: {interrupts['between']} in between"
        ),
        (
            f"{sum(own['killed'] for own in merges)} SIGKILLs at random moments: "
            f"{sum(own['partial'] for own in merges)} in between"
        ),
        (
            f"{mutants['faults']} small faults, one at a time: {mutants['killed']} "
            f"noticed ({mutants['killed'] / mutants['faults']:.1%})"
        ).replace("%", " %"),
    ]


def test_the_time_of_the_tests() -> None:
    suite = results("suite")
    assert f"make test    # {suite['counts']['passed']:,} tests: {suite['wall']:.0f} minutes on two cores" in README
