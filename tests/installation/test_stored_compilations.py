"""Another process compiles by what the first has stored, and by nothing that may have changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartDecoderLayer
from transformers.models.llama import modeling_llama

import peftc
from peftc.installation import cached_analysis, stored_compilations
from peftc.installation.record import installation_of
from peftc.planning.planner import Planner
from peftc.recognition.analysis import analyse
from tests import zoo

QV = "peft 1\nedit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }\n"
WEIGHTS = "peft 1\nedit w at layer[*].ffn.down { w += lowrank(r=2) }\nedit n at layer[*].ffn { h += lora(x, r=2) }\n"
INSIDE = "peft 1\nedit k at layer[*].attn { kv = concat(prefix(len=2), kv) }\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEFTC_CACHE", str(tmp_path))
    monkeypatch.setattr(cached_analysis, "MOST", 8)
    return tmp_path / "sites"


@pytest.fixture
def analyses(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each analysis."""
    count = list[None]()

    def counted(*args: Any) -> Any:
        count.append(None)
        return analyse(*args)

    monkeypatch.setattr(cached_analysis, "analyse", counted)
    return count


def compiled(
    spec: str, name: str, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object] = bool
) -> nn.Module:
    """A compiled model, as in a new process."""
    monkeypatch.setattr(cached_analysis, "_recent", [])
    monkeypatch.setattr(stored_compilations, "_recent", [])
    model = zoo.build(name)
    change(model)
    return peftc.compile(spec, model, seed=0)


def outputs(model: nn.Module, name: str) -> Tensor:
    return model(**zoo.inputs(name, model))[0]


@pytest.mark.parametrize("name", ["llama", "bart", "gpt2", "t5"])
def test_a_stored_compilation_is_the_new_one(name: str, analyses: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    models = [compiled(QV, name, monkeypatch) for _ in range(2)]
    assert len(analyses) == 1
    new, stored = map(installation_of, models)
    assert new.planned.plan == stored.planned.plan
    assert [one.site for one in new.site_edits] == [one.site for one in stored.site_edits]
    for (module, one), (other, two) in zip(new.regions, stored.regions, strict=True):
        assert module == other
        assert one.source == two.source
        assert [asdict(e)["states"] for e in one.edits] == [asdict(e)["states"] for e in two.edits]
    assert new.form_modules == stored.form_modules
    with torch.no_grad():
        for model in models:
            for parameter in dict(peftc.parameters(model)).values():
                parameter.fill_(0.1)
    assert torch.equal(*(outputs(model, name) for model in models))
    peftc.compile(WEIGHTS.replace("edit n", "edit other"), models[1], seed=0, name="second")
    assert torch.equal(outputs(peftc.remove(models[1]), name), outputs(zoo.build(name), name))


def test_a_stored_plan_is_counted_when_something_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Planner] = []
    plan = Planner.plan
    monkeypatch.setattr(Planner, "plan", lambda self, *args: counted.append(self) or plan(self, *args))
    new, stored = (compiled(f"{QV}expect foldable(a)\n", "llama", monkeypatch) for _ in range(2))
    assert len(counted) == 1
    copied = installation_of(copy.deepcopy(stored)).specs[0].plan
    assert len(counted) == 2
    assert copied == installation_of(stored).planned.plan == installation_of(new).planned.plan
    assert [one.holds for one in copied.expectations] == [True]
    assert len(counted) == 2


def test_a_plan_without_expectations_is_counted_when_something_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Planner] = []
    plan = Planner.plan
    monkeypatch.setattr(Planner, "plan", lambda self, *args: counted.append(self) or plan(self, *args))
    model = compiled(QV, "llama", monkeypatch)
    assert not counted
    assert installation_of(model).planned.plan.expectations == ()
    assert len(counted) == 1


def test_what_is_edited_inside_is_traced_anew(analyses: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        compiled(INSIDE, "llama", monkeypatch)
    assert len(analyses) == 2


def shorten(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-9])


