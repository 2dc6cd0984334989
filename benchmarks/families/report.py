"""The coverage report: JSON with everything, Markdown, and failures grouped by message."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import commit
from benchmarks.families.edits import TITLES

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
GOOD = ("pass", "refused")


def versions() -> dict[str, str]:
    by_package = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    return {"date": date.today().isoformat(), "commit": commit(), **by_package}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["types"] if path.exists() else {}


def write(rows: Rows, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ordered = dict(sorted(rows.items()))
    record = {"versions": versions(), "summary": summary(ordered), "types": ordered}
    (folder / "coverage.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "coverage.md").write_text("\n".join(markdown(ordered)) + "\n")


def failed(row: Row) -> bool:
    """Whether a type that runs has an edit that neither works nor is rightly refused."""
    return bool(row.get("error")) or any(e["verdict"] not in GOOD for e in row.get("edits", {}).values())


def summary(rows: Rows) -> dict[str, Any]:
    """Counts; percentages are of the types that were built and ran."""
    ran = [r for r in rows.values() if r.get("ran") or r.get("error")]
    attending = [r for r in ran if r.get("attention")]
    result: dict[str, Any] = {
        "pairs": len(rows),
        "types": len({r["type"] for r in rows.values()}),
        "built": sum(bool(r.get("built")) for r in rows.values()),
        "ran": len(ran),
        "sites found": _share([r for r in ran if has_sites(r)], ran),
    }
    for name in TITLES:
        of = attending if name == "d" else ran
        result[name] = _share([r for r in of if _verdict(r, name) in GOOD], of)
    result["a, b, c, e"] = _share([r for r in ran if has_sites(r) and all(_verdict(r, n) in GOOD for n in "abce")], ran)
    return result


def has_sites(row: Row) -> bool:
    """Layers, and those of attention and feed-forward that `observe` sees."""
    sites = row.get("sites") or {}
    attends = any(name.startswith("layer.attn") for name in sites) or not row.get("attention")
    return "layer" in sites and attends


def _share(some: list[Row], of: list[Row]) -> str:
    return f"{len(some)}/{len(of)} ({100 * len(some) / max(1, len(of)):.1f} %)"


def _verdict(row: Row, edit: str) -> str:
    return row.get("edits", {}).get(edit, {}).get("verdict", "fail")


def markdown(rows: Rows) -> Iterator[str]:
    about = versions()
    yield "# Coverage"
    yield ""
    yield (
        "Every model type of six auto mappings as a tiny random model, and five edits on each. "
        "Made by `python -m benchmarks.coverage`; the numbers in full are in `coverage.json`."
    )
    yield ""
    yield f"{about['date']}, commit {about['commit']}, torch {about['torch']}, transformers {about['transformers']}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in summary(rows).items():
        yield f"| {name}{': ' + TITLES[name] if name in TITLES else ''} | {value} |"
    yield ""
    yield from _explanation()
    yield from _table(rows)
    yield from _failures(rows)
    yield from _not_run(rows)


def _explanation() -> Iterator[str]:
    yield (
        "`ok`: at the start the output is the base's bit for bit "
        "(but for the prefix); with drawn parameters it changes, the "
        "edit's tensors receive finite gradients, decoding with a "
        "cache equals decoding without (where it does in the base: to "
        "1e-4 of the largest logit, or ten times what the base is off by), and after `remove` classes, "
        "tensors and output are the base's again. `–`: there is no such sub-layer, says a check "
        "that does not use peftc, and the edit is refused with P2xx. "
        "(c) leaves out the one of its two sub-layers that is not "
        "there. The per cents of (d) are of the types in which a softmax is multiplied with values."
    )
    yield ""


def _table(rows: Rows) -> Iterator[str]:
    yield "| mapping | type | inputs | kinds | layers | q | v | ffn | a | b | c | d | e |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows.values():
        if row.get("ran") or row.get("error"):
            sites = row.get("sites") or {}
            counts = [sites.get("layer", 0), _ending(sites, "q"), _ending(sites, "v"), sites.get("layer.ffn", 0)]
            marks = [_mark(_verdict(row, name)) for name in TITLES]
            inputs = ", ".join(row.get("inputs", ()))
            cells = [row["mapping"], row["type"], inputs, row.get("kinds", 0), *counts, *marks]
            yield f"| {' | '.join(str(c) for c in cells)} |"
    yield ""


def _ending(sites: Mapping[str, int], last: str) -> int:
    return sum(n for name, n in sites.items() if name.startswith("layer.attn") and name.endswith(f".{last}"))


def _mark(verdict: str) -> str:
    return {"pass": "ok", "refused": "–"}.get(verdict, "**fail**")


def _failures(rows: Rows) -> Iterator[str]:
    yield "## Failures"
    yield ""
    for key, row in rows.items():
        if row.get("error"):
            yield f"* `{key}`: {row['error']}"
        elif row.get("ran") and failed(row):
            yield f"* `{key}`"
            for reason, edits in _reasons(row).items():
                yield f"  * {', '.join(edits)}: {_plain(reason)}"
    yield ""


def _reasons(row: Row) -> dict[str, list[str]]:
    reasons = defaultdict[str, list[str]](list)
    for name, edit in row.get("edits", {}).items():
        if edit["verdict"] not in GOOD:
            reasons[edit["reason"]].append(name)
    return reasons


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _not_run(rows: Rows) -> Iterator[str]:
    yield "## Not built or not run"
    yield ""
    for key, row in rows.items():
        if not row.get("ran") and not row.get("error"):
            yield f"* `{key}`{' (built)' if row.get('built') else ''}: {_plain(row['why_not'])}"


def grouped(rows: Rows) -> Iterator[str]:
    """Failures by message, the largest group first."""
    groups = defaultdict[str, list[str]](list)
    for key, row in rows.items():
        if row.get("error"):
            groups[row["error"]].append(key)
        elif row.get("ran"):
            for reason, edits in _reasons(row).items():
                groups[_shape(reason)].append(f"{key}[{''.join(edits)}]")
    for reason, keys in sorted(groups.items(), key=lambda item: -len(item[1])):
        yield f"## {len(keys)} × {reason}"
        yield "  " + ", ".join(keys[:12]) + (" …" if len(keys) > 12 else "")


def _shape(reason: str) -> str:
    """A reason without the details of one type."""
    reason = re.sub(r"matches nothing in [\w.-]+", "matches nothing", reason)
    reason = re.sub(r"the edited \w+", "the edited model", reason)
    reason = re.sub(r"\[[\w.-]+ has no [^]]*\]|\[the model has [^]]*\]", "", reason)
    reason = re.sub(r"\d+\.\d+e[-+]\d+", "#", reason)
    return re.sub(r"(?<![A-Z])(?<!\.py:)\b\d+\b", "#", reason)
