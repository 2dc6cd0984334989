"""TRL's preference trainers, with the base under the policy as the reference: DPO, KTO and GRPO.

Each run is compared with one whose reference is a model of its own.

python examples/workflows/preferences.py
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from models import bases, losses, options, tokenizer
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer
from trl.trainer.utils import add_fused_lm_head

import peftc

SPEC = """peft 1
edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2, dropout=0.1) }
"""
NORMS = 'train norm = [w] at "model.norm"\n'
PAIRS = Dataset.from_dict(
    {
        "prompt": ["the cat", "a dog", "the road", "a good day"] * 4,
        "chosen": [" sat on the mat", " ran on a road", " good", " good"] * 4,
        "rejected": [" ran", " sat on the bad mat", " bad", " bad day on the road"] * 4,
    }
)
LABELS = Dataset.from_dict({"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [True, False] * 8})
Trainer = DPOTrainer | KTOTrainer | GRPOTrainer
Start = Callable[[torch.nn.Module, torch.nn.Module, Path], Trainer]


def policy(folder: Path) -> torch.nn.Module:
    """An edited model that is not the base any more, as after supervised training."""
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", attention_dropout=0.1)
    peftc.compile(SPEC + NORMS, model, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def dpo(**arguments) -> Start:
    def start(model: torch.nn.Module, reference: torch.nn.Module, output: Path) -> DPOTrainer:
        config = DPOConfig(**options(output, bf16=False, max_length=16, disable_dropout=False, **arguments))
        return DPOTrainer(model, reference, config, train_dataset=PAIRS, processing_class=tokenizer())

    return start


def kto(**arguments) -> Start:
    def start(model: torch.nn.Module, reference: torch.nn.Module, output: Path) -> KTOTrainer:
        config = KTOConfig(**options(output, bf16=False, max_length=16, disable_dropout=False, **arguments))
        return KTOTrainer(model, reference, config, train_dataset=LABELS, processing_class=tokenizer())

    return start


def grpo(model: torch.nn.Module, reference: torch.nn.Module, output: Path) -> GRPOTrainer:
    """GRPO takes no reference: with `beta` it would load a second model by its name."""

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
    config = GRPOConfig(**{**options(output, bf16=False, beta=0.0, disable_dropout=False, num_iterations=2), **sizes})
    prompts = PAIRS.select_columns("prompt")
    trainer = GRPOTrainer(model, reward, config, train_dataset=prompts, processing_class=tokenizer())
    trainer.ref_model, trainer.beta = reference, 0.1
    return trainer


def check(name: str, start: Start, folder: Path) -> None:
    """A run with `peftc.reference` is, to the bit, the run with a second model."""
    runs = []
    for kind in ("own", "view"):
        model = policy(folder)
        other = AutoModelForCausalLM.from_pretrained(folder / "llama").eval()
        if kind == "own" and start is grpo:
            add_fused_lm_head(other)
        trainer = start(model, peftc.reference(model) if kind == "view" else other, folder / f"{name}-{kind}")
        trainer.train()
        runs.append((losses(trainer), {n: p.detach().clone() for n, p in peftc.parameters(model).items()}, model))
    (own, first, _), (view, second, model) = runs
    assert own == view, (own, view)
    assert all(torch.equal(first[n], second[n]) for n in first)
    start_values = peftc.parameters(policy(folder))
    assert not any(torch.equal(second[n], start_values[n]) for n in second)
    loaded = peftc.from_pretrained(folder / f"{name}-view" / "checkpoint-4")
    ids = torch.tensor([[6, 7, 8, 9]])
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    print(f"{name}: runs with a view and with a second model agree")


def main(folder: Path) -> None:
    check("dpo", dpo(gradient_checkpointing=False), folder)
    check("dpo-checkpointing", dpo(gradient_checkpointing=True), folder)
    check("dpo-precomputed", dpo(precompute_ref_log_probs=True), folder)
    check("kto", kto(), folder)
    check("kto-precomputed", kto(precompute_ref_log_probs=True), folder)
    check("grpo", grpo, folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        bases(Path(work))
        main(Path(work))