def replace_text(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_text(path.read_text().replace('"a"', '"b"').replace("q_proj", "v_proj"))


def make_folders(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("damage", [shorten, replace_text, make_folders])
def test_a_damaged_entry_is_as_none(
    damage: Callable[[Path], None], own_cache: Path, analyses: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled(QV, "llama", monkeypatch)
    assert list(own_cache.iterdir())
    damage(own_cache)
    assert torch.equal(outputs(compiled(QV, "llama", monkeypatch), "llama"), outputs(first, "llama"))
    assert len(analyses) == 2


UNFIT: dict[str, Any] = {
    "no edits": {"edits": []},
    "no regions": {"regions": []},
    "another group": {"regions": {"templates": [[99, []]], "blocks": []}},
    "no such template": {"regions": {"templates": [], "blocks": [[7, 0]]}},
}


@pytest.mark.parametrize("content", UNFIT)
def test_an_entry_that_does_not_fit_is_as_none(
    content: str, analyses: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is right: what wrote it was at fault."""
    first, read = compiled(QV, "llama", monkeypatch), stored_compilations.read
    changed = UNFIT[content]
    monkeypatch.setattr(
        stored_compilations, "read", lambda key, decode: read(key, lambda entry: decode({**entry, **changed}))
    )
    second = compiled(QV, "llama", monkeypatch)
    assert len(analyses) == 2
    assert torch.equal(outputs(second, "llama"), outputs(first, "llama"))


def change_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)


def change_code(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rotated(x: Tensor) -> Tensor:
        return x

    monkeypatch.setattr(modeling_llama.rotate_half, "__code__", rotated.__code__)


def exchange_functions(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are of the library."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", BartDecoderLayer.forward)


def replace_module(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def own_module(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Tanh):
        pass

    model.model.layers[0].mlp.act_fn = Own()


def add_hook(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def change_config(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.config._attn_implementation = "eager"


CHANGES = [change_class, change_code, exchange_functions, replace_module, own_module, add_hook, change_config]


@pytest.mark.parametrize("change", CHANGES)
def test_no_entry_is_used_where_anything_differs(
    change: Callable[[Any, pytest.MonkeyPatch], None], analyses: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(QV, "llama", monkeypatch)
    try:
        compiled(QV, "llama", monkeypatch, lambda model: change(model, monkeypatch))
    except peftc.PeftcError:
        assert change is exchange_functions  # a model that does not run
    assert len(analyses) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    own_cache: Path, analyses: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.parent.joinpath("sites").write_text("")
    for _ in range(2):
        compiled(QV, "llama", monkeypatch)
    assert len(analyses) == 2


def test_a_process_reads_an_entry_once(analyses: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(QV, "llama", monkeypatch)
    first = compiled(QV, "llama", monkeypatch)  # reads what the other process has stored
    reads, read = list[None](), stored_compilations.read
    monkeypatch.setattr(stored_compilations, "read", lambda *args: (reads.append(None), read(*args))[1])
    monkeypatch.setattr(stored_compilations, "environment", lambda: reads.append(None))
    monkeypatch.setattr(stored_compilations, "state_text", lambda state: reads.append(None))
    again = peftc.compile(QV, zoo.build("llama"), seed=0)
    assert not reads
    assert len(analyses) == 1
    assert installation_of(again).planned is installation_of(first).planned
    assert torch.equal(outputs(again, "llama"), outputs(first, "llama"))


def change_default(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)


def change_activation(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.config.hidden_act = "gelu"


def move_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEFTC_CACHE", f"{stored_compilations.cache_folder()}/other")


@pytest.mark.parametrize("change", [*CHANGES, change_default, change_activation, move_cache])
def test_what_a_process_has_read_is_of_equal_models_alone(
    change: Callable[[Any, pytest.MonkeyPatch], None], analyses: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        compiled(QV, "llama", monkeypatch)
    model = zoo.build("llama")
    change(model, monkeypatch)
    try:
        peftc.compile(QV, model, seed=0)
    except peftc.PeftcError:
        assert change is exchange_functions  # a model that does not run
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(analyses) == 2


def test_few_entries_stay_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_compilations, "MOST", 2)
    for rank in range(1, 5):
        for _ in range(2):
            monkeypatch.setattr(cached_analysis, "_recent", [])
            peftc.compile(QV.replace("r=2", f"r={rank}"), zoo.build("llama"), seed=0)
    assert len(stored_compilations._recent) == 2
