"""Public functions beyond the laws of recipes: names, odd arguments, modules outside
transformers.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.concurrency.garbage_collection import paused_gc
from peftc.forms.module import FormModule
from peftc.installation import cached_analysis
from tests import zoo
from tests.call_counts import calls

LORA = "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }\n"


@pytest.mark.parametrize(
    "name",
    ["training", "forward", "parameters", "to", "type", "class", "None", "peftc", "weight", "_modules", "__class__"],
)
def test_an_edit_may_have_any_name(name: str, tmp_path: Path) -> None:
    spec = f"peft 1\nedit {name} at layer[*].ffn {{ h += adapter(x, r=2) }}\n"
    model = zoo.build("gpt2")
    inputs = zoo.inputs("gpt2", model)
    base = model(**inputs)[0]
    peftc.compile(spec, model, seed=0)
    want = model(**inputs)[0]
    assert not torch.equal(want, base)
    assert {key.partition("/")[0] for key in peftc.parameters(model)} == {name}
    again = peftc.load(peftc.save(model, tmp_path / "saved"), zoo.build("gpt2"))
    assert torch.equal(again(**inputs)[0], want)
    assert torch.equal(peftc.remove(model)(**inputs)[0], base)


@pytest.mark.parametrize(
    "edit",
    ["attn.cross { h += adapter(c, r=2) }", "attn.cross { h = c }", "attn { q = k }", "attn.cross { k = q }"],
)
def test_states_of_different_tokens_do_not_mix(edit: str) -> None:
    with pytest.raises(peftc.PeftcError, match="P301"):
        peftc.plan(f"peft 1\nedit a at layer[*].{edit}\n", zoo.build("bart"))


def test_a_context_may_be_read_where_it_is_the_input() -> None:
    model = zoo.build("bart")
    own = peftc.plan("peft 1\nedit a at layer[*].attn.self { h += adapter(c, r=2) }\n", model)
    keys = peftc.plan("peft 1\nedit a at layer[*].attn.cross.k { h += lora(x, r=2) }\n", model)
    assert (len(own.edits[0].sites), len(keys.edits[0].sites)) == (5, 3)


def test_a_config_gets_random_weights_and_a_name_its_own() -> None:
    model = peftc.compile(LORA, zoo.config("gpt2"), seed=0)
    assert isinstance(model, nn.Module)
    assert len(peftc.parameters(model)) == 2 * model.config.n_layer
    with pytest.raises(peftc.PeftcError, match="P505"):
        peftc.compile(LORA, "gpt2")


def test_arguments_of_other_types_have_other_variants() -> None:
    model: Any = None
    for call in (lambda: peftc.compile(LORA, model), lambda: peftc.plan(LORA, model), lambda: peftc.sites(model)):
        with pytest.raises(peftc.PeftcError, match="not a NoneType"):
            call()
    for function in (peftc.remove, peftc.graphs, peftc.fold):
        with pytest.raises(peftc.PeftcError, match="P410"):
            function(model)
    with pytest.raises(peftc.PeftcError, match="P545"):
        peftc.plan(model, zoo.build("gpt2"))
    with pytest.raises(peftc.PeftcError, match="P001"):
        peftc.plan("", zoo.build("gpt2"))


def test_compiling_the_same_twice_is_refused_and_changes_nothing() -> None:
    model = peftc.compile(LORA, zoo.build("gpt2"), seed=0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(peftc.PeftcError, match="P412"):
        peftc.compile(LORA, model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert peftc.plan(LORA, model).totals.base == peftc.plan(LORA, zoo.build("gpt2")).totals.base


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def test_any_module_by_the_names_of_its_parts() -> None:
    torch.manual_seed(0)
    net, sample = Net(), {"x": torch.randn(3, 4)}
    base = net(**sample)
    spec = 'peft 1\nedit l at "a" { h += adapter(x, r=2, act=gelu) }\n'  # a narrow relu may be dead
    assert peftc.plan(spec, net, sample=sample).totals.trained == 4 * 2 + 2 + 2 * 6 + 6
    peftc.compile(spec, net, seed=0, sample=sample)
    assert not torch.equal(net(**sample), base)
    assert torch.equal(peftc.remove(net)(**sample), base)
    with pytest.raises(peftc.PeftcError, match="P201"):
        peftc.plan("peft 1\nedit l at layer[*].ffn { h *= 2 }\n", net, sample=sample)


def test_settings_from_python_and_as_texts_agree() -> None:
    spec = Path(peftc.__file__).parent.parent / "specs" / "mam.peft"
    for settings, trained in (
        ({"bias": False}, 27_377_664),
        ({"reparam": "mlp(800)"}, 86_810_976),
        ({"r": "2 * 256"}, 27_414_528),
    ):
        assert peftc.plan(spec, "facebook/bart-large", settings=settings).totals.trained == trained
    with pytest.raises(peftc.PeftcError, match="P110"):
        peftc.plan(spec, "facebook/bart-large", settings={"q": 3})


def test_a_post_norm_after_a_view_is_recognised() -> None:
    table = peftc.sites(zoo.build("opt", do_layer_norm_before=False))
    assert "decoder.layer[0].ffn.norm" in {s.path for s in table.sites}


@pytest.mark.parametrize("promote", [True, False])
def test_objects_of_a_pause_are_old_where_the_caller_says_so(promote: bool) -> None:
    """Only the caller knows whether what it allocates stays alive. What dies soon stays young."""
    gc.unfreeze()  # the tests have frozen what they import
    with paused_gc(promote=promote):
        lists = [[] for _ in range(20_000)]
    old = {id(thing) for thing in gc.get_objects(2)}
    gc.freeze()
    assert old.isdisjoint(map(id, lists)) != promote


def test_objects_of_a_pause_that_fails_stay_young() -> None:
    """An error's traceback may keep a model in a cycle, which is collected soon."""
    gc.unfreeze()
    lists: list[list[object]] = []

    def fail() -> None:
        with paused_gc(promote=True):
            lists.extend([] for _ in range(20_000))
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        fail()
    old = {id(thing) for thing in gc.get_objects(2)}
    gc.freeze()
    assert old.isdisjoint(map(id, lists))


