"""Files of plans, which are compared with later ones: of `peftc plan -o FILE` and `peftc lock`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from peftc.comparison.record import PlanRecord
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.atomic import replace_text
from peftc.filesystem.bounded_read import read_regular
from peftc.planning.report.plan_sites import Record
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec

ENDING = ".lock.json"
LARGEST = 64 << 20  # bytes


class PlanFile(Record):
    """An expanded spec, and what it does to some models.

    Attributes:
        format_version: of this data.
        path: of the spec, as it was named.
        versions: of the distributions that had made the plans. They are not compared.
        tasks: the tasks of edits `per task`.
        spec: the lines of the expanded spec.
        plans: for each model.
    """

    format_version: Literal["1.0"] = "1.0"
    path: str
    versions: dict[str, str]
    tasks: tuple[str, ...] = ()
    spec: tuple[str, ...]
    plans: tuple[PlanRecord, ...]

    def parsed(self) -> ast.Spec:
        """The expanded spec. Raises: P0xx."""
        return parse_text("\n".join(self.spec) + "\n", self.path)

    def plan(self, model: str) -> PlanRecord | None:
        """The plan on a model, if it is there."""
        return next((plan for plan in self.plans if plan.model.id == model), None)


def plan_file(path: str, flat: ast.Spec, plans: Iterable[PlanRecord], tasks: Iterable[str] = ()) -> PlanFile:
    """A file of these plans, with the versions that are installed."""
    return PlanFile(
        path=path,
        versions={name: metadata.version(name) for name in ("peftc", "torch", "transformers")},
        tasks=tuple(tasks),
        spec=tuple(print_spec(flat).splitlines()),
        plans=tuple(plans),
    )


def write_plan_file(path: Path, content: PlanFile) -> None:
    """Writes the file as a whole, or not at all. Raises: OSError."""
    data = content.model_dump(mode="json")
    replace_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_plan_file(path: Path) -> PlanFile:
    """Raises: P851 for a file that is none; OSError."""
    try:
        return PlanFile.model_validate_json(read_regular(path, LARGEST))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        note = f"{place}: {first['msg']}" if place else first["msg"]
        raise PeftcError(
            Diagnostic("P851", f"{path} is no file of plans", notes=(note,), help="write it again, by `peftc plan -o`")
        ) from error


def lock_path(spec: str | Path) -> Path:
    """`mam.lock.json` beside `mam.peft`."""
    return Path(spec).with_suffix(ENDING)
