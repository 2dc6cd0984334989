"""Python forms outside of the package: they plan, train, save, load and fold as built-in ones do,
and what is wrong with them has a code.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.cli.main import main
from peftc.diagnostics import PeftcError
from peftc.forms import PYTHON_FORMS, Args, Argument, Dims, Form, FormModule, Parameter
from tests import zoo
from tests.forms import python_forms
from tests.forms.python_forms import Drift, DriftModule, LowRank, Mask, Mixed, Signs, SignsModule

TOLERANCE = 1e-10
LOW_RANK = "edit e at layer[*].attn.q | layer[*].ffn.up { h += low_rank(x, r=2) }"
DRIFT = "edit e at layer[*].attn.o { h += drift(h) }"


@pytest.fixture(autouse=True)
def _registry() -> None:
    for form in (LowRank, Drift, Mixed, Mask):
        peftc.forms.register(form)


def compiled(spec: str, name: str = "bert", shake: bool = True) -> nn.Module:
    model = zoo.build(name, torch.float64).eval()
    peftc.compile(f"peft 2\n{spec}\n", model, seed=1)
    if shake:
        with torch.no_grad():
            for i, parameter in enumerate(peftc.parameters(model).values()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).to(parameter))
    return model


def logits(model: nn.Module, name: str = "bert") -> torch.Tensor:
    return model(**zoo.inputs(name, model)).logits


def codes(spec: str, model: nn.Module | None = None) -> list[str]:
    with pytest.raises(PeftcError) as error:
        peftc.compile(f"peft 2\n{spec}\n", zoo.build("bert", torch.float64) if model is None else model)
    return [diagnostic.code for diagnostic in error.value.diagnostics]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_form_like_lora_equals_the_built_in_one(name: str) -> None:
    own, built_in = compiled(LOW_RANK, name), compiled(LOW_RANK.replace("low_rank", "lora"), name)
    ours, theirs = peftc.parameters(own), peftc.parameters(built_in)
    assert [key.replace("low_rank", "lora") for key in ours] == list(theirs)
    plans = [
        peftc.plan(f"peft 2\n{LOW_RANK.replace('low_rank', form)}\nexpect identity(e) expect foldable(e)", own)
        for form in ("low_rank", "lora")
    ]
    assert plans[0].edits[0].trained == plans[1].edits[0].trained == sum(p.numel() for p in ours.values())
    assert all(e.holds for plan in plans for e in plan.expectations)
    before = logits(own, name)
    torch.testing.assert_close(before, logits(built_in, name), rtol=0, atol=TOLERANCE)
    before.square().mean().backward()
    logits(built_in, name).square().mean().backward()
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=TOLERANCE)
    assert peftc.verify(own).ok
    peftc.fold(own)
    torch.testing.assert_close(logits(own, name), before, rtol=0, atol=TOLERANCE)


def test_a_state_that_training_changes(tmp_path: Path) -> None:
    model = compiled(DRIFT, shake=False)
    model.train()
    forms = [m for m in model.modules() if isinstance(m, DriftModule)]
    optimizer = torch.optim.SGD(peftc.parameters(model).values(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        terms = peftc.losses(model)
        assert list(terms) == ["e.size"]
        torch.testing.assert_close(terms["e.size"], torch.stack([f.g.square().sum() for f in forms]).sum())
        (logits(model).square().mean() + terms["e.size"]).backward()
        optimizer.step()
        peftc.step(model, step)
    assert all(int(form.get_buffer("steps")) == 3 and bool(form.get_buffer("m").any()) for form in forms)
    model.eval()
    expected = logits(model)
    peftc.save(model, tmp_path / "adapter")
    loaded = zoo.build("bert", torch.float64).eval()
    peftc.load(tmp_path / "adapter", loaded)
    assert torch.equal(logits(loaded), expected)
    for copied in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(logits(copied), expected)
    peftc.fold(loaded)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=TOLERANCE)


def test_what_sites_have_in_common() -> None:
    model = compiled("edit e at layer[*].attn.q { h += mixed(x) }")
    parameters = peftc.parameters(model)
    whole = [p for name, p in parameters.items() if name.endswith(".whole")]
    layers = sum(name.endswith(".g") for name in parameters)
    assert len(whole) == 1
    assert layers > 1
    d_out, d_in = whole[0].shape
    assert peftc.plan("peft 2\nedit e at layer[*].attn.q { h += mixed(x) }\n", model).edits[0].trained == (
        d_out * d_in + layers * d_out
    )
    logits(model).square().mean().backward()
    assert whole[0].grad is not None
    assert bool(whole[0].grad.any())


def test_tasks_have_parameters_of_their_own() -> None:
    model = zoo.build("bert", torch.float64).eval()
    spec = "peft 2\nedit e at layer[*].attn.q per task { h += low_rank(x, r=2) }\n"
    peftc.compile(spec, model, seed=1, tasks=("a", "b"))
    with torch.no_grad():
        for i, parameter in enumerate(peftc.parameters(model).values()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).to(parameter))
    outputs: list[torch.Tensor] = []
    for task in ("a", "b"):
        with peftc.task(model, task):
            outputs.append(logits(model))
    assert not torch.allclose(*outputs)


def test_calibration_selects_through_the_door() -> None:
    model = compiled("edit e at layer[*].attn.q { w += mask(count=5) }", shake=False)
    batch = {**zoo.inputs("bert", model), "labels": zoo.inputs("bert", model)["input_ids"]}
    counts = peftc.calibrate(model, [batch])
    masks = [buffer for name, buffer in model.named_buffers() if name.endswith("mask") and buffer.dtype == torch.bool]
    assert counts == {"e": 5 * len(masks)}
    assert [int(mask.sum()) for mask in masks] == [5] * len(masks)
    plan = peftc.plan("peft 2\nedit e at layer[*].attn.q { w += mask(count=5) }\n", zoo.build("bert", torch.float64))
    assert plan.edits[0].changed == 5 * len(masks)


def test_an_adapter_names_its_python_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(DRIFT)
    peftc.save(model, tmp_path / "adapter")
    data = json.loads((tmp_path / "adapter" / "adapter.json").read_text())
    assert data["python_forms"] == {"drift": {"path": "tests.forms.python_forms:Drift", "version": 1}}
    assert data["format_version"] == "1.7"
    fresh = zoo.build("bert", torch.float64)
    before = copy.deepcopy(fresh.state_dict())
    monkeypatch.setattr(Drift, "version", 2)
    for message in ("version 1", "not registered"):
        with pytest.raises(PeftcError, match=message) as error:
            peftc.load(tmp_path / "adapter", fresh)
        assert error.value.diagnostics[0].code == "P573"
        peftc.forms.unregister("drift")
    assert all(torch.equal(before[name], tensor) for name, tensor in fresh.state_dict().items())


class NotAForm:
    name = "other"


def _form(**members: Any) -> type[Form]:
    return type("Other", (LowRank,), {"__module__": __name__, "name": "other", **members})


@pytest.mark.parametrize(
    "form",
    [
        NotAForm,
        LowRank(),
        _form(name=""),
        _form(name="a b"),
        _form(name="lora"),
        _form(name="svd"),
        _form(name="low_rank"),
        _form(module=""),
        _form(module="somewhere"),
        _form(module=":Class"),
        _form(inputs=("h", "x", "c")),
        _form(arguments=(Argument("a", "int", ""), Argument("a", "int", ""))),
        _form(arguments=Argument("a", "int", "")),
        _form(arguments=("a",)),
        _form(name=None),
    ],
)
def test_what_cannot_be_registered(form: Any) -> None:
    with pytest.raises(PeftcError) as error:
        peftc.forms.register(form)
    assert error.value.diagnostics[0].code == "P571"
    assert "other" not in PYTHON_FORMS
    assert type(PYTHON_FORMS["low_rank"]) is LowRank


def _wrong_shape(self: Form, args: Args, dims: Dims) -> Any:
    return (3, 4)


def _failing(self: Form, args: Args, dims: Dims) -> Any:
    raise KeyError("alpha")


def _no_parameters(self: Form, args: Args, dims: Dims) -> Any:
    return [("A", 3)]


def _empty(self: Form, args: Args, dims: Dims) -> Any:
    return [Parameter("A", (0, 3))]


def _twice(self: Form, args: Args, dims: Dims) -> Any:
    return [Parameter("A", (2, 3)), Parameter("A", (2, 3))]


def _parameter(**fields: Any) -> Any:
    def parameters(self: Form, args: Args, dims: Dims) -> Any:
        return [Parameter(**{"name": "A", "size": (3, 4), **fields})]

    return parameters


@pytest.mark.parametrize(
    "members",
    [
        {"parameters": _parameter(size=32)},
        {"parameters": _parameter(name="training")},
        {"parameters": _parameter(name="form_args")},
        {"parameters": _parameter(name=3)},
        {"parameters": _parameter(first="xavier")},
        {"parameters": _parameter(first="orthogonal", size=(4,))},
        {"parameters": _parameter(first="kaiming", size=())},
        {"parameters": _parameter(role="buffer")},
        {"parameters": _parameter(scope="edit")},
        {"parameters": _parameter(role="fixed")},
        {"module": python_forms.FailingModule},
        {"shape": _wrong_shape},
        {"shape": _failing},
        {"parameters": _failing},
        {"parameters": _no_parameters},
        {"parameters": _empty},
        {"parameters": _twice},
        {"initial": _failing},
        {"not_affine": _failing},
        {"module": "tests.forms.nowhere:Class"},
        {"module": "tests.forms.python_forms:Nothing"},
        {"module": nn.Linear},
    ],
)
def test_mistakes_in_the_code_of_a_form_have_a_code(members: dict[str, Any]) -> None:
    peftc.forms.register(_form(**members))
    model = zoo.build("bert", torch.float64).eval()
    before, names = logits(model), [name for name, _ in model.named_modules()]
    assert codes("edit e at layer[*].attn.q { h += other(x, r=2) }", model) == ["P574"]
    assert [name for name, _ in model.named_modules()] == names
    assert torch.equal(logits(model), before)


class NoFold(FormModule):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return python_forms.LowRankModule.forward(self, x)  # pyright: ignore[reportArgumentType]


class WrongFold(python_forms.LowRankModule):
    def fold(self, value: Any) -> Any:
        return self.A


@pytest.mark.parametrize("module", [NoFold, WrongFold])
def test_a_fold_that_is_missing_or_gives_no_affine_function(module: type[FormModule]) -> None:
    peftc.forms.register(_form(module=module))
    model = compiled("edit e at layer[*].attn.q { h += other(x, r=2) }")
    before = logits(model)
    with pytest.raises(PeftcError) as error:
        peftc.fold(model)
    assert error.value.diagnostics[0].code == "P574"
    assert torch.equal(logits(model), before)


def test_fixed_tensors_are_drawn_from_the_seed(tmp_path: Path) -> None:
    peftc.forms.register(Signs)
    spec = "edit e at layer[*].attn.o { h += signs(h, seed=3) }"
    model, again = compiled(spec), compiled(spec)
    drawn = [[m.get_buffer("s") for m in one.modules() if isinstance(m, SignsModule)] for one in (model, again)]
    assert all(map(torch.equal, *drawn))
    assert not torch.equal(drawn[0][0], drawn[0][1]), "each site has its own"
    assert all(0.3 < float(s.std()) < 3 for s in drawn[0])
    peftc.save(model, tmp_path / "adapter")
    loaded = zoo.build("bert", torch.float64).eval()
    peftc.load(tmp_path / "adapter", loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_a_shared_form_is_in_the_mode_of_the_model(tmp_path: Path) -> None:
    spec = "let s = shared(drift())\nedit a at layer[*].attn.o { h += s(h) }\nedit b at layer[*].ffn { h += s(h) }"
    model = compiled(spec)
    model.train()
    logits(model)
    model.eval()
    expected = logits(model)
    peftc.save(model, tmp_path / "adapter")
    loaded = zoo.build("bert", torch.float64).eval()
    peftc.load(tmp_path / "adapter", loaded)
    assert not any(module.training for module in loaded.modules())
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(logits(loaded), expected)


def test_verify_leaves_states_alone() -> None:
    model = compiled(DRIFT)
    model.train()
    logits(model)
    model.eval()
    expected = logits(model)
    assert peftc.verify(model).ok
    assert torch.equal(logits(model), expected)


def test_a_class_that_is_defined_again_takes_the_place_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEFTC_CACHE", str(tmp_path))
    spec = "peft 2\nedit e at layer[*].attn.q { h += other(x, r=2) }\n"

    class First(python_forms.LowRankModule):
        pass

    class Twice(First):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    outputs: list[torch.Tensor] = []
    for module in (First, Twice, First):
        peftc.forms.register(_form(module=module))
        outputs.append(logits(compiled("edit e at layer[*].attn.q { h += other(x, r=2) }")))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.allclose(outputs[0], outputs[1])

    def wider(self: Form, args: Args, dims: Dims) -> Iterator[Parameter]:
        yield from LowRank.parameters(self, args, dims)  # pyright: ignore[reportArgumentType]
        yield Parameter("C", (7,))

    counts: list[int] = []
    for members in ({}, {"parameters": wider}):
        peftc.forms.register(_form(**members))
        counts.append(peftc.plan(spec, zoo.build("bert", torch.float64)).edits[0].trained)
    assert counts[1] > counts[0]


ENTRY = """from tests.forms.python_forms import LowRank

