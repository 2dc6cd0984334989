"""Rank pruning as in PEFT's allocator; routes of mixtures; loss terms; the callback; training state
in files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import peftc
from peftc.equation_code.budget_module import BudgetModule
from peftc.training.steps import consistency, forms_of
from tests import zoo
from tests.laws.harness import close
from tests.reference.literature import mixture
from tests.reference.reference import Reference

TOTAL = 12
ADALORA = (
    f"peft 1\nedit e at layer[*].attn.q | layer[*].ffn.down "
    f"{{ h += svd(x, r=4, alpha=8, target=2, warmup=2, cooldown=3, every=2, total={TOTAL}) }}"
)
MIXTURE = "peft 1\nedit e at layer[*].ffn { h += mixture(x, r=3, n=4, act=gelu) }"


def adalora(name: str) -> tuple[Any, Any, dict[str, torch.nn.Parameter]]:
    """Our model and PEFT's with the same values, and PEFT's parameters by our names."""
    ours = peftc.compile(ADALORA, zoo.build(name, torch.float64), seed=0)
    targets = {key.split("/")[1]: key for key in peftc.parameters(ours)}
    modules = {site.path: site.module for site in peftc.sites(zoo.build(name)).sites if site.path in targets}
    config = peft.AdaLoraConfig(
        init_r=4,
        target_r=2,
        lora_alpha=8,
        tinit=2,
        tfinal=3,
        deltaT=2,
        total_step=TOTAL,
        target_modules=list(modules.values()),
    )
    theirs: Any = peft.get_peft_model(zoo.build(name, torch.float64), config).double()
    result: dict[str, torch.nn.Parameter] = {}
    with torch.no_grad():
        for path, module in modules.items():
            layer: Any = theirs.get_submodule(f"base_model.model.{module}")
            for key, parameter in (("P", layer.lora_B), ("Q", layer.lora_A), ("values", layer.lora_E)):
                saved = f"e/{path}/svd.{key}"
                mine = peftc.parameters(ours)[saved]
                if key == "values":
                    mine.copy_(torch.linspace(0.1, 0.4, 4) * (1 + len(result)))  # zeros would stop the other gradients
                parameter["default"].copy_(mine.view(parameter["default"].shape))
                result[saved] = parameter["default"]
    return ours.train(), theirs.train(), result


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_ranks_are_pruned_as_in_peft(name: str) -> None:
    ours, theirs, result = adalora(name)
    batch = zoo.inputs(name, ours)
    generator = torch.Generator().manual_seed(3)
    alive: list[int] = []
    for step in range(TOTAL + 2):
        direction = torch.randn(ours(**batch).logits.shape, generator=generator, dtype=torch.float64)
        for model in (ours, theirs):
            model.zero_grad()
            (model(**batch).logits * direction).sum().backward()
        with torch.no_grad():
            for parameters in (peftc.parameters(ours), result):
                for parameter in parameters.values():
                    parameter -= 1e-3 * parameter.grad  # type: ignore[operator]
        peftc.step(ours, step)
        theirs.base_model.update_and_allocate(step)
        for key, parameter in peftc.parameters(ours).items():
            close(parameter, result[key].view(parameter.shape), f"{key} after step {step}")
        alive.append(sum(int((p != 0).sum()) for key, p in peftc.parameters(ours).items() if key.endswith("values")))
    sites = len(result) // 3
    assert alive[0] == 4 * sites
    assert alive[-1] == 2 * sites
    want = theirs.peft_config["default"].orth_reg_weight
    norms = [torch.linalg.matrix_norm(p @ p.T - torch.eye(4)) for k, p in result.items() if k.endswith("Q")]
    norms += [torch.linalg.matrix_norm(p.T @ p - torch.eye(4)) for k, p in result.items() if k.endswith("P")]
    close(peftc.losses(ours)["e.orthogonality"], want * torch.stack(norms).mean(), "orthogonality")


def test_a_run_resumes_from_a_file(tmp_path: Path) -> None:
    """The file has pruned ranks and importance scores: the rest of the run is the same."""

    def run(model: Any, steps: range) -> dict[str, Tensor]:
        batch = zoo.inputs("llama", model)
        for step in steps:
            model.zero_grad()
            model(**batch).logits.pow(2).sum().backward()
            with torch.no_grad():
                for parameter in peftc.parameters(model).values():
                    parameter -= 1e-4 * parameter.grad
            peftc.step(model, step)
        return {k: v.detach().clone() for k, v in peftc.parameters(model).items()}

    whole = peftc.compile(ADALORA, zoo.build("llama", torch.float64), seed=0)
    with torch.no_grad():
        for key, parameter in peftc.parameters(whole).items():
            parameter += 0.1 * key.endswith("values")
    run(whole, range(7))
    peftc.save(whole, tmp_path / "a")
    other = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64))
    first, again = run(whole, range(7, TOTAL)), run(other, range(7, TOTAL))
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_each_task_prunes_ranks_in_its_own_steps() -> None:
    """Like a separate model trained in those steps. A task that is added after the last round is
    pruned, too.
    """
    tasks, batch = ("even", "odd", "late"), zoo.inputs("llama", zoo.build("llama"))
    model = peftc.compile(ADALORA.replace(" {", " per task {"), zoo.build("llama", torch.float64), seed=0, tasks=tasks)
    alone = {task: peftc.compile(ADALORA, zoo.build("llama", torch.float64), seed=0) for task in tasks}
    with torch.no_grad():
        for key, parameter in peftc.parameters(model).items():
            parameter += 0.1 * key.endswith("values")
            task = key.partition(".tasks.")[2].partition(".")[0]
            peftc.parameters(alone[task])[key.replace(f".tasks.{task}", "")].copy_(parameter)
    for step in range(TOTAL + 4):
        task = "late" if step > TOTAL else ("even", "odd")[step % 2]
        for one in (model, alone[task]):
            one.zero_grad(set_to_none=step % 3 == 0)
            with peftc.task(model, task):
                extra = sum(peftc.losses(one).values())
                (one(**batch).logits.pow(2).sum() + extra).backward()
            with torch.no_grad():
                for parameter in peftc.parameters(one).values():
                    if parameter.grad is not None:
                        parameter -= 1e-4 * parameter.grad
            peftc.step(one, step)
    for task, plain in alone.items():
        for key, parameter in peftc.parameters(plain).items():
            site, _, part = key.rpartition(".")
            close(peftc.parameters(model)[f"{site}.tasks.{task}.{part}"], parameter, f"{key} of {task}")
        values = [p for key, p in peftc.parameters(plain).items() if key.endswith("values")]
        assert sum(int((p != 0).sum()) for p in values) == 2 * len(values)


def test_pruned_ranks_stay_zero_under_momentum() -> None:
    """Momentum updates a task's parameters in batches of other tasks; pruned ranks stay zero even
    after its last round.
    """
    tasks, last = ("a", "b"), TOTAL - 3
    model = peftc.compile(ADALORA.replace(" {", " per task {"), zoo.build("llama", torch.float64), seed=0, tasks=tasks)
    batch, weights = zoo.inputs("llama", model), peftc.parameters(model)
    values = [p for key, p in weights.items() if key.endswith(".tasks.a.values")]
    for step, task in ((0, "a"), (last, "a"), (last + 1, "b")):
        with torch.no_grad():
            for parameter in weights.values():
                parameter += 0.1
        model.zero_grad()
        with peftc.task(model, task):
            model(**batch).logits.pow(2).sum().backward()
        peftc.step(model, step)
        assert sum(int((p == 0).sum()) for p in values) == (2 * len(values) if step >= last else 0)


def test_a_step_without_gradients_is_refused() -> None:
    model = peftc.compile(ADALORA, zoo.build("llama"))
    with pytest.raises(peftc.PeftcError, match="P539"):
        peftc.step(model, 0)


def mixtures(model: Any) -> list[Any]:
    return [form for _, form in forms_of(model, peftc.installation.record.installation_of(model))]


def test_adamix_keeps_its_routes_where_training_goes_on(tmp_path: Path) -> None:
    how: Any = {"settings": {"n": 2, "r": 2, "keep": True}, "seed": 0}
    model = peftc.compile(Path("specs/adamix.peft"), zoo.build("llama"), **how)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.normal_()
    again = peftc.load(peftc.save(model, tmp_path / "a"), zoo.build("llama"))
    remaining = peftc.parameters(again)
    assert all(torch.equal(remaining[key], parameter) for key, parameter in peftc.parameters(model).items())


def test_adamix_takes_one_down_projection_and_the_up_projection_of_all() -> None:
    model: Any = peftc.compile(Path("specs/adamix.peft"), zoo.build("bert", torch.float64), seed=0, settings={"r": 3})
    weights = peftc.parameters(model)
    with torch.no_grad():
        for parameter in weights.values():
            parameter.normal_()
    batch, drawn_routes = zoo.inputs("bert", model), set[int]()
    for step in range(4):
        peftc.step(model, step)
        layers = enumerate(mixtures(model))
        routes = {f"encoder.layer[{i}].ffn": int(form.get_buffer("route")[0]) for i, form in layers}
        drawn_routes |= set(routes.values())
        ref = Reference("bert", zoo.build("bert", torch.float64))
        mixture("mixture", "gelu", routes)(ref, weights)
        close(model.train()(**batch).logits, ref.model(**batch).logits, "a route")
    assert len(drawn_routes) > 1
    shapes = {key.rpartition(".")[2]: tuple(parameter.shape[:1]) for key, parameter in weights.items()}
    assert shapes == {"down": (4,), "down_bias": (4,), "up": (1,), "up_bias": (1,)}


def test_a_mixture_trains_one_route_and_is_the_mean_of_all(tmp_path: Path) -> None:
    model = peftc.compile(MIXTURE, zoo.build("llama", torch.float64), seed=0)
    batch = zoo.inputs("llama", model)
    drawn_routes: set[tuple[int, ...]] = set()
    for step in range(8):
        peftc.step(model, step)
        forms = mixtures(model)
        routes = [tuple(form.get_buffer("route").tolist()) for form in forms]
        drawn_routes |= set(routes)
        model.zero_grad()
        first = model.train()(**batch).logits
        assert torch.equal(first, model(**batch).logits)
        first.sum().backward()
        for form, (i, j) in zip(forms, routes, strict=True):
            has_gradient = [form.down.grad.abs().sum((1, 2)) > 0, form.up.grad.abs().sum((1, 2)) > 0]
            assert [m.nonzero().flatten().tolist() for m in has_gradient] == [[i], [j]]
    assert len(drawn_routes) > 3
    peftc.step(model, 3)
    again = [tuple(form.get_buffer("route").tolist()) for form in mixtures(model)]
    peftc.step(model, 4)
    peftc.step(model, 3)
    assert [tuple(form.get_buffer("route").tolist()) for form in mixtures(model)] == again
    model.eval()
    peftc.save(model, tmp_path / "a")
    merged = peftc.load(tmp_path / "a", zoo.build("llama", torch.float64)).eval()
    close(merged(**batch).logits, model(**batch).logits, "mean")
    assert all("/adapter." in key for key in peftc.parameters(merged))
    plan = peftc.plan(MIXTURE, zoo.build("llama"))
    assert plan.totals.stored == sum(p.numel() for p in peftc.parameters(merged).values())
    assert plan.totals.trained == sum(p.numel() for p in peftc.parameters(model).values())


def test_routes_are_drawn_anew_where_no_step_sets_them() -> None:
    model = peftc.compile(MIXTURE, zoo.build("llama", torch.float64), seed=0).train()
    batch = zoo.inputs("llama", model)
    torch.manual_seed(0)
    assert len({float(model(**batch).logits.detach().sum()) for _ in range(6)}) > 2


def test_consistency() -> None:
    model = peftc.compile(MIXTURE, zoo.build("llama", torch.float64), seed=0).train()
    batch = zoo.inputs("llama", model)
    peftc.step(model, 1)
    logits = model(**batch).logits
    assert peftc.losses(model) == {}
    torch.manual_seed(1)
    result = peftc.losses(model, inputs=batch, logits=logits)["consistency"]
    torch.manual_seed(1)
    for form in mixtures(model):
        form.get_buffer("route").fill_(-1)
    p, q = (x.softmax(-1).flatten(0, -2) for x in (logits, model(**batch).logits))
    want = ((p * (p / q).log()).sum(-1) + (q * (q / p).log()).sum(-1)).mean() / 2
    close(result, want, "consistency")
    assert float(consistency(logits, logits).detach()) == pytest.approx(0.0, abs=1e-12)
    result.backward()
    assert any(form.down.grad is not None for form in mixtures(model))


def test_the_trainer_calls_it(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = peftc.compile(MIXTURE, zoo.build("llama"), seed=0)
    data = [{k: v[0] for k, v in zoo.inputs("llama", model, labels=True).items()} for _ in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[peftc.StepCallback()]).train()  # type: ignore[arg-type]
    routes = [form.get_buffer("route").tolist() for form in mixtures(model)]
    peftc.step(model, 2)
    assert routes == [form.get_buffer("route").tolist() for form in mixtures(model)]


def test_the_consistency_forward_keeps_the_routes_of_the_first() -> None:
    """Checkpointing recomputes the first forward in the backward pass, with its own route."""
    model = peftc.compile(MIXTURE, zoo.build("llama", torch.float64), seed=0).train()
    batch = zoo.inputs("llama", model)
    for step in range(3):
        peftc.step(model, step)
        routes = [form.get_buffer("route").clone() for form in mixtures(model)]
        logits = model(**batch).logits
        peftc.losses(model, inputs=batch, logits=logits)
        assert all(torch.equal(form.get_buffer("route"), r) for form, r in zip(mixtures(model), routes, strict=True))
        assert torch.equal(model(**batch).logits, logits)
        with pytest.raises(IndexError):  # and after an error
            peftc.losses(model, inputs={**batch, "input_ids": batch["input_ids"] + 10**6}, logits=logits)
        assert all(torch.equal(form.get_buffer("route"), r) for form, r in zip(mixtures(model), routes, strict=True))


def test_remaining_ranks_equal_the_budget() -> None:
    """Each round keeps as many triplets as the schedule says, and pruned ones stay zero after the
    last round.
    """
    model = peftc.compile(ADALORA, zoo.build("llama", torch.float64), seed=0).train()
    batch = zoo.inputs("llama", model)
    optimizer = torch.optim.SGD(peftc.parameters(model).values(), lr=0.05)
    forms = [form for form in model.modules() if isinstance(form, BudgetModule)]
    with torch.no_grad():
        for form in forms:
            form.values.normal_()
    for step in range(TOTAL + 3):
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        peftc.step(model, step)
        dead = sum(int((form.values == 0).sum()) for form in forms)
        remaining = sum(int(form.get_buffer("kept").sum()) for form in forms)
        left = max(1 - (step - 2) / (TOTAL - 3 - 2), 0.0)  # of the time between warmup and cooldown
        if step > 2 and (step % 2 == 0 or step >= TOTAL - 3):
            assert remaining == int(2 * len(forms) * left**3 + 2 * len(forms))
            assert remaining + dead == 4 * len(forms)
