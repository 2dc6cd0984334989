"""transformers' trainers: a classifier with a trained head, and generation while evaluating.

python examples/workflows/trainers.py
"""

import tempfile
from pathlib import Path

import torch
from models import bases, losses, options, tokenizer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

import peftc

SPEC = """peft 1
edit qv at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }
"""
HEAD = 'train head = [w, b] at "classifier"\n'
BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}


def classify(folder: Path) -> None:
    ids = torch.randint(6, 17, (16, 6))
    rows = [{"input_ids": row, "labels": row[0] % 3} for row in ids]

    def trainer(output: str, seed: int) -> Trainer:
        model = AutoModelForSequenceClassification.from_pretrained(folder / "bert", num_labels=3)
        peftc.compile(SPEC + HEAD, model, seed=seed)
        arguments = TrainingArguments(**options(folder / output, **BEST))
        return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)

    whole = trainer("whole", 0)
    whole.train()
    again = trainer("again", 9)
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    assert losses(again)[-2:] == losses(whole)[-2:]
    assert again.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"] == whole.state.best_metric
    whole.save_model(folder / "classifier")
    loaded = peftc.from_pretrained(folder / "classifier")
    assert torch.equal(loaded(input_ids=ids).logits, whole.model.eval()(input_ids=ids).logits)
    print("classification: best model, resume, save_model and from_pretrained agree")


def generate(folder: Path) -> None:
    words = tokenizer()
    rows = [{"input_ids": [6, 7, 8, 3], "labels": [8, 7, 6, 3]}, {"input_ids": [9, 10, 3], "labels": [10, 9, 3]}] * 4
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "bart")
    peftc.compile(SPEC, model, seed=0)
    arguments = Seq2SeqTrainingArguments(**options(folder / "seq2seq", predict_with_generate=True))
    collator = DataCollatorForSeq2Seq(words, model)
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)
    trainer.train()
    predictions = trainer.predict(rows, max_length=6).predictions
    loaded = peftc.from_pretrained(folder / "seq2seq" / "checkpoint-4")
    other = Seq2SeqTrainer(loaded, arguments, eval_dataset=rows, data_collator=collator)
    assert (other.predict(rows, max_length=6).predictions == predictions).all()
    print("generation: a checkpoint predicts what the trained model predicts")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        bases(Path(work))
        classify(Path(work))
        generate(Path(work))
