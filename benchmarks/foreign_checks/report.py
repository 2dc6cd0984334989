"""The report of the second coverage benchmark: JSON with everything, Markdown, and failures grouped
by message.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.common import commit, table
from benchmarks.foreign_checks.edits import TRIALS

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
MARKS = {"pass": "ok", "refused": "refused", "incomplete": "missing", "error": "**error**", "wrong": "**wrong**"}
OWN = ("hand-written", "torch")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["models"] if path.exists() else {}


def write(rows: Rows, broken: Mapping[str, str], folder: Path) -> None:
    """`foreign.json` and `foreign.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = dict(sorted(rows.items()))
    record = {"versions": versions(ordered), "summary": summary(ordered), "broken": dict(broken), "models": ordered}
    (folder / "foreign.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "foreign.md").write_text("\n".join(markdown(ordered, broken)) + "\n")


def versions(rows: Rows) -> dict[str, str]:
    """The date, the commit, and the version of each library."""
    libraries = sorted({r["library"] for r in rows.values()} - {*OWN})
    return {"date": date.today().isoformat(), "commit": commit()} | {
        name: _version(name) for name in ("torch", "transformers", *libraries)
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def ran(rows: Rows) -> dict[str, Row]:
    """The models that were checked, or that died while they were; the rest could not be built."""
    return {name: row for name, row in rows.items() if row.get("ran") or row.get("error")}


def summary(rows: Rows) -> dict[str, Any]:
    """Counts; percentages are of the models that ran."""
    some = ran(rows).values()
    libraries = {r["library"] for r in some}
    result: dict[str, Any] = {"models": len(rows), "libraries": len(libraries - {*OWN}), "ran": len(some)}
    result["with every edit"] = _share(sum(r["verdict"] == "pass" for r in some), len(some))
    result["ever wrong"] = sum(r["verdict"] == "wrong" for r in some)
    for verdict in ("error", "incomplete", "refused"):
        result[verdict] = sum(r["verdict"] == verdict for r in some)
    result["roles exact"] = _share(sum(_roles(r) == "exact" for r in some), len(some))
    result["without torch.compile"] = sum(not r.get("dynamo", True) for r in some)
    for name, trial in TRIALS.items():
        result[f"{name}: {trial.title}"] = _share(sum(_edit(r, name) == "pass" for r in some), len(some))
    return result


def _share(some: int, of: int) -> str:
    return f"{some}/{of} ({100 * some / max(1, of):.1f} %)"


def _roles(row: Row) -> str:
    return row.get("roles", {}).get("verdict", "error")


def _edit(row: Row, name: str) -> str:
    """The verdict on one edit; on the model where no edit was tried."""
    edits = row.get("edits")
    return edits.get(name, {}).get("verdict", "not run") if edits else row["verdict"]


def markdown(rows: Rows, broken: Mapping[str, str]) -> Iterator[str]:
    yield "# Models of other libraries"
    yield ""
    yield (
        "Models that are not transformers', each with a role table that was written from its source. Made by "
        "`python -m benchmarks.foreign`; the reasons in full are in `foreign.json`."
    )
    yield ""
    yield ", ".join(f"{name} {value}" for name, value in versions(rows).items())
    yield ""
    yield table(["", "value"], [[name, str(value)] for name, value in summary(rows).items()])
    yield ""
    yield _EXPLANATION
    yield ""
    yield table(["library", "models", "ran", "with every edit", "wrong"], list(_by_library(rows)))
    yield ""
    yield table(["model", "roles", *TRIALS, "all"], [_line(name, row) for name, row in ran(rows).items()])
    yield ""
    yield from _failures(rows)
    yield from _not_run(rows, broken)


_EXPLANATION = (
    "`ok`: the roles are those of the table, with their rows; at the start the model is the base; with "
    "drawn parameters the output changes in train, eval and no_grad, and equals plain arithmetic on weights "
    "and forward hooks at the places of the table, to 1e-10 in float64, and so do the gradients; deep copies, "
    "pickles, torch.compile and folding give the same; after `remove` the model is the base bit for bit. "
    "`refused`: a diagnostic says what cannot be done. `missing`: a place has no site, and the edit says so. "
    "A model passes where its roles are exact, no module with weights is opaque, every attention has queries, "
    "and a to d are `ok`."
)


def _by_library(rows: Rows) -> Iterator[list[str]]:
    for library in sorted({row["library"] for row in rows.values()}):
        own = {name: row for name, row in rows.items() if row["library"] == library}
        counts = Counter(row["verdict"] for row in ran(own).values())
        yield [library, *map(str, (len(own), len(ran(own)), counts["pass"], counts["wrong"]))]


def _line(name: str, row: Row) -> list[str]:
    roles = row.get("roles", {})
    mark = "opaque" if roles.get("opaque") else "no q" if roles.get("without_q") else _roles(row)
    return [name, mark, *(MARKS.get(_edit(row, trial), "–") for trial in TRIALS), MARKS.get(row["verdict"], "–")]


def _failures(rows: Rows) -> Iterator[str]:
    yield "## Failures"
    yield ""
    for name, row in ran(rows).items():
        reasons = list(_reasons(row))
        if reasons:
            yield f"* `{name}`: {row['verdict']}"
            yield from (f"  * {where}: {_plain(reason)}" for where, reason in reasons)
    yield ""


def _reasons(row: Row) -> Iterator[tuple[str, str]]:
    """(roles or the names of edits, reason) of what does not pass."""
    if row.get("error"):
        yield "all", row["error"]
    roles = row.get("roles", {})
    if roles.get("reason"):
        yield "roles", roles["reason"]
    for kind in ("wrong", "missing", "opaque", "without_q"):
        if roles.get(kind):
            yield f"roles, {kind}", "; ".join(roles[kind])
    by_reason = defaultdict[str, list[str]](list)
    for name, edit in row.get("edits", {}).items():
        if edit["verdict"] != "pass":
            by_reason[f"{edit['verdict']}: {edit['reason']}"].append(name)
    yield from ((", ".join(names), reason) for reason, names in by_reason.items())


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _not_run(rows: Rows, broken: Mapping[str, str]) -> Iterator[str]:
    yield "## Not imported, not built or not run"
    yield ""
    for module, reason in broken.items():
        yield f"* all of `{module}`: {_plain(reason)}"
    for name, row in rows.items():
        if name not in ran(rows):
            yield f"* `{name}`: {_plain(row.get('why_not', ''))}"


def grouped(rows: Rows) -> Iterator[str]:
    """Failures by message, the largest group first."""
    groups = defaultdict[str, list[str]](list)
    for name, row in rows.items():
        if row.get("why_not"):
            groups[f"not run: {row['why_not']}"].append(name)
        for where, reason in _reasons(row):
            groups[_shape(reason)].append(f"{name}[{where}]")
    for reason, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        yield f"## {len(names)} × {reason}"
        yield "  " + ", ".join(names)


def _shape(reason: str) -> str:
    """A reason without the numbers of one model."""
    return re.sub(r"(?<![A-Z])\b\d+(\.\d+e[-+]\d+)?\b", "#", reason)
