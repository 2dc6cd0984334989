"""The page of the Python API, `docs/python-api.md`, made of signatures and docstrings.

python -m tools.python_api_page > docs/python-api.md
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast, get_args

import peftc
from peftc import forms
from peftc.addressing.sites import ActivationRef, ModuleInfo, Site, SiteTable, State, UntracedModule, WeightRef
from peftc.diagnostics.diagnostic import Source, Span
from peftc.exchange import (
    EditInspection,
    ExportedModule,
    ExportReport,
    ImportedAdapter,
    Inspection,
    LayerInspection,
)
from peftc.explore import TracedRegion
from peftc.folding import dispatch
from peftc.folding.report import Change, Folded, FoldReport, Refused
from peftc.forms.affine_module import Affine
from peftc.forms.module import FormModule
from peftc.forms.selective_module import SelectiveModule
from peftc.forms.shapes import Shape
from peftc.installation.contents import InstalledRegion
from peftc.merging import MergedTensor, MergeReport
from peftc.pictures.picture import Picture
from peftc.planning.report import plan
from peftc.planning.report.design import Design
from peftc.planning.report.plan_sites import PlanSite, PlanSiteRange, PlanSites
from peftc.rewriting.passes.region import Region
from peftc.verification.report import Check, Finding, NotWitnessed, Verification, VerifiedEdit

HEAD = """# Python API

This page is made of signatures and docstrings by `make docs`; a test compares. `import peftc` has everything under
*Functions* and *Errors*. It does not import torch until a function needs it.

Some types have names:

| type | what it is |
|---|---|
| `SpecLike` | the path of a file, or the text of a spec, or a tree from `peftc.parse` |
| `ModelLike` | a module, a configuration, or a name: a hub id, a folder, a config.json |
| `Settings` | a dictionary of parameters of the spec's method, such as `{"r": 8}` |
| `Include` | several folders |
| `Batch` | the keyword arguments of one forward |

Errors are a `PeftcError` with one of the codes listed; `peftc explain CODE` says what a code means.
"""

CHECKPOINTS = ("checkpoint_adapters", "CheckpointCallback")
FUNCTIONS = {  # every function that peftc exports, by what it is for
    "Plan and inspect": ("plan", "sites", "design", "show", "parse"),
    "Compile": ("compile", "remove", "disabled", "set_enabled", "parameters", "specs"),
    "Train": ("step", "StepCallback", "losses", "calibrate", "fuse", "warm_start", *CHECKPOINTS),
    "Save and load": ("save", "load", "from_pretrained", "push", "inspect", "save_standalone"),
    "Fold": ("fold", "merge"),
    "Exchange with other programs": ("export", "import_adapter", "convert"),
    "Several adapters": (
        "attach",
        "attached",
        "activate",
        "adapter",
        "swap",
        "detach",
        "combine",
        "reference",
        "AdapterStore",
    ),
    "Tasks": ("task", "set_task", "tasks", "add_task", "drop_task"),
    "Verify": ("verify",),
    "Passes": ("apply", "trace", "rewrite", "graphs"),
}
FORMS = """## Forms in Python

