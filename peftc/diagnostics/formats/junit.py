"""Diagnostics as a JUnit report: a test suite for each spec, and a test for each model it is for.

Source: the report format of Ant's JUnit task, as Jenkins, GitLab and GitHub's reporters read it.
"""

from xml.etree import ElementTree

from peftc.diagnostics.diagnostic import Diagnostic, printable
from peftc.diagnostics.formats.report import Case, Report


def render_junit(report: Report) -> str:
    """A test fails if its diagnostics make the exit code 1; other diagnostics are its output."""
    root = ElementTree.Element("testsuites", name="peftc")
    suites: dict[str, list[Case]] = {}
    for case in report.cases:
        suites.setdefault(case.path, []).append(case)
    for path, cases in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": printable(path), **_counts(report, cases)})
        for case in cases:
            _add_test(suite, report, case)
    root.attrib.update(_counts(report, report.cases))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _counts(report: Report, cases: list[Case] | tuple[Case, ...]) -> dict[str, str]:
    failures = sum(any(map(report.fails, case.diagnostics)) for case in cases)
    return {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": "0", "time": "0"}


def _add_test(suite: ElementTree.Element, report: Report, case: Case) -> None:
    name = "spec" if case.model is None else f"on {printable(case.model)}"
    test = ElementTree.SubElement(suite, "testcase", classname=printable(case.path), name=name, time="0")
    failures = [one for one in case.diagnostics if report.fails(one)]
    others = [one for one in case.diagnostics if not report.fails(one)]
    if failures:
        message = printable(failures[0].message)
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        failure = ElementTree.SubElement(test, "failure", message=message + more, type=failures[0].code)
        failure.text = _text(failures)
    if others:
        ElementTree.SubElement(test, "system-out").text = _text(others)


def _text(diagnostics: list[Diagnostic]) -> str:
    return "\n".join(map(str, diagnostics))
