"""AdapterFusion: saved adapters, combined by attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import peftc
from tests import zoo
from tests.laws.harness import TOLERANCE, randomise

ADAPTER = "peft 1\nedit ffn at layer[*].ffn { h += adapter(h, r=3) }"
FUSION = "peft 1\nedit ffn at layer[*].ffn { h += fusion(h, n=2, r=3) }"


def compiled(spec: str, name: str = "llama", **options: Any) -> Any:
    return peftc.compile(spec, zoo.build(name, torch.float64), seed=0, **options).eval()


def logits(model: Any, name: str = "llama") -> Tensor:
    with torch.no_grad():
        return model(**zoo.inputs(name, model))[0]


def trained(spec: str, to: Path, shift: float = 0.0, name: str = "llama") -> Any:
    """A saved adapter. `shift` is added to the first feature of its output."""
    model = compiled(spec, name)
    randomise(peftc.parameters(model))
    with torch.no_grad():
        for key, parameter in peftc.parameters(model).items():
            parameter.mul_(1 + 0.1 * shift)
            if key.endswith("up_bias"):
                parameter[0] += shift
    peftc.save(model, to)
    return model


def two(to: Path, spec: str = ADAPTER) -> list[Path]:
    for name, shift in (("a", 0.0), ("b", 5.0)):
        trained(spec, to / name, shift)
    return [to / "a", to / "b"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def fused(directories: list[Path]) -> Any:
    model = compiled(FUSION)
    peftc.fuse(model, directories)
    return model


@torch.no_grad()
def attend(model: Any, scale: float) -> None:
    """Scores are `scale` times the first feature of each adapter's output; V is the identity."""
    for key, parameter in peftc.parameters(model).items():
        part = key.rpartition(".")[2]
        if part == "query_bias":
            parameter.zero_()[0] = scale
        elif part == "query":
            parameter.zero_()
        else:
            parameter.copy_(torch.eye(len(parameter)))


@pytest.mark.parametrize("name", ["bert-base", "t5"])
def test_all_attention_to_one_adapter_is_its_own_model(name: str, tmp_path: Path) -> None:
    own = [trained(ADAPTER, tmp_path / str(shift), shift, name) for shift in (0.0, 5.0)]
    model = compiled(FUSION, name)
    base = logits(model, name)
    assert peftc.fuse(model, [tmp_path / "0.0", tmp_path / "5.0"]) == ("ffn",)
    assert not torch.equal(logits(model, name), base)
    for scale, one in ((1e3, own[1]), (-1e3, own[0])):
        attend(model, scale)
        torch.testing.assert_close(logits(model, name), logits(one, name), rtol=TOLERANCE, atol=TOLERANCE)


