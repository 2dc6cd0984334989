"""`peftc.verify`: arguments, report, and that the user's model stays unchanged; verification as a
step of compilation; the command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.cli.main import main
from peftc.planning import ir
from peftc.planning.report.plan import plain_text
from peftc.verification.reference.outputs import CallEvent, Recorder
from peftc.verification.report import render_verification
from tests import zoo
from tests.laws.harness import Before
from tests.layers import Attention, Layers
from tests.specs_on_models.pairs import unchanged
from tests.verification.test_faults import QV, SCALED, model, rewritten

TASKS = "peft 1\nedit e at layer[*].ffn per task { h += adapter(h, r=4, act=gelu) }\n"


def twice(_: Any, rewrite: Any, t: Any) -> Any:
    return rewrite(t) ** 2 if isinstance(t, ir.Constant) else rewrite(t)


def test_the_users_model_is_unchanged() -> None:
    compiled = peftc.compile(QV, model(), seed=0).train()
    state = torch.random.get_rng_state()
    with unchanged(compiled):
        peftc.verify(compiled)
    assert all(module.training for module in compiled.modules())
    assert all(p.grad is None for p in compiled.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_running_statistics_are_those_of_the_model() -> None:
    """Calls in training mode move them, in the copy that is compared as in its base."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()
    batch = {"input": torch.randn(4, 8) + 1}
    compiled = peftc.compile('peft 1  edit e at "1" { h += adapter(x, r=2) }', model, seed=0, sample=batch)
    report = peftc.verify(compiled, batch)
    assert report.ok, str(report)