@pytest.mark.parametrize("verify", [False, True])
def test_compiling_promotes_what_it_makes_unless_it_verifies(verify: bool) -> None:
    """The garbage collector does not traverse it; the copies that a verification makes die soon."""
    gc.unfreeze()
    model = peftc.compile(
        "peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2) }\n", zoo.build("llama"), verify=verify
    )
    old = {id(thing) for thing in gc.get_objects(2)}
    gc.freeze()
    assert {id(form) in old for form in model.modules() if isinstance(form, FormModule)} == {not verify}


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    with paused_gc(promote=True):
        pass
    assert gc.get_freeze_count()


def test_garbage_collection_is_restored() -> None:
    """Compiling disables garbage collection, and restores it even after an error."""
    spec = "peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2) }\n"
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            peftc.compile(spec, zoo.build("llama"), seed=0)
            with pytest.raises(peftc.PeftcError, match="P201"):
                peftc.compile(spec.replace("attn.q", "attn.p"), zoo.build("llama"))
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_twice_the_layers_are_at_most_twice_the_work(device: str) -> None:
    spec = (
        "peft 1\nedit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }\n"
        "edit f at layer[*].ffn { h += adapter(x, r=2) }\n"
    )

    def work(layers: int) -> int:
        with torch.device(device):
            model = zoo.build("llama", num_hidden_layers=layers)
        return calls(lambda: peftc.compile(spec, model, seed=0))

    work(2)
    assert work(48) <= 2.1 * work(24)


def test_a_layer_that_is_like_another_is_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA on the seven Linears of a LLaMA's layer: parameters, containers, and comparisons."""
    monkeypatch.setattr(cached_analysis, "_recent", [])
    spec = "peft 1\nedit a at layer[*].attn.q | layer[*].attn.k | layer[*].attn.v | layer[*].attn.o "
    spec += "| layer[*].ffn.up | layer[*].ffn.gate | layer[*].ffn.down { h += lora(x, r=2) }\n"

    def work(layers: int) -> int:
        with torch.device("meta"):
            model = zoo.build("llama", num_hidden_layers=layers)
        return calls(lambda: peftc.compile(spec, model, seed=0, cache=False))

    work(36)  # what is kept by the names of layers is there from now on
    assert min(work(36), work(36)) - min(work(24), work(24)) <= 12 * 2600