What no equation says, such as a state that training changes, is a class: see the
[tutorial](tutorial.md#a-form-in-python). The built-in forms that are no texts are such classes, too.
"""
OF_FORMS: dict[str, Any] = {
    **{f"peftc.forms.{name}": getattr(forms, name) for name in ("register", "register_entry_point", "unregister")},
    **{f"peftc.forms.{name}": getattr(forms, name) for name in ("Form", "Argument", "Parameter", "Dims", "Count")},
    "peftc.forms.PlacementError": forms.PlacementError,
    "peftc.forms.FormModule": FormModule,
    "peftc.forms.SelectiveModule": SelectiveModule,
    "peftc.forms.affine_module.Affine": Affine,
    **{f"peftc.forms.shapes.{shape.__name__}": shape for shape in get_args(Shape)},
}
ERRORS = ("PeftcError", "PeftcWarning", "Diagnostic")
RESULTS: dict[str, tuple[type, ...]] = {
    "Diagnostics": (Source, Span),
    "Of `plan`": (
        plan.Plan,
        plan.PlanSpec,
        plan.PlanModel,
        plan.PlanEdit,
        PlanSites,
        PlanSite,
        PlanSiteRange,
        plan.PlanTotals,
        plan.PlanExpectation,
        plan.PlanUnread,
    ),
    "Of `sites`": (SiteTable, Site, State, ActivationRef, WeightRef, ModuleInfo, UntracedModule),
    "Of `design`": (Design,),
    "Of `show`": (Picture,),
    "Of `fold`": (FoldReport, Folded, Refused, Change, dispatch.State),
    "Of `merge`": (MergeReport, MergedTensor),
    "Of `inspect`": (Inspection, EditInspection, LayerInspection),
    "Of `export` and `import_adapter`": (ExportReport, ExportedModule, ImportedAdapter),
    "Of `verify`": (Verification, VerifiedEdit, NotWitnessed, Check, Finding),
    "Of `apply`": (Region,),
    "Of `trace` and `graphs`": (TracedRegion, InstalledRegion),
}
SECTIONS = ("Args", "Attributes", "Shapes", "Returns", "Raises", "Warns", "Source")


@dataclass(frozen=True)
class Docstring:
    """The text of a docstring, and its sections."""

    text: str
    sections: dict[str, str]

    def entries(self, section: str) -> dict[str, str]:
        """`name: text` of each entry of a section."""
        texts = re.split(r"^(?=[\w*][\w*, ]*: )", self.sections.get(section, ""), flags=re.M)
        pairs = (entry.partition(": ") for entry in texts if entry.strip())
        return {name: " ".join(text.split()) for name, _, text in pairs}


def docstring(thing: object) -> Docstring:
    parts = re.split(rf"^({'|'.join(SECTIONS)}):", inspect.getdoc(thing) or "", flags=re.M)
    bodies = (inspect.cleandoc(f"\n{body}" if body.startswith("\n") else body) for body in parts[2::2])
    return Docstring(parts[0].strip(), dict(zip(parts[1::2], bodies, strict=True)))


def page() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD, "## Functions\n"]
    for title, names in FUNCTIONS.items():
        parts += [f"### {title}\n", *(function_section(name) for name in names)]
    parts += [FORMS, *(f"{section(thing, name)}\n" for name, thing in OF_FORMS.items())]
    parts += ["## Errors\n", *(class_section(getattr(peftc, name), f"peftc.{name}") for name in ERRORS)]
    parts.append("## Results\n")
    for title, classes in RESULTS.items():
        parts += [f"### {title}\n", *(class_section(cls, cls.__name__) for cls in classes)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def function_section(name: str) -> str:
    return section(getattr(peftc, name), f"peftc.{name}")


def section(thing: Any, name: str) -> str:
    if inspect.isclass(thing):
        return class_section(thing, name)
    return "\n".join([f"#### `{name}`", "", *function_lines(name.rpartition(".")[2], thing)])


def function_lines(name: str, function: Callable[..., Any]) -> Iterator[str]:
    signature, doc = inspect.signature(function), docstring(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    short = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])
    annotations = annotations_of(function)
    returns = "" if annotations["return"] == "None" else f" -> {annotations['return']}"
    yield from (f"`{name}{short}{returns}`", "", doc.text, "")
    if described := doc.entries("Args"):
        types = {p.name: f"`{annotations[p.name]}`".replace("|", r"\|") for p in parameters}
        yield from table("argument", ((f"`{arg}`", types[arg], text) for arg, text in described.items()))
    yield from section_lines(doc)


def section_lines(doc: Docstring) -> Iterator[str]:
    for section in ("Shapes", "Returns", "Raises", "Warns", "Source"):
        if body := doc.sections.get(section):
            lines = body.splitlines() if section == "Shapes" else [" ".join(body.split())]
            text = "; ".join(line.strip() for line in lines).removeprefix("PeftcError: ")
            yield from (f"- {section}: {text}",)
    yield ""


def table(title: str, rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    yield from (f"| {title} | type | |", "|---|---|---|")
    yield from (f"| {name} | {kind} | {text} |" for name, kind, text in rows)
    yield ""


def class_section(cls: type, name: str) -> str:
    doc = docstring(cls)
    lines = [f"#### `{name}`", "", doc.text, ""]
    described = comments_of(cls) | doc.entries("Attributes")
    if rows := [(f"`{key}`", f"`{kind}`", described.get(key, "")) for key, kind in attributes_of(cls).items()]:
        lines += table("attribute", iter(rows))
    lines += [line for line in section_lines(doc) if line]
    if lines[-1]:
        lines.append("")
    for key, member in vars(cls).items():
        if key.startswith("_") or key == "model_post_init" or not inspect.getdoc(member):  # pydantic's own
            continue
        if isinstance(member, property):
            lines += [f"`.{key}`: {' '.join(docstring(member).text.split())}", ""]
        elif inspect.isfunction(member):
            lines += [*function_lines(f".{key}", member)]
    return "\n".join(lines)


def attributes_of(cls: type) -> dict[str, str]:
    """The types of the attributes that `repr` shows."""
    hidden = {name for name, item in getattr(cls, "__dataclass_fields__", {}).items() if not item.repr}
    hidden |= {"model_config", "format_version"}
    types = [pair for pair in annotations_of(cls).items() if not pair[0].startswith("_")]
    return {name: str(kind).replace("|", r"\|") for name, kind in types if name not in hidden}


def annotations_of(thing: type | Callable[..., Any]) -> dict[str, str]:
    """Annotations as the source has them: of the attributes of a class, or of a function."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    if isinstance(node, ast.ClassDef):
        fields = (part for part in node.body if isinstance(part, ast.AnnAssign))
        return {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    assert isinstance(node, ast.FunctionDef)
    arguments = (part for part in ast.walk(node.args) if isinstance(part, ast.arg) and part.annotation)
    annotations = {argument.arg: ast.unparse(cast(ast.expr, argument.annotation)) for argument in arguments}
    return annotations | {"return": ast.unparse(node.returns) if node.returns else "None"}


def comments_of(cls: type) -> dict[str, str]:
    """The comments beside the attributes of a class."""
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M))


if __name__ == "__main__":
    print(page(), end="")
