"""Several adapters on one model: trained apart, chosen, combined, exchanged, trained further.

python examples/workflows/adapters.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from models import bases, options, tokenizer
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

import peftc

SPEC = "peft 2  edit qv at layer[*].attn.{q, v} { h += lora(x, r=2, alpha=4) }"
OTHER = "peft 2  edit f at layer[*].ffn { h += adapter(x, r=3, init=lora) }"
TEXTS = {"cats": ["the cat sat on the mat", "a good cat"], "dogs": ["a dog ran", "the bad dog"], "roads": ["the road"]}


def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "llama").eval()


def train(model: torch.nn.Module, name: str, folder: Path) -> None:
    rows = [dict(tokenizer()(text)) for text in TEXTS[name] * 4]
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    trainer = Trainer(model, TrainingArguments(**options(folder)), train_dataset=rows, data_collator=collator)
    trainer.train()
    trainer.save_model(folder / "final")
    model.eval()


def main(folder: Path) -> None:
    ids = torch.tensor([[6, 7, 8, 9], [9, 8, 7, 6], [10, 11, 12, 13]])
    alone = {}
    for seed, (name, spec) in enumerate({"cats": SPEC, "dogs": SPEC, "roads": OTHER}.items()):
        model = peftc.compile(spec, base(folder), seed=seed)
        train(model, name, folder / name)
        alone[name] = model(ids).logits
    plain = base(folder)(ids).logits
    adapters = {name: folder / name / "final" for name in TEXTS}

    model = base(folder)
    for name, path in adapters.items():
        peftc.attach(path, model, name=name)
    assert torch.equal(model(ids).logits, plain)
    for name in TEXTS:
        with peftc.adapter(model, name):
            torch.testing.assert_close(model(ids).logits, alone[name])
    with peftc.adapter(model, rows=["dogs", None, "roads"]):
        mixed = model(ids).logits
    torch.testing.assert_close(mixed, torch.stack([alone["dogs"][0], plain[1], alone["roads"][2]]))
    print("choice: adapters on one model, in blocks and in rows, and alone agree")

    peftc.combine(model, {"cats": 0.5, "dogs": 0.5}, name="both", method="cat")
    with peftc.adapter(model, "both"):
        both = model(ids).logits
    assert not torch.allclose(both, alone["cats"])
    peftc.save(model, folder / "both", name="both")
    torch.testing.assert_close(peftc.load(folder / "both", base(folder))(ids).logits, both)
    peftc.swap(model, "cats", adapters["dogs"])
    with peftc.adapter(model, "cats"):
        torch.testing.assert_close(model(ids).logits, alone["dogs"])
    store = peftc.AdapterStore(base(folder), adapters, capacity=1)
    for name in [*TEXTS, *TEXTS]:
        with store.adapter(name) as served:
            torch.testing.assert_close(served(ids).logits, alone[name])
    print("exchange: combined, swapped and stored adapters and those alone agree")

    peftc.activate(model, "dogs")
    train(model, "cats", folder / "further")
    further = peftc.from_pretrained(folder / "further" / "final")
    torch.testing.assert_close(further(ids).logits, model(ids).logits)
    assert not torch.allclose(model(ids).logits, alone["dogs"])
    with peftc.adapter(model, "roads"):
        torch.testing.assert_close(model(ids).logits, alone["roads"])
    peftc.detach(model, "dogs")
    assert torch.equal(peftc.activate(model, None)(ids).logits, plain)
    print("training: the active adapter alone is trained and saved; what is loaded and what was saved agree")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        bases(Path(work))
        main(Path(work))
