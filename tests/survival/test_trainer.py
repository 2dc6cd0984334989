"""transformers' Trainer and accelerate: training, evaluation, checkpoints and resumption as with
any model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import peftc
from tests import zoo
from tests.matrix import some
from tests.survival.harness import SOME, SPECIES, SPECS, all_close, compiled, model_inputs, same, state

STEPS = 4
RESUMES = [(n, ("lora" if n == "mixtral" else "mam", "weights")[i % 2]) for i, n in enumerate(SPECIES)]


class Examples(Dataset[dict[str, Tensor]]):
    def __init__(self, name: str, model: nn.Module, count: int = 8) -> None:
        inputs = model_inputs(name, model, batch=count, padding=None)
        self.rows = [{k: v[i] for k, v in inputs.items()} for i in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def trainer(name: str, model: Any, directory: Path, **options: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(directory),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.02,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **options,
    }
    rows = Examples(name, model)
    return Trainer(model, TrainingArguments(**arguments), train_dataset=rows, eval_dataset=rows)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def fresh(name: str, spec: str) -> Any:
    return compiled(name, spec, torch.float32, dropout=0.1)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize(("name", "spec"), some(RESUMES, 2))
def test_train_evaluate_checkpoint_resume(
    name: str, spec: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run interrupted and resumed in another model ends like an uninterrupted one,
    bit for bit. Checkpoints have no weights of the base.
    """
    whole = trainer(name, model := fresh(name, spec), tmp_path / "whole")
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    first = {n: p.clone() for n, p in model.named_parameters() if p.requires_grad}
    assert first
    before = whole.evaluate()["eval_loss"]
    whole.train()
    assert whole.evaluate()["eval_loss"] != before
    assert len(losses(whole)) == STEPS
    end = state(model)
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)
    assert all(not torch.equal(p, first[n]) for n, p in model.named_parameters() if n in first)
    again = trainer(
        name, other := peftc.compile("peft 1\n" + SPECS[spec], zoo.build(name, dropout=0.1), seed=8), tmp_path
    )
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(again)[-2:] == losses(whole)[-2:]
    assert same(state(other), end)
    assert "keys in the checkpoint" not in caplog.text
    (tensors,) = map(load_file, (tmp_path / "whole" / "checkpoint-2").glob("*.safetensors"))
    assert set(peftc.parameters(model)) <= set(tensors)
    assert all("/" in key for key in tensors)


@pytest.mark.parametrize(
    "name", some([n for n in SPECIES if n != "t5"], 2)
)  # T5 accepts `num_items_in_batch` and ignores it
def test_accumulated_batches_are_one_batch(name: str, tmp_path: Path) -> None:
    """Two accumulated half batches give the same steps as the batch."""
    ends: list[dict[str, Tensor]] = []
    for batch, steps in ((4, 1), (2, 2)):
        model = compiled(name, "mam", torch.float64)
        one_trainer = trainer(
            name,
            model,
            tmp_path,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            save_strategy="no",
            optim="sgd",
        )
        one_trainer.train()
        ends.append({n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
    all_close(*ends, tolerance=1e-5)


@pytest.mark.parametrize("name", some(SPECIES[1:], 2))
def test_the_best_model_is_loaded_at_the_end(name: str, tmp_path: Path) -> None:
    """With `greater_is_better` for the loss, the best model is the first."""
    one_trainer = trainer(
        name,
        model := fresh(name, "lora"),
        tmp_path,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    one_trainer.train()
    scores = [entry["eval_loss"] for entry in one_trainer.state.log_history if "eval_loss" in entry]
    assert len(scores) == STEPS
    best = scores.index(max(scores)) + 1
    assert best < STEPS, "training made the model no better"
    assert Path(str(one_trainer.state.best_model_checkpoint)) == tmp_path / f"checkpoint-{best}"
    assert one_trainer.evaluate()["eval_loss"] == pytest.approx(max(scores), rel=1e-6)
    (tensors,) = map(load_file, (tmp_path / f"checkpoint-{best}").glob("*.safetensors"))
    assert all(torch.equal(p, tensors[n]) for n, p in peftc.parameters(model).items())


@pytest.mark.parametrize("name", SPECIES[::2])
def test_checkpointing_inside_the_trainer(name: str, tmp_path: Path) -> None:
    ends: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if checkpointing else {}
        one_trainer = trainer(
            name,
            model := fresh(name, "mam"),
            tmp_path,
            gradient_checkpointing=checkpointing,
            save_strategy="no",
            **options,
        )
        one_trainer.train()
        ends.append(state(model))
    all_close(*ends, tolerance=1e-6)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("name", "spec"), SOME)
def test_accelerate(name: str, spec: str, adapters: bool, tmp_path: Path) -> None:
    """prepare, backward, save_state and load_state: three steps, three more, and the last three
    again. With `checkpoint_adapters` the checkpoint has no weights of the base.
    """
    accelerator = Accelerator(cpu=True)
    if adapters:
        peftc.checkpoint_adapters(accelerator)
    model = fresh(name, spec)
    learning = [p for p in model.parameters() if p.requires_grad]
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(learning, lr=0.02))
    inputs = model_inputs(name, model)

    def three() -> list[float]:
        losses: list[float] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = prepared(**inputs).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    prepared.train()
    three()
    accelerator.save_state(str(tmp_path), safe_serialization=True)
    want, end = three(), state(model)
    assert (tmp_path / "model.safetensors").exists() is not adapters
    assert (tmp_path / "adapter" / "adapter.json").exists() is adapters
    accelerator.load_state(str(tmp_path))
    assert not same(state(model), end)
    assert three() == want
    assert same(state(model), end)
    assert accelerator.unwrap_model(prepared) is model


def test_accelerate_with_a_plain_model_beside(tmp_path: Path) -> None:
    """The other model is saved by accelerate, as ever."""
    accelerator = Accelerator(cpu=True)
    peftc.checkpoint_adapters(accelerator)
    plain, model = accelerator.prepare(nn.Linear(2, 2), fresh("bert", "lora"))
    before = state(plain), state(model)
    accelerator.save_state(str(tmp_path), safe_serialization=True)
    with torch.no_grad():
        for parameter in (*plain.parameters(), *peftc.parameters(model).values()):
            parameter.add_(1)
    accelerator.load_state(str(tmp_path))
    assert same(state(plain), before[0])
    assert same(state(model), before[1])
    files = sorted(path.name for path in tmp_path.iterdir() if "state" not in path.name)
    assert files == ["adapter_1", "model.safetensors"]
