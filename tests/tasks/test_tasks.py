"""Parameters for each task: one task at a time, mixed batches, adding and dropping tasks, files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import peftc
from tests import zoo
from tests.laws.harness import close, randomise

TASKS = ("sst", "mnli", "sts")
SPEC = """peft 1
let rule = shared(phm(r=4, n=4))
edit shared at layer[*].attn.q { h += lora(x, r=2) }
edit own at layer[*].ffn per task { let g = gate(x)  h += g * adapter(x, r=2, act=tanh) }
edit rows at layer[*].attn per task { kv = concat(prefix(len=2), kv) }
edit group at layer[*].attn.o per task { h += vera(x, r=3) }
edit scaled at layer[*].ffn.hidden per task { h *= vector(init=1) }
edit part at layer[*].attn per task { h += rule(h) }"""
PREFIX = "peft 1\nedit p at layer[*].attn per task { kv = concat(prefix(len=2, reparam=mlp(3)), kv) }"
PROMPT = "peft 1\nedit p at embed per task { h = concat(prompt(len=2, reparam=mlp(3)), h) }"
FLAT = """peft 1
edit a at layer[*].ffn per task { let g = gate(x)  h += g * adapter(x, r=2) }
edit b at layer[*].ffn.up per task { h += lora(x, r=2) }
edit c at layer[*].ffn.hidden per task { h *= vector(init=1) }"""  # OPT has (batch · tokens, d) there
WEIGHT = "peft 1\nedit w at layer[*].attn.q per task { w += lowrank(r=2) }"


def compiled(name: str, spec: str = SPEC, tasks: tuple[str, ...] = TASKS) -> Any:
    model = peftc.compile(spec, zoo.build(name, torch.float64), seed=0, tasks=tasks).eval()
    randomise(peftc.parameters(model))
    return model


def three(name: str, model: nn.Module) -> dict[str, Tensor]:
    """A batch of three examples."""
    inputs = zoo.inputs(name, model)
    return {k: torch.cat([v, v.flip(-1)])[:3] if v.shape[0] == 2 else v for k, v in inputs.items()}


def one_by_one(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    outputs: list[Tensor] = []
    for name in peftc.tasks(model):
        with peftc.task(model, name):
            outputs.append(model(**inputs).logits)
    return outputs


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        *((name, spec) for name in ("bart", "llama", "bert") for spec in (SPEC, PREFIX)),
        *(("llama", PROMPT), ("bert", PROMPT), ("opt", PROMPT), ("opt", FLAT)),
        (
            "bart",
            f"{PROMPT.replace(' at ', ' at encoder.')}\nedit q at decoder.embed {{ h = concat(prompt(len=1), h) }}",
        ),
    ],
)
def test_each_row_uses_its_own_task(name: str, spec: str) -> None:
    model = compiled(name, spec)
    inputs = three(name, model)
    alone = one_by_one(model, inputs)
    assert not torch.allclose(alone[0], alone[1])
    for ids in ([2, 0, 1], [1, 1, 0], [2, 2, 2]):
        want = torch.stack([alone[task][row] for row, task in enumerate(ids)])
        with peftc.task(model, task_ids=torch.tensor(ids)):
            close(model(**inputs).logits, want, "by number")
        with peftc.task(model, task_ids=[TASKS[i] for i in ids]):
            close(model(**inputs).logits, want, "by name")


@pytest.mark.parametrize(
    "equation",
    [
        "h = linear(x)",
        "h += lora(x, r=2)",
        "h *= vector(init=1)",
        "h *= scalar(init=1)",
        "let g = gate(x)  h = head(x + g * adapter(x, r=2))",
    ],
)
def test_each_task_has_its_own_head(equation: str) -> None:
    """Also on states without tokens: (batch, d)."""
    model: Any = with_classifier()
    peftc.compile(f"peft 1\nedit cls at head per task {{ {equation} }}", model, tasks=TASKS, seed=0)
    randomise(peftc.parameters(model))
    inputs = {"input_ids": torch.arange(3, 24).view(3, 7)}
    alone = one_by_one(model, inputs)
    assert alone[0].shape == (3, 5)
    assert not torch.allclose(alone[0], alone[1])
    with peftc.task(model, task_ids=torch.tensor([2, 0, 1])):
        close(model(**inputs).logits, torch.stack([alone[2][0], alone[0][1], alone[1][2]]), "mixed")


def with_classifier() -> nn.Module:
    """BERT with a five-class classifier on the pooled state."""
    torch.manual_seed(0)
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16, "num_labels": 5}
    config = transformers.BertConfig(vocab_size=32, hidden_size=8, intermediate_size=12, **small)
    return transformers.BertForSequenceClassification(config).double().eval()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_task_alone_is_the_spec_without_tasks(name: str) -> None:
    """The same model as one compiled for that task only, with its parameters."""
    model, plain = compiled(name), peftc.compile(SPEC.replace(" per task", ""), zoo.build(name, torch.float64), seed=0)
    plain.eval()
    inputs = three(name, model)
    for task in TASKS:
        values = {k.replace(f".tasks.{task}.", "."): v for k, v in peftc.parameters(model).items()}
        with torch.no_grad():
            for key, parameter in peftc.parameters(plain).items():
                parameter.copy_(values[key])
        with peftc.task(model, task):
            close(model(**inputs).logits, plain(**inputs).logits, task)


def test_gradients_reach_the_tasks_of_the_batch_and_no_others() -> None:
    model = compiled("llama")
    with peftc.task(model, task_ids=torch.tensor([0, 2, 2])):
        model(**three("llama", model)).logits.pow(2).sum().backward()
    for key, parameter in peftc.parameters(model).items():
        has_gradient = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert has_gradient == (".tasks.mnli." not in key), key


@pytest.mark.parametrize(("name", "spec"), [("llama", SPEC), ("bart", PREFIX), ("bert", PROMPT), ("opt", FLAT)])
def test_gradients_are_the_sums_of_those_of_the_rows(name: str, spec: str) -> None:
    model = compiled(name, spec).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs, ids = three(name, model), [2, 0, 2]
    rows = [{key: value[i : i + 1] for key, value in inputs.items()} for i in range(3)]
    gradients: list[dict[str, Tensor]] = []
    for batches in (
        [(inputs, {"task_ids": ids})],
        [(row, {"name": TASKS[i]}) for row, i in zip(rows, ids, strict=True)],
    ):
        model.zero_grad()
        for batch, choice in batches:
            with peftc.task(model, **choice):
                model(**batch).logits.pow(2).sum().backward()
        named = peftc.parameters(model).items()
        gradients.append({key: p.grad.clone() for key, p in named if p.grad is not None})
    mixed, alone = gradients
    assert mixed.keys() == alone.keys()
    for key, gradient in alone.items():
        close(mixed[key], gradient, key)


def test_counts_are_those_of_the_model() -> None:
    model = compiled("bart")
    plan = peftc.plan(SPEC, zoo.build("bart"), tasks=TASKS)
    assert plan.totals.trained == sum(p.numel() for p in peftc.parameters(model).values())
    one = peftc.plan(SPEC, zoo.build("bart"))
    common = plan.edit("shared").trained + 4**3
    assert plan.totals.trained - common == 3 * (one.totals.trained - common)
    assert not plan.edit("own").foldable
    assert "each task" in plan.edit("own").reason


def test_added_and_dropped() -> None:
    model = compiled("bart")
    inputs = three("bart", model)
    before = one_by_one(model, inputs)
    parameters = {k: v.clone() for k, v in peftc.parameters(model).items()}
    assert peftc.add_task(model, "new", like="mnli") is model
    assert peftc.tasks(model) == (*TASKS, "new")
    assert all(torch.equal(peftc.parameters(model)[k], v) for k, v in parameters.items())
    after = one_by_one(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(after, (*before, before[1]), strict=True))
    peftc.drop_task(model, "sst")
    assert [torch.equal(a, b) for a, b in zip(one_by_one(model, inputs), (*before[1:], before[1]), strict=True)] == [
        True
    ] * 3
    peftc.add_task(model, "fresh")
    assert not any(".tasks.sst." in key for key in peftc.parameters(model))
    plain = zoo.build("bart", torch.float64).eval()(**inputs).logits
    assert torch.equal(peftc.remove(model)(**inputs).logits, plain)


def test_saved_loaded_copied_and_with_another_spec(tmp_path: Path) -> None:
    model = compiled("llama")
    inputs = three("llama", model)
    ids = torch.tensor([1, 0, 2])
    with peftc.task(model, task_ids=ids):
        want = model(**inputs).logits
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64)).eval()
    assert peftc.tasks(loaded) == TASKS
    twin = copy.deepcopy(model)
    for other in (loaded, twin):
        with peftc.task(other, task_ids=ids):
            assert torch.equal(other(**inputs).logits, want)
        with pytest.raises(peftc.PeftcError, match="P533"):
            model(**inputs)  # chosen for the other alone
    peftc.compile("peft 1\nedit more at layer[*].attn.v { h += lora(x, r=2) }", model, seed=1)
    other = "peft 1\nedit late at layer[*].attn.k per task { h += lora(x, r=2) }"
    peftc.compile(other, model, seed=1, name="more tasks")
    assert peftc.tasks(model) == TASKS
    peftc.remove(model, "more tasks")
    with peftc.task(model, task_ids=ids):
        assert torch.equal(model(**inputs).logits, want)


@pytest.mark.parametrize("spec", [SPEC, PROMPT])
def test_beams_are_rows_of_their_example(spec: str) -> None:
    model = compiled("llama", spec)
    ids = three("llama", model)["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    options["attention_mask"] = torch.ones_like(ids)
    with peftc.task(model, task_ids=torch.tensor([1, 0, 2])):
        mixed = model.generate(ids, **options)
    for row, task in enumerate(("mnli", "sst", "sts")):
        with peftc.task(model, task):
            alone = model.generate(ids[row : row + 1], **options | {"attention_mask": torch.ones_like(ids[:1])})
        assert torch.equal(mixed[row, : alone.shape[1]], alone[0])


@pytest.mark.parametrize("spec", [SPEC, PROMPT])
def test_a_call_has_the_rows_that_tasks_are_chosen_for(spec: str) -> None:
    model = compiled("llama", spec)
    twice = {name: torch.cat([value, value]) for name, value in three("llama", model).items()}
    with peftc.task(model, task_ids=torch.tensor([1, 0, 2])):
        with pytest.raises(peftc.PeftcError, match=r"P536.*`task_ids` has 3 entries.*6 rows"):
            model(**twice)
        with pytest.raises(peftc.PeftcError, match=r"P536.*`task_ids` has 3 entries.*6 rows"):
            model(twice["input_ids"])
        assert (
            model.generate(twice["input_ids"][:3], max_new_tokens=2, num_return_sequences=2, do_sample=True).shape[0]
            == 6
        )


def test_one_task_needs_no_choice() -> None:
    for tasks, names in ((None, ("default",)), (("only",), ("only",))):
        model = peftc.compile(PREFIX, zoo.build("llama"), tasks=tasks)
        assert peftc.tasks(model) == names
        without = model(**zoo.inputs("llama", model)).logits
        with peftc.task(model, names[0]):
            assert torch.equal(model(**zoo.inputs("llama", model)).logits, without)


@pytest.mark.parametrize(
    ("tasks", "code"), [((), "P537"), (("a", "a"), "P537"), (("a.b",), "P537"), (("keys",), "P537"), (("",), "P537")]
)
def test_invalid_names_of_tasks(tasks: tuple[str, ...], code: str) -> None:
    model = zoo.build("llama")
    with pytest.raises(peftc.PeftcError, match=code):
        peftc.compile(PREFIX, model, tasks=tasks)
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"


def test_refusals() -> None:
    model = compiled("llama", PREFIX)
    inputs = three("llama", model)
    wrong: list[tuple[str, Any]] = [
        ("P534", lambda: peftc.task(model, "stst")),
        ("P534", lambda: peftc.task(model, task_ids=["sst", "nli", "sts"])),
        ("P535", lambda: peftc.task(model)),
        ("P535", lambda: peftc.task(model, "sst", task_ids=torch.tensor([0]))),
        ("P535", lambda: peftc.task(model, task_ids=torch.tensor([0, 3, 1]))),
        ("P535", lambda: peftc.task(model, task_ids=torch.tensor([-1, 0, 1]))),
        ("P535", lambda: peftc.task(model, task_ids=torch.tensor([0.0, 1.0, 1.0]))),
    ]
    for code, block in wrong:
        with pytest.raises(peftc.PeftcError, match=code), block():
            pass
    with pytest.raises(peftc.PeftcError, match="P536"), peftc.task(model, task_ids=torch.tensor([0, 1])):
        model(**inputs)
    for code, act in (
        ("P537", lambda: peftc.add_task(model, "sst")),
        ("P534", lambda: peftc.add_task(model, "x", like="y")),
        ("P534", lambda: peftc.drop_task(model, "y")),
        ("P537", lambda: peftc.compile(WEIGHT, model, tasks=("a", "b"))),
        (
            "P537",
            lambda: peftc.compile(
                "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }", zoo.build("t5"), tasks=["a"]
            ),
        ),
    ):
        with pytest.raises(peftc.PeftcError, match=code):
            act()
    assert peftc.tasks(model) == TASKS
    peftc.drop_task(model, "sst")
    peftc.drop_task(model, "mnli")
    with pytest.raises(peftc.PeftcError, match="P537"):
        peftc.drop_task(model, "sts")
    weight = compiled("llama", WEIGHT)
    with peftc.task(weight, "mnli"):
        weight(**inputs)
    with pytest.raises(peftc.PeftcError, match="P536"), peftc.task(weight, task_ids=torch.tensor([0, 1, 2])):
        weight(**inputs)


FORMS = (
    "edit e at layer[*].attn {{ kv = concat(prefix(len=2, reparam=mlp(3)), kv) }}",
    "edit e at layer[*].ffn {{ h += mixture(h, r=2, n=2) + adapter(x, r=2) }}",
    "edit e at layer[*].attn.q {{ w += fastfood(d=5) }}",
    "edit e at layer[*].attn.q {{ w += sparse(density=0.05, select=random) }}",
    "edit e at layer[*].attn.q {{ h += svd(x, r=3) }}",
    "edit e at embed {{ h = concat(prompt(len=2, reparam=mlp(3)), h) }}",
)


@pytest.mark.parametrize("text", FORMS)
def test_every_task_has_its_own_parameters_in_the_file(text: str, tmp_path: Path) -> None:
    """Forms with common parameters, too: common to the sites of a task, not to all tasks."""
    spec = "peft 1\n" + text.format().replace(" {", " per task {", 1)
    model = compiled("llama", spec, ("a", "b"))
    inputs = three("llama", model)
    first, second = one_by_one(model, inputs)
    assert not torch.allclose(first, second)
    plan = peftc.plan(spec, zoo.build("llama"), tasks=("a", "b"))
    assert plan.totals.trained == sum(p.numel() for p in peftc.parameters(model).values())
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64)).eval()
    assert plan.totals.stored == sum(p.numel() for p in peftc.parameters(loaded).values())
    for got, want in zip(one_by_one(loaded, inputs), (first, second), strict=True):
        close(got, want, "loaded")
