"""A compiled model in `pipeline`, `torch.export`, half precision and gradient checkpointing.

python examples/workflows/deployment.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from models import bases, options, tokenizer
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments, pipeline

import peftc

SPEC = "peft 2  edit qv at layer[*].attn.{q, v} { h += lora(x, r=2, alpha=4) }"
IDS = torch.tensor([[6, 7, 8, 9]])


def train(folder: Path, output: str, **arguments: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)
    peftc.compile(SPEC, model, seed=0)
    rows = [dict(tokenizer()(text)) for text in ["the cat sat on the mat", "a dog ran on a road"] * 4]
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    settings = TrainingArguments(**options(folder / output, bf16=True, **arguments))
    trainer = Trainer(model, settings, train_dataset=rows, data_collator=collator)
    trainer.train()
    trainer.save_model(folder / output)
    return model.eval()


def main(folder: Path) -> None:
    model = train(folder, "plain")
    other = train(folder, "checkpointed", gradient_checkpointing=True)
    pairs = zip(peftc.parameters(model).values(), peftc.parameters(other).values(), strict=True)
    assert all(torch.equal(one, two) and one.dtype == torch.float32 for one, two in pairs)
    loaded = peftc.from_pretrained(folder / "plain", dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):  # as the `Trainer` has set it for the model that it trained
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    print("half precision: runs with and without gradient checkpointing, and what is loaded, agree")

    arguments = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    generator = pipeline("text-generation", model=loaded, tokenizer=tokenizer())
    text = generator("the cat", **arguments)[0]["generated_text"]
    prompt = tokenizer()("the cat", return_tensors="pt")["input_ids"]
    ids = loaded.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
    assert text.split() == tokenizer().decode(ids, skip_special_tokens=True).split()
    print("pipeline: its text and that of generate agree")

    exact = peftc.from_pretrained(folder / "plain")
    program = torch.export.export(exact, (IDS,), {"use_cache": False}).module()
    torch.testing.assert_close(program(IDS, use_cache=False).logits, exact(IDS, use_cache=False).logits)
    print("export: the program and the model agree")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        bases(Path(work))
        main(Path(work))