def test_only_the_attention_is_trained_and_all_of_it_is_saved(fused: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(fused).train()
    randomise(peftc.parameters(model))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(peftc.parameters(model).values(), lr=0.1)
    loss = logits_of_training(model).square().mean() + sum(peftc.losses(model).values())
    loss.backward()
    optimizer.step()
    trained = {
        key.rpartition(".")[2] for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert trained == {"query", "query_bias", "key", "value"}
    peftc.save(model.eval(), tmp_path / "fusion")
    again = peftc.load(tmp_path / "fusion", zoo.build("llama", torch.float64)).eval()
    assert torch.equal(logits(again), logits(model))


def logits_of_training(model: Any) -> Tensor:
    return model(**zoo.inputs("llama", model))[0]


def test_the_penalty_is_that_of_all_sites(fused: Any) -> None:
    model = copy.deepcopy(fused)
    randomise(peftc.parameters(model))
    values = [p for key, p in peftc.parameters(model).items() if key.endswith(".value")]
    want = sum(0.01 * (torch.eye(len(v)) - v).square().sum() for v in values)
    torch.testing.assert_close(peftc.losses(model), {"ffn.identity": want})
    assert peftc.losses(compiled(FUSION.replace("r=3", "r=3, value=false"))) == {}


def test_the_penalty_of_a_shared_fusion_is_that_of_the_present_task() -> None:
    spec = "peft 1\nlet s = shared(fusion(n=2, r=2))\nedit ffn at layer[*].ffn per task { h += s(h) }"
    model = compiled(spec, tasks=("a", "b"))
    randomise(peftc.parameters(model))
    result: list[Tensor] = []
    for task in "ab":
        with peftc.task(model, task):
            result.append(peftc.losses(model)["ffn.identity"])
    torch.testing.assert_close(result[0] + result[1], peftc.losses(model)["ffn.identity"])


def test_tasks_have_fusions_of_their_own(fused: Any, directories: list[Path]) -> None:
    model = compiled(FUSION.replace(".ffn {", ".ffn per task {"), tasks=("s", "t"))
    alone, base = fused, logits(zoo.build("llama", torch.float64).eval())
    peftc.fuse(model, directories, task="t")
    with torch.no_grad():
        for key, parameter in peftc.parameters(model).items():
            parameter.copy_(peftc.parameters(alone)[key.replace(".tasks.s", "").replace(".tasks.t", "")])
    with peftc.task(model, "t"):
        assert torch.equal(logits(model), logits(alone))
        assert torch.allclose(peftc.losses(model)["ffn.identity"], peftc.losses(alone)["ffn.identity"])
    with peftc.task(model, "s"):
        assert torch.equal(logits(model), base)
    peftc.fuse(model, directories)
    with peftc.task(model, "s"):
        assert torch.equal(logits(model), logits(alone))


def test_adapters_with_other_names_or_shared_between_sites(tmp_path: Path) -> None:
    shared = "peft 1\nlet f = shared(adapter(r=3))\nedit mine at layer[*].ffn { let s = 2  h = h + s * f(x) }"
    directories = two(tmp_path, shared)
    text = "peft 1\nedit e at layer[*].ffn { h += 2 * fusion(x, n=2, r=3) }"
    model = compiled(text)
    assert peftc.fuse(model, directories, edits={"e": "mine"}) == ("e",)
    attend(model, -1e3)
    want = logits(peftc.load(directories[0], zoo.build("llama", torch.float64)).eval())
    torch.testing.assert_close(logits(model), want, rtol=TOLERANCE, atol=TOLERANCE)
    both = compiled("peft 1\nlet f = shared(fusion(n=2, r=3))\nedit mine at layer[*].ffn { h += 2 * f(x) }")
    peftc.fuse(both, directories)
    attend(both, -1e3)
    torch.testing.assert_close(logits(both), want, rtol=TOLERANCE, atol=TOLERANCE)
    refused(
        both,
        two(tmp_path / "apart", "peft 1\nedit mine at layer[*].ffn { h += 2 * adapter(x, r=3) }"),
        "P525",
        "shared",
    )


def refused(model: Any, directories: Sequence[Path], code: str, message: str, **options: Any) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(peftc.PeftcError, match=code) as result:
        peftc.fuse(model, directories, **options)
    assert message in str(result.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_empty_fusion_is_the_identity_and_is_neither_trained_nor_saved(fused: Any, tmp_path: Path) -> None:
    model = compiled(FUSION)
    assert torch.equal(logits(model), logits(zoo.build("llama", torch.float64).eval()))
    with pytest.raises(peftc.PeftcError, match="P544"):
        logits_of_training(model.train())
    with pytest.raises(peftc.PeftcError, match=r"P544[^$]*`ffn` has its initial values"):
        peftc.save(model, tmp_path)
    model.load_state_dict(fused.state_dict())
    assert torch.isfinite(logits_of_training(model)).all()


@pytest.mark.parametrize(
    ("adapter", "code", "message"),
    [
        (ADAPTER.replace("r=3", "r=4"), "P525", "[3, 32]"),
        (ADAPTER.replace("r=3", "r=5"), "P525", "does not fit the fusion: `ffn` has other sizes"),
        (ADAPTER.replace("r=3", "r=3, act=silu"), "P525", "`act` is silu in the adapter, and relu in the fusion"),
        (ADAPTER.replace("r=3", "r=3, bias=false"), "P525", "missing"),
        (ADAPTER.replace("r=3", "r=3, act=gelu"), "P525", "h += adapter(h, r=3, act=gelu)"),
        (ADAPTER.replace("r=3", "r=3, norm_in=true"), "P525", "`norm_in`"),
        (ADAPTER.replace("adapter(h", "adapter(x"), "P525", "equations"),
        (ADAPTER.replace("+= ", "+= 4 * "), "P525", "equations"),
        (ADAPTER.replace("adapter(h, r=3)", "scalar() * adapter(h, r=3)"), "P525", "equations"),
        (ADAPTER.replace("adapter(h, r=3)", "adapter(h, r=3)  h += adapter(h, r=3)"), "P525", "equations"),
        (ADAPTER.replace("adapter(h, r=3)", "h") + "edit e at layer[0].ffn { h += gate(h) }", "P525", "equations"),
        (ADAPTER.replace("adapter", "phm").replace("r=3", "r=4, n=2"), "P525", "phm"),
        (ADAPTER.replace("*", "0"), "P525", "`ffn` is not at decoder.layer[1].ffn"),
        (ADAPTER.replace(".ffn ", ".ffn | layer[0].attn "), "P525", "the fusion is not at decoder.layer[0].attn.self"),
        (ADAPTER.replace("edit ffn", "edit e"), "P532", "the adapter has no edit `ffn`"),
        (ADAPTER.replace(".ffn {", ".ffn per task {"), "P525", "`ffn` is `per task`"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_and_the_model_is_unchanged(
    adapter: str, code: str, message: str, fused: Any, directories: list[Path], tmp_path: Path
) -> None:
    peftc.save(compiled(adapter), tmp_path)
    refused(fused, [directories[0], tmp_path], code, message)


def test_missing_adapters_are_refused(fused: Any, directories: list[Path], tmp_path: Path) -> None:
    model = fused
    refused(model, directories[:1], "P544", "mixes 2 adapters, but there are 1 directories")
    refused(model, directories, "P532", "the model has no edit `fn`", edits={"fn": "ffn"})
    refused(model, directories, "P534", "`s`", task="s")
    refused(model, [directories[0], tmp_path], "P520", str(tmp_path))
    refused(compiled(ADAPTER), directories, "P532", "no edit with a `fusion`")
