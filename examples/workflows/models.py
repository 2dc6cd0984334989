"""Small models and a tokenizer that need no download, for the workflows beside this file."""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]", "cls_token": "[CLS]"}
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "road", "good", "bad", "day"]
SIZES = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def bases(folder: Path) -> None:
    """Writes `bert`, `llama` and `bart`, each with the tokenizer."""
    torch.manual_seed(0)
    bart = BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        decoder_start_token_id=3,
        forced_eos_token_id=3,
        **SIZES,
    )
    all_models = {
        "bert": BertModel(BertConfig(**BERT, **SIZES)),
        "llama": LlamaForCausalLM(LlamaConfig(**BERT, num_key_value_heads=2, **SIZES)),
        "bart": BartForConditionalGeneration(bart),
    }
    for name, model in all_models.items():
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)


def refusal(act: Callable[[], object]) -> str:
    """The message of the error that `act` raises. It is an error if it raises none."""
    try:
        act()
    except Exception as error:
        return str(error)
    raise AssertionError("nothing was refused")


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def options(output: Path, **more) -> dict:
    """Arguments of a short run that saves every second step."""
    return {
        "output_dir": str(output),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.02,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **more,
    }
