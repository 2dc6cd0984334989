"""What there is to say about one version of a text: the report of `peftc check`, and plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from peftc.checking.policy import Policy
from peftc.checking.run import Checker
from peftc.checking.targets import Target
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.bugs import bug_of
from peftc.diagnostics.formats.report import Report
from peftc.filesystem.open_texts import OpenTexts, reading
from peftc.language_server.documents import Document, Settings
from peftc.semantics.files import Include, decode
from peftc.syntax import ast

if TYPE_CHECKING:
    from peftc.planning.planner import PlanResult


class ModelPlan(NamedTuple):
    """The plan of a spec on a model.

    Attributes:
        flat: the expanded spec.
        model: its name.
        result: the plan.
    """

    flat: ast.Spec
    model: str
    result: PlanResult


@dataclass(frozen=True)
class Analysis:
    """What is known of a version of a text.

    Attributes:
        document: the version.
        report: its diagnostics.
        targets: the models that it is for.
        plans: on those models on which it has no error.
        reads: the real paths of the files that it depends on.
        on_models: whether the models are in the report.
    """

    document: Document
    report: Report
    targets: tuple[Target, ...] = ()
    plans: tuple[ModelPlan, ...] = ()
    reads: frozenset[str] = frozenset()
    on_models: bool = False

    @property
    def has_errors(self) -> bool:
        return any(one.severity == "error" for one in self.report.diagnostics)


@dataclass
class Setup:
    """What a text is checked with: its configuration, else the settings of the client.

    Attributes:
        errors: what is wrong with the configuration.
    """

    include: Include
    policy: Policy
    targets: Callable[[str], tuple[Target, ...]]
    errors: tuple[Diagnostic, ...] = ()


def analyse(document: Document, settings: Settings, texts: Mapping[str, str], on_models: bool) -> Analysis:
    """The analysis of a version.

    Args:
        settings: of the client.
        texts: what is open, by real paths.
        on_models: whether to check on models, which may take long at first.
    """
    opened = OpenTexts(texts)
    with reading(opened):
        setup = setup_of(document, settings)
        plans: list[ModelPlan] = []
        observe: Callable[..., None] = lambda flat, model, plan: plans.append(ModelPlan(flat, model, plan))  # noqa: E731
        targets = setup.targets(document.path)
        none: tuple[Target, ...] = ()
        checker = Checker(lambda path: targets if on_models else none, setup.include, setup.policy, observe=observe)
        checker.add(document.path, setup.errors)
        try:
            decode(document.text.encode("utf-8", "surrogatepass"), document.path)
            checker.check(document.text, document.path)
        except PeftcError as error:
            checker.add(document.path, error.diagnostics)
        except Exception as error:  # the text before is not changed, and the next one may be well
            checker.add(document.path, (bug_of(error),))
        report = checker.report()
    return Analysis(document, report, targets, tuple(plans), frozenset(opened.reads), on_models)


def setup_of(document: Document, settings: Settings) -> Setup:
    """What a text is checked with."""
    if document.folder is None:
        return Setup(None, Policy(), _targets_of(settings))
    try:
        configuration = _configuration(document.folder)
    except PeftcError as error:
        return Setup((), Policy(), _targets_of(settings), error.diagnostics)
    if configuration is None:
        return Setup((), Policy(), _targets_of(settings))
    options = configuration.options
    errors = [code for code, value in options.severity.items() if value == "error"]
    policy = Policy(options.select, options.ignore, errors)
    targets = _targets_of(settings) if settings.models else lambda path: tuple(configuration.targets(path))
    return Setup(configuration.include, policy, targets)


def _configuration(folder: Path) -> Any:
    """The configuration of the nearest folder. Raises: PeftcError P130, P131, P132."""
    return import_module("peftc.checking.configuration").find_configuration(folder)


def _targets_of(settings: Settings) -> Callable[[str], tuple[Target, ...]]:
    targets = tuple(Target(model, settings.tasks) for model in dict.fromkeys(settings.models))
    return lambda path: targets


@dataclass
class Published:
    """The diagnostics that the client shows: by the file, and by the text that they are of."""

    of: dict[str, dict[str, list[Diagnostic]]] = field(default_factory=dict[str, dict[str, list[Diagnostic]]])

    def replace(self, source: str, diagnostics: Mapping[str, list[Diagnostic]]) -> set[str]:
        """Replaces those of a text. Returns the files whose diagnostics have changed."""
        changed = set(diagnostics)
        for uri, sources in self.of.items():
            if sources.pop(source, None) is not None:
                changed.add(uri)
        for uri, own in diagnostics.items():
            self.of.setdefault(uri, {})[source] = own
        return changed

    def diagnostics(self, uri: str) -> list[Diagnostic]:
        """Those of a file, each once: that of its own text before those of texts that use it."""
        sources = self.of.get(uri, {})
        once: dict[tuple[object, ...], Diagnostic] = {}
        for source in sorted(sources, key=lambda source: source != uri):
            for one in sources[source]:
                path = one.source.path if one.source is not None else None
                once.setdefault((one.code, one.message, path, one.span), one)
        return list(once.values())
