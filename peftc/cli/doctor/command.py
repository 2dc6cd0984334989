"""The command `doctor`: what a report of a bug needs to say, and whether peftc works here."""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from peftc.cli.doctor.environment import Cache, Device, Environment, environment
from peftc.cli.doctor.self_test import Step, self_test
from peftc.diagnostics.suggestions import plural
from peftc.forms.registry import PYTHON_FORMS, class_path, is_built_in

Tests = Mapping[str, Sequence[Step]]  # by device


def run_doctor(args: Namespace) -> int:
    """Exit code 1 if a step of the self test, or a file of peftc, is not as it should be."""
    place = environment()
    tests = {device.name: self_test(device.name) for device in place.devices}
    registered = {name: class_path(form) for name, form in PYTHON_FORMS.items() if not is_built_in(form)}
    ok = place.language.problem is None and all(step.ok for steps in tests.values() for step in steps)
    if args.json:
        steps = {name: [asdict(step) for step in own] for name, own in tests.items()}
        values = {**asdict(place), "registered_forms": registered, "self_test": steps, "ok": ok}
        print(json.dumps(values, indent=2))
    else:
        sections = dict(_sections(place, tests, registered))
        print("\n\n".join("\n".join([name, *(f"  {line}" for line in lines)]) for name, lines in sections.items()))
    return 0 if ok else 1


def _sections(place: Environment, tests: Tests, registered: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    yield (
        f"peftc {place.peftc}",
        [f"package   {place.package}", f"python    {place.python}", f"platform  {place.platform}"],
    )
    yield "libraries", _libraries(place)
    yield "devices", [_device(device) for device in place.devices]
    yield "cache", [_cache(place.cache)]
    problem = place.language.problem
    count = f"{plural(place.language.recipes, 'recipe')} and {plural(place.language.forms, 'form')}"
    yield "language", [f"failed: {problem}" if problem else f"ok: {count}"]
    forms = [f"{name}: {text}, registered by `--forms {name}`" for name, text in place.forms.items()]
    forms += [f"{name}: {path}, registered" for name, path in registered.items()]
    yield "forms of other packages", forms or ["none"]
    for device, steps in tests.items():
        width = max(len(step.name) for step in steps)
        lines = [f"{'ok' if step.ok else 'failed':6}  {step.name:{width}}  {step.detail}" for step in steps]
        yield f"self test on {device}", lines


def _libraries(place: Environment) -> list[str]:
    present = [one for one in place.libraries if one.version is not None or one.extra is None]
    width = max(len(one.name) for one in present)
    lines: list[str] = []
    for one in present:
        needs = f"  peftc needs {one.requirement}" if one.is_unsuitable else ""
        lines.append(f"{one.name:{width}}  {one.version or 'not installed'}{needs}")
    absent = [one.name for one in place.libraries if one not in present]
    return [*lines, f"not installed: {', '.join(absent)}"] if absent else lines


def _device(device: Device) -> str:
    memory = "" if device.memory is None else f", {device.memory / 2**30:.1f} GiB"
    return f"{device.name}  {device.model}{memory}: {', '.join(device.dtypes)}"


def _cache(cache: Cache) -> str:
    if cache.folder is None:
        return "off"
    writable = "" if cache.writable else ", not writable"
    unusable = f", {cache.unusable:,} unusable" if cache.unusable else ""
    entries = "1 entry" if cache.entries == 1 else f"{cache.entries:,} entries"
    return f"{cache.folder}: {entries}{unusable}, {cache.size / 1e6:.1f} MB{writable}"
