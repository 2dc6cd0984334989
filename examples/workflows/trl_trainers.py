"""TRL: supervised fine-tuning with packing, and a reward model, saved and resumed as adapters.

python examples/workflows/trl_trainers.py
"""

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from models import bases, losses, options, refusal, tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import peftc

SPEC = """peft 1
edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }
"""
HEAD = 'train head = [w] at "score"\n'


def check(trainer, folder: Path, name: str) -> None:
    """Trains; resumes from the middle in a new trainer; loads what was saved."""
    whole = trainer(folder / name, 0)
    whole.train()
    again = trainer(folder / f"{name}-again", 9)
    again.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
    assert losses(again)[-2:] == losses(whole)[-2:]
    whole.save_model(folder / f"{name}-saved")
    loaded = peftc.from_pretrained(folder / f"{name}-saved")
    ids = torch.tensor([[6, 7, 8, 9]])
    assert torch.equal(loaded(input_ids=ids).logits, whole.model.eval()(input_ids=ids).logits)
    print(f"{name}: resume, save_model and from_pretrained agree")


def main(folder: Path) -> None:
    texts = Dataset.from_dict({"text": ["the cat sat on the mat", "a dog ran on a road", "the good dog sat"] * 6})
    pairs = {"chosen": ["the good cat", "a good day"] * 6, "rejected": ["the bad cat", "a bad day"] * 6}

    def sft(output: Path, seed: int) -> SFTTrainer:
        model = AutoModelForCausalLM.from_pretrained(folder / "llama")
        peftc.compile(SPEC, model, seed=seed)
        arguments = SFTConfig(**options(output, packing=True, max_length=16, bf16=False))
        return SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer())

    def reward(output: Path, seed: int) -> RewardTrainer:
        model = AutoModelForSequenceClassification.from_pretrained(folder / "llama", num_labels=1)
        peftc.compile(SPEC + HEAD, model, seed=seed)
        arguments = RewardConfig(**options(output, max_length=16, bf16=False))
        rows = Dataset.from_dict(pairs)
        return RewardTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer())

    check(sft, folder, "sft")
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    peftc.compile("peft 2  edit own at head { h += lora(x, r=2) }", model, seed=0)
    arguments = SFTConfig(**options(folder / "head", max_length=16, bf16=False))
    refused = SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer())
    assert "P435" in refusal(refused.train)  # TRL reads the weight of the head, and never calls it
    check(reward, folder, "reward")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        bases(Path(work))
        main(Path(work))
