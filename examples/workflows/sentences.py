"""sentence-transformers: training, resuming, saving and loading an encoder with an adapter.

python examples/workflows/sentences.py
"""

import tempfile
from pathlib import Path

from datasets import Dataset
from models import bases, losses, options, refusal
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import peftc

SPEC = "peft 1  edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }"
TEXTS = ["the cat sat", "a dog ran"]


def main(folder: Path) -> None:
    pairs = {"anchor": ["the cat", "a dog", "good day", "bad road"] * 4, "positive": ["cat", "dog", "day", "road"] * 4}

    def trainer(output: str, seed: int) -> SentenceTransformerTrainer:
        transformer = Transformer(str(folder / "bert"))
        peftc.compile(SPEC, transformer.model, seed=seed)
        model = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
        arguments = SentenceTransformerTrainingArguments(**options(folder / output))
        rows, loss = Dataset.from_dict(pairs), MultipleNegativesRankingLoss(model)
        result = SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=loss)
        result.add_callback(peftc.CheckpointCallback(result))
        return result

    whole = trainer("whole", 0)
    whole.train()
    again = trainer("again", 9)
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    assert losses(again)[-2:] == losses(whole)[-2:]
    whole.model.eval().save(str(folder / "saved"))
    assert "peftc.from_pretrained" in refusal(lambda: SentenceTransformer(str(folder / "saved")))
    loaded = peftc.from_pretrained(folder / "saved")
    assert isinstance(loaded, SentenceTransformer)
    assert (loaded.encode(TEXTS) == whole.model.encode(TEXTS)).all()
    print("sentences: resume, save and from_pretrained agree")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        bases(Path(work))
        main(Path(work))
