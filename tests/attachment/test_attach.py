"""Several saved adapters on one model: alone, one for each row, exchanged, saved, taken out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import peftc
from peftc.installation.contents import states
from tests import zoo
from tests.laws.harness import close
from tests.matrix import some

RECIPES = Path(__file__).parents[2] / "specs"
LORA = """peft 2
edit qv at layer[*].attn.{{q, v}} {{ h += 2 * lora(x, r={r}) }}
edit f at layer[*].ffn {{ h *= vector() }}"""
MIXED = """peft 2
let rule = shared(phm(r=4, n=4))
edit gated at layer[*].ffn { let g = gate(x)  h += g * adapter(x, r=2, act=tanh) }
edit rows at layer[*].attn.o { h += vera(x, r=3) }
edit part at layer[*].attn { h += rule(h) }
edit queries at layer[*].attn { q *= scalar(init=1) }"""
SPECS = {"A": LORA.format(r=4), "B": LORA.format(r=4), "C": LORA.format(r=2), "D": MIXED}


def saved(name: str, spec: str, folder: Path, seed: int) -> Tensor:
    """Saves an adapter with random values. Returns: what the model with it alone gives."""
    model: Any = peftc.compile(spec, zoo.build(name, torch.float64), seed=seed).eval()
    disturb(model, seed)
    peftc.save(model, folder)
    loaded: Any = peftc.load(folder, zoo.build(name, torch.float64)).eval()
    return output(name, loaded)


@torch.no_grad()
def disturb(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in peftc.parameters(model).values():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@torch.no_grad()
def output(name: str, model: Any) -> Tensor:
    return model(**zoo.inputs(name, model, batch=4))[0]


@pytest.fixture(params=["llama", "bert", "t5"])
def attached(request: Any, tmp_path: Path) -> tuple[str, Any, dict[str | None, Tensor]]:
    """An architecture, a model of it with four adapters, and what each alone, or none, gives."""
    name = request.param
    model = zoo.build(name, torch.float64)
    alone: dict[str | None, Tensor] = {None: output(name, model)}
    for seed, (adapter, spec) in enumerate(SPECS.items()):
        alone[adapter] = saved(name, spec, tmp_path / adapter, seed)
        assert peftc.attach(tmp_path / adapter, model) is model
        assert torch.equal(output(name, model), alone[None]), "an adapter acts before it is chosen"
    assert peftc.attached(model) == tuple(SPECS)
    return name, model, alone


def test_each_adapter_is_what_it_is_alone(attached: tuple[str, Any, dict[str | None, Tensor]], tmp_path: Path) -> None:
    name, model, alone = attached
    for adapter in ("A", "C", None, "D", "B"):
        peftc.activate(model, adapter)
        close(output(name, model), alone[adapter], str(adapter))
    with peftc.adapter(model, "C"):
        close(output(name, model), alone["C"], "C in a block")
        with peftc.adapter(model):
            assert torch.equal(output(name, model), alone[None])
    with peftc.disabled(model):
        assert torch.equal(output(name, model), alone[None])
    before = output(name, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        peftc.activate(other, "D")
        close(output(name, other), alone["D"], "D in a copy")
    assert torch.equal(output(name, model), before), "a copy has a choice of its own"


def test_rows_of_one_batch_have_their_own_adapters(attached: tuple[str, Any, dict[str | None, Tensor]]) -> None:
    name, model, alone = attached
    for rows in (["A", "B", None, "C"], ["D", None, "A", "D"], ["C", "C", "B", "A"], [None] * 4, ["B"] * 4):
        with peftc.adapter(model, rows=rows):
            actual = output(name, model)
        close(actual, torch.stack([alone[adapter][row] for row, adapter in enumerate(rows)]), str(rows))


def test_gradients_reach_the_adapters_of_the_rows(attached: tuple[str, Any, dict[str | None, Tensor]]) -> None:
    name, model, _ = attached
    with peftc.adapter(model, rows=["A", "D", None, "A"]):
        model(**zoo.inputs(name, model, batch=4))[0].square().sum().backward()
    with_gradient = {
        adapter: any(p.grad is not None and bool(p.grad.any()) for p in peftc.parameters(model, adapter).values())
        for adapter in SPECS
    }
    assert with_gradient == {"A": True, "B": False, "C": False, "D": True}


def test_adapters_are_saved_swapped_and_detached(
    attached: tuple[str, Any, dict[str | None, Tensor]], tmp_path: Path
) -> None:
    name, model, alone = attached
    for adapter in SPECS:
        peftc.save(model, tmp_path / "again", name=adapter)
        loaded = peftc.load(tmp_path / "again", zoo.build(name, torch.float64))
        assert torch.equal(output(name, loaded), alone[adapter])
        assert {n: p.shape for n, p in peftc.parameters(loaded).items()} == {
            n: p.shape for n, p in peftc.parameters(model, adapter).items()
        }
    peftc.activate(model, "A")
    peftc.swap(model, "A", tmp_path / "B")
    close(output(name, model), alone["B"], "B in the place of A")
    with pytest.raises(peftc.PeftcError, match=r"P525.*another spec"):
        peftc.swap(model, "A", tmp_path / "C")
    peftc.detach(model, "A")
    assert torch.equal(output(name, model), alone[None]), "the base acts where the active one is taken out"
    peftc.activate(model, "B")
    close(output(name, model), alone["B"], "B after A is taken out")
    for adapter in ("B", "C", "D"):
        peftc.detach(model, adapter)
    assert torch.equal(output(name, model), alone[None])
    with pytest.raises(peftc.PeftcError, match="P410"):
        peftc.attached(model)


@pytest.mark.parametrize("recipe", some(sorted(RECIPES.glob("*.peft")), 3), ids=lambda path: path.stem)
def test_every_recipe_is_attached_or_refused(recipe: Path, tmp_path: Path) -> None:
    for name in ("llama", "bart", "bert"):
        try:
            alone = saved(name, recipe.read_text(encoding="utf-8"), tmp_path / "a", 1)
            break
        except peftc.PeftcError:
            continue
    else:
        pytest.skip("the recipe needs calibration, or a model of another kind")
    model = zoo.build(name, torch.float64)
    base = output(name, model)
    if (refusal := code_of(lambda: peftc.attach(tmp_path / "a", model))) is not None:
        assert refusal == "P549"
        assert torch.equal(output(name, model), base)
        return
    assert torch.equal(output(name, model), base)
    peftc.activate(model, "a")
    close(output(name, model), alone, recipe.stem)
    if (refusal := code_of(lambda: peftc.adapter(model, rows=["a", None, "a", None]))) is not None:
        assert refusal == "P536"
        return
    with peftc.adapter(model, rows=["a", None, "a", None]):
        close(output(name, model), torch.stack([alone[0], base[1], alone[2], base[3]]), recipe.stem)


def code_of(call: Callable[[], object]) -> str | None:
    """The code of the error of a call."""
    try:
        call()
    except peftc.PeftcError as error:
        return error.diagnostics[0].code
    return None


def test_compiled_code_follows_choices_without_new_graphs(tmp_path: Path) -> None:
    alone: dict[str | None, Tensor] = {}
    model: Any = zoo.build("llama", torch.float64)
    for seed, adapter in enumerate("ABC"):
        alone[adapter] = saved("llama", SPECS[adapter], tmp_path / adapter, seed)
        peftc.attach(tmp_path / adapter, model)
    alone[None] = output("llama", model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    peftc.activate(model, "A")
    inputs = zoo.inputs("llama", model, batch=4)
    with torch.no_grad():
        close(compiled(**inputs)[0], alone["A"], "A")
        graphs = counter.frame_count
        for adapter in ("B", "A"):
            peftc.swap(model, "A", tmp_path / adapter)
            close(compiled(**inputs)[0], alone[adapter], f"{adapter} in the place of A")
        assert counter.frame_count == graphs
        for number, rows in enumerate((["A", None, "B", "A"], ["B", "A", None, "B"], ["A", "B", "B", "A"])):
            with peftc.adapter(model, rows=rows):
                close(compiled(**inputs)[0], torch.stack([alone[a][i] for i, a in enumerate(rows)]), str(rows))
            assert counter.frame_count == graphs + 1, f"batch {number} is compiled again"


def test_a_store_has_the_last_used_adapters_on_the_model(tmp_path: Path) -> None:
    specs = [SPECS["A"]] * 5 + [SPECS["C"]]
    alone = [saved("llama", spec, tmp_path / f"a{i}", i) for i, spec in enumerate(specs)]
    model: nn.Module = zoo.build("llama", torch.float64)
    base = output("llama", model)
    store = peftc.AdapterStore(model, tmp_path, capacity=2)
    for number in (0, 1, 0, 2, 5, 3, 5):
        store.activate(f"a{number}")
        close(output("llama", model), alone[number], str(number))
        assert len(peftc.attached(model)) == len(store.resident) <= 2
        assert store.resident[-1] == f"a{number}"
    store.activate(None)
    with store.adapter(rows=["a1", None, "a4", "a1"]):
        close(output("llama", model), torch.stack([alone[1][0], base[1], alone[4][2], alone[1][3]]), "rows")
        with pytest.raises(peftc.PeftcError, match=r"P548.*in use"):
            store.activate("a0")
    with pytest.raises(peftc.PeftcError, match=r"P548.*in use"), store.adapter(rows=["a1", "a2", "a3", None]):
        pass
    with pytest.raises(peftc.PeftcError, match=r"P547.*no adapter `b`"):
        store.activate("b")
    with pytest.raises(peftc.PeftcError, match="P545"):
        peftc.AdapterStore(model, tmp_path, capacity=0)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("peftc.attach(tmp_path / 'a', model)", "P548"),
        ("peftc.attach(tmp_path / 'a', model, name='b c')", "P548"),
        ("peftc.attach(tmp_path / 'missing', model, name='b')", "P520"),
        ("peftc.attach(tmp_path / 'tasks', model)", "P549"),
        ("peftc.attach(tmp_path / 'numbers', model)", "P549"),
        ("peftc.activate(model, 'b')", "P547"),
        ("peftc.adapter(model, 'b')", "P547"),
        ("peftc.adapter(model, rows='a')", "P548"),
        ("peftc.adapter(model, rows=[])", "P548"),
        ("peftc.adapter(model, 'a', rows=['a'])", "P548"),
        ("peftc.adapter(model, rows=['a', 'b'])", "P547"),
        ("peftc.detach(model, 'b')", "P547"),
        ("peftc.remove(model, 'a')", "P413"),
        ("peftc.adapter(model, rows=['w', 'a'])", "P536"),
        ("peftc.adapter(model, rows=['k', None])", "P536"),
        ("peftc.save(model, tmp_path / 'new')", "P549"),
    ],
)
def test_what_cannot_be_is_refused(call: str, code: str, refusals: tuple[nn.Module, Tensor, Path]) -> None:
    model, before, tmp_path = refusals
    with pytest.raises(peftc.PeftcError) as error:
        eval(call, {"peftc": peftc, "model": model, "tmp_path": tmp_path})
    assert [one.code for one in error.value.diagnostics] == [code]
    assert torch.equal(output("llama", model), before)
    assert peftc.attached(model) == ("a", "w", "k")


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Tensor, Path]:
    tmp_path = tmp_path_factory.mktemp("refusals")
    specs = {
        "a": SPECS["A"],
        "w": "peft 2\nedit w at layer[*].attn.q { w += lowrank(r=2) }",
        "k": "peft 2\nedit k at layer[*].attn { kv = concat(prefix(len=2), kv) }",
        "tasks": "peft 2\nedit a at layer[*].ffn per task { h += adapter(h, r=2) }",
        "numbers": f"{SPECS['A']}\nedit half at layer[*].attn {{ h *= 0.5 }}",
    }
    for folder, spec in specs.items():
        peftc.save(peftc.compile(spec, zoo.build("llama", torch.float64), seed=0), tmp_path / folder)
    model = zoo.build("llama", torch.float64)
    for adapter in ("a", "w", "k"):
        peftc.attach(tmp_path / adapter, model)
    return model, output("llama", model), tmp_path


def test_attached_adapters_act_beside_compiled_edits(tmp_path: Path) -> None:
    alone = saved("llama", SPECS["A"], tmp_path / "a", 1)
    model: Any = peftc.compile(SPECS["D"], zoo.build("llama", torch.float64), seed=3)
    disturb(model, 3)
    before = output("llama", model)
    peftc.attach(tmp_path / "a", model)
    assert torch.equal(output("llama", model), before)
    peftc.activate(model, "a")
    both = output("llama", model)
    assert not torch.allclose(both, before)
    assert not torch.allclose(both, alone)
    joint: Any = peftc.compile(SPECS["D"], zoo.build("llama", torch.float64), seed=3)
    disturb(joint, 3)
    close(both, output("llama", peftc.load(tmp_path / "a", joint)), "as loaded")
    peftc.save(model, tmp_path / "own", name="default")
    with peftc.adapter(model):
        model.save_pretrained(tmp_path / "checkpoint")
    for folder in ("own", "checkpoint"):
        assert torch.equal(output("llama", peftc.load(tmp_path / folder, zoo.build("llama", torch.float64))), before)
    peftc.remove(model, "default")
    close(output("llama", model), alone, "without the spec")
    model.save_pretrained(tmp_path / "active")
    assert torch.equal(output("llama", peftc.load(tmp_path / "active", zoo.build("llama", torch.float64))), alone)


def test_a_spec_without_tasks_is_attached_from_a_model_with_tasks(tmp_path: Path) -> None:
    spec = "peft 2\nedit a at layer[*].attn.q { h += lora(x, r=2) }"
    model = peftc.compile(spec, zoo.build("bert", torch.float64).eval(), seed=0, name="a")
    peftc.compile(spec.replace("a at", "t at").replace(" {", " per task {"), model, name="t", tasks=["x", "y"])
    disturb(model, 0)
    peftc.set_task(model, "x")
    with peftc.disabled(model, "t"):
        want = output("bert", model)
    assert peftc.inspect(peftc.save(model, tmp_path / "a", "a")).tasks == ()
    assert peftc.inspect(peftc.save(model, tmp_path / "t", "t")).tasks == ("x", "y")
    other = peftc.attach(tmp_path / "a", zoo.build("bert", torch.float64).eval())
    peftc.activate(other, "a")
    assert torch.equal(output("bert", other), want)
    with pytest.raises(peftc.PeftcError, match="P549"):
        peftc.attach(tmp_path / "t", other)


def test_the_trainer_saves_and_resumes_the_active_adapter_alone(tmp_path: Path) -> None:
    def attached_pair() -> Any:
        model = zoo.build("llama")
        for adapter in "AB":
            peftc.attach(tmp_path / adapter, model, name=adapter, other_weights=True)
        return peftc.activate(model, "A")

    for seed, adapter in enumerate("AB"):
        saved("llama", SPECS[adapter], tmp_path / adapter, seed)
    ids = torch.arange(5, 12)
    data = [{"input_ids": ids, "labels": ids}] * 8
    settings: dict[str, Any] = {
        "max_steps": 4,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "per_device_train_batch_size": 2,
    }
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), learning_rate=1e-2, **settings)
    model = attached_pair()
    first, other = output("llama", model), {n: p.clone() for n, p in peftc.parameters(model, "B").items()}
    transformers.Trainer(model, arguments, train_dataset=data).train()
    result = output("llama", model)
    assert not torch.allclose(result, first)
    assert all(torch.equal(other[n], p) for n, p in peftc.parameters(model, "B").items())
    alone = peftc.load(tmp_path / "out" / "checkpoint-4", zoo.build("llama"))
    torch.testing.assert_close(output("llama", alone), result)
    again = attached_pair()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    transformers.Trainer(again, arguments, train_dataset=data).train(resume_from_checkpoint=checkpoint)
    assert torch.equal(output("llama", again), result)


def test_places_that_adapters_have_of_their_own_stay_theirs_in_rows(tmp_path: Path) -> None:
    """Adapters that differ in saved values which nothing trains, too."""
    spec = """peft 2
    form drawn(x) { param v[64] = normal(0.1) fixed spots[d(out)] = choice(64) f = gather(v, spots) * x }
    edit e at layer[*].attn.q { h += drawn(x) }"""
    alone: list[Tensor] = []
    for number in range(2):
        model = peftc.compile(spec, zoo.build("llama", torch.float64), seed=number)
        disturb(model, number)
        for places in states(model).values():
            places.copy_((places + 7 * number) % 64)
        peftc.save(model, tmp_path / f"a{number}")
        alone.append(output("llama", peftc.load(tmp_path / f"a{number}", zoo.build("llama", torch.float64))))
    model = zoo.build("llama", torch.float64)
    for number in range(2):
        peftc.attach(tmp_path / f"a{number}", model)
    with peftc.adapter(model, rows=["a0", "a1", "a0", "a1"]):
        close(output("llama", model), torch.stack([alone[row % 2][row] for row in range(4)]), "rows")
