"""New tokens: their rows of the embedding and the head are trained, saved, loaded and folded.

python examples/workflows/tokens.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from models import bases, options, tokenizer
from peft import TrainableTokensConfig, get_peft_model
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

import peftc

NEW = ["bird", "flew", "over", "tall", "tree"]
ALONE = f"""peft 2
edit embedding at embed {{ w = new_tokens(w, n={len(NEW)}) }}
edit head at head {{ w = new_tokens(w, n={len(NEW)}) }}
"""
TIED = f"""peft 2
let tokens = shared(new_tokens(n={len(NEW)}))
edit rows at embed | head {{ w = tokens(w) }}
"""


def main(folder: Path, tied: bool) -> None:
    words = tokenizer()
    assert words.add_tokens(NEW) == len(NEW)

    def base(seed: int) -> Any:
        """The first values of new rows are random: those of a loaded base are others."""
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(folder / "llama", tie_word_embeddings=tied)
        model.resize_token_embeddings(len(words), pad_to_multiple_of=None)
        return model.eval()

    model = peftc.compile(TIED if tied else ALONE, base(0), seed=0)
    rows = [dict(words(text)) for text in ["a bird flew over the tall tree", "the tall cat sat", "a bird sat"] * 4]
    collator = DataCollatorForLanguageModeling(words, mlm=False)
    trainer = Trainer(model, TrainingArguments(**options(folder / "run")), train_dataset=rows, data_collator=collator)
    trainer.train()
    trainer.save_model(folder / "rows")
    count = sum(parameter.numel() for parameter in peftc.parameters(model).values())

    targets = None if tied else ["embed_tokens", "lm_head"]
    places = [words.convert_tokens_to_ids(token) for token in NEW]
    theirs = get_peft_model(base(0), TrainableTokensConfig(token_indices=places, target_modules=targets))
    assert count == sum(p.numel() for p in theirs.parameters() if p.requires_grad) == len(NEW) * 32 * (2 - tied)

    ids = words("a bird flew over the cat", return_tensors="pt")["input_ids"]
    expected = model.eval()(ids).logits
    loaded = peftc.load(folder / "rows", base(9), other_weights=True)
    assert torch.equal(loaded(ids).logits, expected)
    old = words("the cat sat", return_tensors="pt")["input_ids"]
    before = base(0)(old).logits[..., : -len(NEW)]
    torch.testing.assert_close(loaded(old).logits[..., : -len(NEW)], before)
    assert not peftc.fold(loaded).refused
    loaded.save_pretrained(folder / "folded")
    plain = AutoModelForCausalLM.from_pretrained(folder / "folded")
    assert torch.equal(plain(ids).logits, expected)
    print(f"tokens: with {'a tied' if tied else 'its own'} head, trained, loaded and folded rows agree")


if __name__ == "__main__":
    for is_tied in (False, True):
        with tempfile.TemporaryDirectory() as work:
            bases(Path(work))
            main(Path(work), is_tied)
