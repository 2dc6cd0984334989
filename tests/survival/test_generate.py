"""generate() in all decoding modes equals a rollout by hand without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.matrix import checkerboard
from tests.survival.harness import CACHED, GENERATING, close, compiled

TOKENS = 6
pairs = pytest.mark.parametrize(("name", "spec"), checkerboard(GENERATING, CACHED))
# One spec inside layers, one on weights: decoding does not depend on anything else.
few = pytest.mark.parametrize(("name", "spec"), checkerboard(GENERATING, ("mam", "weights")))


def prompt(name: str, model: nn.Module, batch: int = 3, padding: zoo.Padding | None = "left") -> dict[str, Tensor]:
    inputs = zoo.inputs(name, model, batch=batch, padding=padding)
    inputs.pop("decoder_input_ids", None)
    return inputs


def new_tokens(model: Any, sequences: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return sequences[:, 1:] if model.config.is_encoder_decoder else sequences[:, inputs["input_ids"].shape[1] :]


def next_logits(model: Any, inputs: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The logits after a prompt and the tokens so far, in one whole forward without a cache."""
    if model.config.is_encoder_decoder:
        start = torch.full((tokens.shape[0], 1), model.config.decoder_start_token_id)
        decoder = torch.cat([start, tokens], 1)
        return model(**inputs, decoder_input_ids=decoder, use_cache=False).logits[:, -1]
    ids = torch.cat([inputs["input_ids"], tokens], 1)
    mask = torch.cat([inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])), torch.ones_like(tokens)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]