def test_a_batch_of_the_user() -> None:
    compiled = peftc.compile(QV, model(), seed=0)
    report = peftc.verify(compiled, zoo.inputs("llama", compiled, padding="right", labels=True))
    assert report.ok, str(report)
    assert report.batch == {"input_ids": (2, 7), "attention_mask": (2, 7), "labels": (2, 7)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tolerances_are_those_of_the_dtype(dtype: torch.dtype) -> None:
    spec = QV + "edit f at layer[*].ffn { h += adapter(x, r=4) }\n"
    report = peftc.verify(peftc.compile(spec, zoo.build("llama", dtype), seed=0))
    assert report.ok, str(report)


def test_all_sites_on_request() -> None:
    compiled = peftc.compile(QV, zoo.build("llama", num_hidden_layers=5), seed=0)
    assert [edit.perturbed for edit in peftc.verify(compiled).edits] == [6]
    assert [edit.perturbed for edit in peftc.verify(compiled, sites="all").edits] == [10]


def test_each_task_is_compared() -> None:
    compiled = peftc.compile(TASKS, model(), seed=0, tasks=["a", "b"])
    report = peftc.verify(compiled)
    assert report.ok, str(report)
    assert [check.name for check in report.checks].count("outputs equal the equations") == 2


def test_several_specs_are_one() -> None:
    compiled = peftc.compile(SCALED, peftc.compile(QV, model(), seed=0, prefix="a"), seed=0, prefix="b")
    report = peftc.verify(compiled)
    assert report.ok, str(report)
    assert [edit.name for edit in report.edits] == ["a.e", "b.e"]


@pytest.mark.parametrize("name", ["bart", "gpt2", "bert"])
def test_an_eager_attention(name: str) -> None:
    """Under `eager`, matrix products and a softmax identify queries, keys and values."""
    spec = QV + "edit p at layer[*].attn { kv = concat(prefix(len=3), kv) }\n"
    spec += "edit h at layer[*].attn.heads { h += bottleneck(q, r=2) }\n"
    report = peftc.verify(peftc.compile(spec, model(name, attn_implementation="eager"), seed=0))
    assert report.ok, str(report)
    assert report.witnessed == report.sites
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes["attn.q, attn.k and attn.v are the operands of the attention"] == "holds"


@pytest.mark.parametrize("edit", ["e", "an_edit_of_" + "such_" * 12 + "a_name"])
def test_a_report_that_fits_is_not_wrapped(edit: str) -> None:
    report = peftc.verify(peftc.compile(QV.replace("edit e", f"edit {edit}"), model(), seed=0))
    wide = plain_text(render_verification(report), 300)
    assert edit in wide
    assert plain_text(render_verification(report), max(map(len, wide.splitlines()))) == wide


def test_wrong_arguments_have_codes() -> None:
    compiled = peftc.compile(QV, model(), seed=0)
    with pytest.raises(peftc.PeftcError, match="P545"):
        peftc.verify(compiled, [1])  # type: ignore[arg-type]
    with pytest.raises(peftc.PeftcError, match="P545"):
        peftc.verify(compiled, sites="first")  # type: ignore[arg-type]
    with pytest.raises(peftc.PeftcError, match="P410"):
        peftc.verify(nn.Linear(2, 2))


# Compilation
# --------------------------------------------------------------------------------------------------


def test_a_compilation_that_is_verified() -> None:
    compiled = peftc.compile(QV, model(), seed=0, verify=True)
    assert list(peftc.specs(compiled)) == ["default"]


def test_a_compilation_that_fails_its_verification_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    base = model("bert")
    before = Before.of(base)
    rewritten(monkeypatch, twice)
    with pytest.raises(peftc.PeftcError, match="P602"):
        peftc.compile(SCALED, base, seed=0, verify=True)
    before.assert_same(base)
    peftc.compile(QV, base, seed=0, name="first")
    with unchanged(base), pytest.raises(peftc.PeftcError, match="P602"):
        peftc.compile(SCALED, base, seed=0, prefix="b", verify=True)


# The command
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A spec, and a folder with a model's weights."""
    model("bert").float().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    (tmp_path / "spec.peft").write_text(SCALED, encoding="utf-8")
    return str(tmp_path / "spec.peft"), str(tmp_path / "model")


def test_the_command_on_weights_and_on_a_configuration(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    spec, folder = files
    assert main(["verify", spec, "--model", folder]) == 0
    outcome = capsys.readouterr().out
    assert "\nits weights; input_ids [2, 5]\n" in outcome
    assert "holds" in outcome
    assert main(["verify", spec, "--model", f"{folder}/config.json", "--seed", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weights"] == "random weights, seed 3"
    assert report["format_version"] == "1.0"
    assert {check["outcome"] for check in report["checks"]} <= {"holds", "not checked"}
    assert [edit["witnessed"] for edit in report["edits"]] == [2]


def test_findings_are_exit_code_1(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, folder = files
    rewritten(monkeypatch, twice)
    assert main(["verify", spec, "--model", folder]) == 1
    assert "P602" in capsys.readouterr().out
    assert main(["verify", spec, "--model", folder, "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["code"], finding["site"], finding["state"]) == ("P602", "encoder.layer[0].ffn", "h")
    assert finding["size"] > 0
    assert main(["verify", spec, "--model", folder, "--output-format", "json"]) == 1
    assert [record["code"] for record in json.loads(capsys.readouterr().out)] == ["P602"]


def test_wrong_usage(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    spec, folder = files
    assert main(["verify", f"{spec}.not", "--model", folder]) == 2
    with pytest.raises(SystemExit) as ended:
        main(["verify", spec])
    assert ended.value.code == 2
    assert main(["verify", spec, "--model", f"{folder}/nothing"]) == 1
    capsys.readouterr()


def test_the_last_edit_before_an_event() -> None:
    recorder = Recorder()
    first, second = CallEvent("output", "a", 1), CallEvent("output", "b", 1)
    recorder.record(first, torch.ones(2))
    recorder.record_edit(("e", "layer[0]"), torch.ones(2))
    recorder.record_edit(("f", "layer[0]"), torch.ones(2))
    recorder.record(second, torch.ones(2))
    recorder.record_edit(("e", "layer[1]"), torch.ones(2))
    assert recorder.last_edit_before(first) is None
    assert recorder.last_edit_before(second) in {("e", "layer[0]"), ("f", "layer[0]")}


def recomputing(reentrant: bool) -> Any:
    llama: Any = model().train()
    llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return llama


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_through_checkpoints(reentrant: bool) -> None:
    report = peftc.verify(peftc.compile(QV, recomputing(reentrant), seed=0))
    assert report.ok, str(report)
    assert {c.outcome for c in report.checks if "gradients" in c.name} == {"holds"}


def test_autocast_is_off_inside() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        compiled = peftc.compile(QV, zoo.build("llama"), seed=0, verify=True)
        report = peftc.verify(compiled)
        assert torch.is_autocast_enabled("cpu")
    assert report.ok, str(report)


def test_an_invalid_base_is_refused() -> None:
    compiled = peftc.compile(QV, model(), seed=0)
    wrong: Any = 5
    for base in (wrong, compiled):
        with pytest.raises(peftc.PeftcError) as error:
            peftc.verify(compiled, base=base)
        assert [d.code for d in error.value.diagnostics] == ["P545"]


def test_parameters_with_nan_verify_nothing() -> None:
    compiled = peftc.compile(QV, model(), seed=0)
    with torch.no_grad():
        next(iter(peftc.parameters(compiled).values()))[0] = float("nan")
    with pytest.raises(peftc.PeftcError, match=r"P601.*NaN"):
        peftc.verify(compiled)


def test_a_base_with_nan_outputs_verifies_nothing() -> None:
    llama: Any = model()
    with torch.no_grad():
        llama.model.norm.weight.fill_(float("nan"))
    compiled = peftc.compile(QV, llama, seed=0)
    with pytest.raises(peftc.PeftcError, match=r"P509.*NaN"):
        peftc.verify(compiled)


class BareNetwork(nn.Module):
    """Its hidden features are as many as its input has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.up) @ self.down


class BareLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(8), BareNetwork()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


def test_hidden_features_that_no_module_reads_are_not_the_input_of_one() -> None:
    x = torch.randn(2, 5, 8)
    spec = (
        "peft 2\nedit a at layer[*].ffn.hidden { h *= vector(init=2) }\nedit b at layer[*].attn { h *= vector(init=2) }"
    )
    report = peftc.verify(peftc.compile(spec, Layers(BareLayer(), BareLayer()), seed=0, sample={"x": x}), {"x": x})
    assert not report.findings
    assert "no module reads `h` of `encoder.layer[0].ffn.hidden`" in str(report)