class Offered(LowRank):
    name = "offered"

NOTHING = 3
"""


@pytest.fixture
def distribution(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which a distribution offers forms."""
    (tmp_path / "offering.py").write_text(ENTRY)
    info = tmp_path / "offering-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text(
        "[peftc.forms]\noffered = offering:Offered\nbroken = offering:Missing\nnothing = offering:NOTHING\n"
    )
    root = str(Path(__file__).parent.parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}


def peft(distribution: dict[str, str], *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "peftc", *arguments]
    result = subprocess.run(command, env=distribution, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def test_entry_points_that_the_user_names(distribution: dict[str, str], tmp_path: Path) -> None:
    spec = tmp_path / "spec.peft"
    spec.write_text("peft 2\nedit e at layer[*].attn.q { h += offered(x, r=2) }\n")
    code, output = peft(distribution, "check", str(spec))
    assert code == 1
    assert "P101" in output
    assert "`offering:Offered` of offering 2.1 is one: register it with `--forms offered`" in output
    assert peft(distribution, "check", str(spec), "--forms", "offered")[0] == 0
    code, output = peft(distribution, "explain", "offered", "--forms", "offered")
    assert code == 0
    assert "f(x) = B A x" in output
    model = tmp_path / "config.json"
    zoo.config("bert").to_json_file(model)
    code, output = peft(distribution, "plan", str(spec), "--model", str(model), "--forms", "offered")
    assert code == 0, output
    for name in ("offer", "broken", "nothing"):
        code, output = peft(distribution, "check", str(spec), "--forms", name)
        assert code == 1
        assert ("P571" if name == "nothing" else "P572") in output


def test_a_spec_imports_no_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = tmp_path / "spec.peft"
    spec.write_text("peft 2\nedit e at layer[*].attn.q { h += unheard_of(x, r=2) }\n")
    assert main(["check", str(spec)]) == 1
    assert "P101" in capsys.readouterr().out
