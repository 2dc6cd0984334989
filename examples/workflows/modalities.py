"""transformers' `Trainer` on labels of tokens, pictures, pixels and speech.

python examples/workflows/modalities.py
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import bases, losses, options, refusal
from torch import Tensor, nn
from transformers import (
    AutoModelForTokenClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import peftc

QV = "peft 2  edit qv at layer[*].attn.{q, v} { h += lora(x, r=2) }\n"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
Rows = list[dict[str, Tensor]]


def check(name: str, make: Callable[[], Any], spec: str, rows: Rows, folder: Path) -> None:
    """Trains; resumes from the middle in a new trainer; loads what was saved, not the base."""

    def trainer(output: str, seed: int) -> Trainer:
        model = peftc.compile(spec, make(), seed=seed)
        return Trainer(model, TrainingArguments(**options(folder / output, save_steps=2)), train_dataset=rows)

    whole = trainer(name, 0)
    whole.train()
    again = trainer(f"{name}-again", 9)
    again.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
    assert losses(again)[-2:] == losses(whole)[-2:]
    whole.save_model(folder / f"{name}-saved")
    loaded = peftc.from_pretrained(folder / f"{name}-saved")
    inputs = {key: value[None] for key, value in rows[0].items()}
    assert torch.equal(loaded(**inputs).logits, whole.model.eval()(**inputs).logits)
    own = type(make())
    assert "peftc.from_pretrained" in refusal(lambda: own.from_pretrained(folder / f"{name}-saved"))
    print(f"{name}: resume, save_model and from_pretrained agree")


def base(model: nn.Module, folder: Path) -> Callable[[], Any]:
    model.save_pretrained(folder)
    return lambda: type(model).from_pretrained(folder)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    ids, pixels = torch.randint(6, 17, (8, 6)), torch.randn(8, 3, 32, 32)
    tokens: Rows = [{"input_ids": row, "labels": row % 3} for row in ids]
    head = 'train head = [w, b] at "classifier"'

    def token_classifier() -> nn.Module:
        return AutoModelForTokenClassification.from_pretrained(folder / "bert", num_labels=3)

    check("tokens", token_classifier, QV + head, tokens, folder)

    vit = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=3, **SIZES))
    pictures: Rows = [{"pixel_values": one, "labels": torch.tensor(i % 3)} for i, one in enumerate(pixels)]
    check("pictures", base(vit, folder / "vit"), QV + head, pictures, folder)

    widths = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2], "num_encoder_blocks": 2}
    strides = {"sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    segformer = SegformerForSemanticSegmentation(
        SegformerConfig(**widths, **strides, decoder_hidden_size=16, num_labels=2)
    )
    masks: Rows = [{"pixel_values": one, "labels": (one[0] > 0).long()} for one in pixels]
    train = 'train head = [w, b] at "decode_head.classifier"'
    pretrained = base(segformer, folder / "segformer")

    def with_fixed_statistics() -> nn.Module:
        """An adapter has no running statistics (P584): the norm stays in evaluation."""
        model = pretrained()
        norm = model.decode_head.batch_norm.eval()
        norm.train = lambda mode=True: norm
        return model

    check("pixels", with_fixed_statistics, QV + train, masks, folder)

    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 20, "num_mel_bins": 8}
    places = {"max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 2}
    tokens_of_whisper = {"eos_token_id": 3, "decoder_start_token_id": 2, "begin_suppress_tokens": None}
    whisper = WhisperForConditionalGeneration(WhisperConfig(**layers, **sizes, **places, **tokens_of_whisper))
    speech: Rows = [{"input_features": torch.randn(8, 32), "labels": row} for row in ids]
    check("speech", base(whisper, folder / "whisper"), QV, speech, folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        bases(Path(work))
        main(Path(work))