@torch.no_grad()
def rollout(model: Any, inputs: dict[str, Tensor], sample: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Greedy or sampled tokens, one whole forward a token; rows that have ended continue with
    padding.
    """
    tokens = torch.empty(inputs["input_ids"].shape[0], 0, dtype=torch.long)
    going = torch.ones(tokens.shape[0], dtype=torch.bool)
    logits: list[Tensor] = []
    while tokens.shape[1] < TOKENS and going.any():
        logits.append(next_logits(model, inputs, tokens).float())
        next_tokens = torch.multinomial(logits[-1].softmax(-1), 1)[:, 0] if sample else logits[-1].argmax(-1)
        next_tokens = torch.where(going, next_tokens, zoo.PAD)
        tokens = torch.cat([tokens, next_tokens[:, None]], 1)
        going &= next_tokens != zoo.EOS
    return tokens, logits


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    options = {"do_sample": False, "max_new_tokens": TOKENS, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, output_logits=True, **options)


@pairs
@pytest.mark.parametrize("padding", ["left", None])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_greedy(name: str, spec: str, cache: bool, padding: zoo.Padding | None) -> None:
    model = compiled(name, spec)
    inputs = prompt(name, model, padding=padding)
    tokens, logits = rollout(model, inputs)
    got = generate(model, inputs, use_cache=cache)
    assert torch.equal(new_tokens(model, got.sequences, inputs), tokens)
    assert not torch.equal(tokens, rollout(zoo.build(name, torch.float64), inputs)[0]), "the edits change nothing"
    for a, b in zip(got.logits, logits, strict=True):
        close(a.float(), b, "logits", 1e-6)


@few
def test_a_static_cache(name: str, spec: str) -> None:
    """Empty cache slots are masked; prefix rows come before all slots."""
    model = compiled(name, spec)
    inputs = prompt(name, model)
    tokens, _ = rollout(model, inputs)
    got = generate(model, inputs, cache_implementation="static", disable_compile=True)
    assert torch.equal(new_tokens(model, got.sequences, inputs), tokens)
    assert any("Static" in type(layer).__name__ for layer in cache_layers(got.past_key_values))


def cache_layers(cache: Any) -> list[Any]:
    return getattr(cache, "self_attention_cache", cache).layers


@pairs
def test_sampling_equals_a_sampling_loop(name: str, spec: str) -> None:
    model = compiled(name, spec)
    inputs = prompt(name, model)
    for seed in (0, 1):
        torch.manual_seed(seed)
        tokens, _ = rollout(model, inputs, sample=True)
        torch.manual_seed(seed)
        got = generate(model, inputs, do_sample=True, top_k=0)
        assert torch.equal(new_tokens(model, got.sequences, inputs), tokens)


@few
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
        {"num_beams": 3, "do_sample": True, "top_k": 8},
        {"do_sample": True, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.3, "num_return_sequences": 2},
    ],
    ids=["beam", "beams-returned", "beam-sample", "nucleus"],
)
def test_the_cache_changes_no_search(name: str, spec: str, options: dict[str, Any]) -> None:
    model = compiled(name, spec)
    inputs = prompt(name, model)
    results: list[Any] = []
    for cache in (True, False):
        torch.manual_seed(3)
        results.append(generate(model, inputs, use_cache=cache, output_scores=True, **options))
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert results[0].sequences.shape[0] == 3 * options.get("num_return_sequences", 1)
    if options.get("num_beams", 1) > 1:
        close(results[0].sequences_scores, results[1].sequences_scores, "scores", 1e-6)


@few
def test_scores_of_beams(name: str, spec: str) -> None:
    """The score of a beam is the mean log-probability that whole forwards give its tokens."""
    model = compiled(name, spec)
    inputs = prompt(name, model)
    got = generate(model, inputs, num_beams=3, eos_token_id=None, output_scores=True)
    tokens = new_tokens(model, got.sequences, inputs)
    with torch.no_grad():
        steps = [next_logits(model, inputs, tokens[:, :i]).float().log_softmax(-1) for i in range(tokens.shape[1])]
    each = torch.stack([step.gather(1, tokens[:, i, None])[:, 0] for i, step in enumerate(steps)])
    close(got.sequences_scores, each.sum(0) / tokens.shape[1], "scores", 1e-5)


@few
@pytest.mark.parametrize("by", ["lookup", "assistant", "compiled-assistant"])
def test_assisted_decoding_changes_no_token(name: str, spec: str, by: str) -> None:
    model = compiled(name, spec)
    inputs = prompt(name, model, batch=1, padding=None)
    tokens, _ = rollout(model, inputs)
    if by == "lookup":
        options: dict[str, Any] = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    else:
        options = {"assistant_model": zoo.build(name, torch.float64) if by == "assistant" else compiled(name, spec)}
    got = generate(model, inputs, **options)
    assert torch.equal(new_tokens(model, got.sequences, inputs), tokens)


@pairs
def test_embeddings_instead_of_tokens(name: str, spec: str) -> None:
    model = compiled(name, spec)
    inputs = prompt(name, model)
    tokens, _ = rollout(model, inputs)
    embedding = model.get_encoder().embed_tokens if model.config.is_encoder_decoder else model.get_input_embeddings()
    embedded = {"inputs_embeds": embedding(inputs["input_ids"]), "attention_mask": inputs["attention_mask"]}
    got = generate(model, embedded).sequences
    assert torch.equal(got[:, 1:] if model.config.is_encoder_decoder else got, tokens)


class Streamer:
    """A streamer that keeps its tokens."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.values.append(value.flatten())

    def end(self) -> None:
        self.ended = True


@few
def test_streaming(name: str, spec: str) -> None:
    model = compiled(name, spec)
    inputs = prompt(name, model, batch=1, padding=None)
    streamer = Streamer()
    got = generate(model, inputs, streamer=streamer)
    assert streamer.ended
    assert torch.equal(torch.cat(streamer.values), got.sequences[0])
    assert len(streamer.values) == 1 + new_tokens(model, got.sequences, inputs).shape[1]


@pytest.mark.parametrize("name", GENERATING)
def test_gates_without_a_cache(name: str) -> None:
    model = compiled(name, "gated")
    inputs = prompt(name, model, padding=None)
    got = generate(model, inputs, use_cache=False)
    assert torch.equal(new_tokens(model, got.sequences, inputs), rollout(model, inputs)[0])
