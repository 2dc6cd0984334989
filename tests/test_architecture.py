"""The architecture of the package: imports flow one way, packages that need no torch import none,
`__init__` files only re-export.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import peftc

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "peftc").rglob("*.py"))

# A module may import from its own stage and from stages to its left. The longest prefix decides.
STAGES = (
    "peftc.diagnostics",
    "peftc.concurrency",
    "peftc.filesystem",
    "peftc.modules",
    "peftc.fakes",
    "peftc.syntax",
    "peftc.syntax_highlighting",
    "peftc.forms",
    "peftc.task_modules",
    "peftc.equations",
    "peftc.equation_code",
    "peftc.models",
    "peftc.semantics",
    "peftc.tracing",
    "peftc.addressing",
    "peftc.cache",
    "peftc.dataflow",
    "peftc.observation",
    "peftc.runtime",
    "peftc.planning",
    "peftc.comparison",
    "peftc.pictures",
    "peftc.recognition",
    "peftc.rewriting",
    "peftc.sharding",
    "peftc.specialization",
    "peftc.installation",
    "peftc.compiler",
    "peftc.adapters",
    "peftc.explore",
    "peftc.passes",
    "peftc.illustration",
    "peftc.training",
    "peftc.folding",
    "peftc.merging",
    "peftc.exchange",
    "peftc.attachment",
    "peftc.verification",
    "peftc.standalone",
    "peftc.checking",
    "peftc",
    "peftc.language_server",
    "peftc.cli",
    "peftc.__main__",
)

TORCH_FREE = (
    "peftc.diagnostics",
    "peftc.filesystem",
    "peftc.syntax",
    "peftc.syntax_highlighting",
    "peftc.forms",
    "peftc.equations",
    "peftc.semantics",
    "peftc.addressing",
    "peftc.cache",
    "peftc.planning",
    "peftc.comparison",
    "peftc.checking",
    "peftc.language_server",
    "peftc.pictures",
)
MOST_FILES = 15  # of a package, but for `forms`


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def stage(module: str) -> str:
    stages = [s for s in STAGES if module == s or (s != "peftc" and module.startswith(f"{s}."))]
    return max(stages, key=len)


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of peftc that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:  # `from peftc.planning import ir` imports a module
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


MODULES = {name_of(path) for path in FILES}


def torch_free() -> list[str]:
    # Files `*_module.py` of forms and equations use torch; what plans names them as text.
    return sorted(m for m in MODULES if stage(m) in TORCH_FREE and not m.endswith(("_module", "forms.module")))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_flow_one_way(path: Path) -> None:
    here = stage(name_of(path))
    for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
        if module.startswith("peftc"):
            there = stage(module)
            assert STAGES.index(there) <= STAGES.index(here), f"{name_of(path)} ({here}) imports {module} ({there})"


def test_stages_are_complete() -> None:
    assert {stage(m) for m in MODULES} <= set(STAGES)


def test_no_module_is_in_a_cycle() -> None:
    """A topological sort of imports: modules left over are in a cycle, or import one."""
    imports = {name_of(path): set(imported(ast.parse(path.read_text(encoding="utf-8")))) & MODULES for path in FILES}
    imports = {module: others - {module} for module, others in imports.items() if module != "peftc"}
    while ready := {module for module, others in imports.items() if not others & imports.keys()}:
        imports = {module: others for module, others in imports.items() if module not in ready}
    assert not imports, sorted(imports)


def test_packages_stay_small() -> None:
    counts = Counter(path.parent for path in FILES if path.name != "__init__.py")
    crowded = {str(folder): n for folder, n in counts.items() if n > MOST_FILES and folder.name != "forms"}
    assert not crowded


def test_planning_knows_no_torch() -> None:
    modules = torch_free()
    assert len(modules) > 20
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module(m)\n"
    code += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "__init__.py"], ids=name_of)
def test_packages_only_reexport(path: Path) -> None:
    allowed = {"__all__", "__version__", "__getattr__", "__dir__"}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            names = {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            names = {node.name}
        else:
            assert isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.If), ast.unparse(node)
            continue
        assert all(n in allowed or n.startswith("_") for n in names), ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


VERIFICATION = [path for path in FILES if name_of(path).startswith("peftc.verification")]
REWRITER = ("peftc.rewriting", "peftc.specialization", "peftc.installation", "peftc.runtime")
ANALYSIS = ("peftc.tracing", "peftc.observation", "peftc.recognition", "peftc.explore", "peftc.cli")


@pytest.mark.parametrize("path", VERIFICATION, ids=name_of)
def test_verification_shares_no_code_with_the_rewriter(path: Path) -> None:
    """Of the packages that rewrite and run edits, verification imports only the record of an
    installation and public functions.
    """
    public = set(peftc.__all__)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        names = {alias.name for alias in node.names}
        if node.module.startswith(REWRITER):
            record = {"Installation", "installation_of", "is_installed", "refuse_passes", "states"}
            assert node.module.startswith("peftc.installation"), node.module
            assert names <= public | record, (node.module, names)
        elif node.module.startswith(("peftc.compiler", "peftc.training", "peftc.adapters", "peftc.folding")):
            assert names <= public, (node.module, names)
        assert not node.module.startswith(ANALYSIS), node.module


def test_no_package_hides_a_public_function() -> None:
    """`import peftc.x` sets the attribute `x` of the package, which would replace a public function
    `x`.
    """
    assert not {name_of(path).split(".")[1] for path in FILES if len(path.relative_to(ROOT).parts) > 2} & set(
        peftc.__all__
    )
