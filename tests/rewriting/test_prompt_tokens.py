"""Where prompt rows may precede tokens: the stack uses only a token's embedding, and no other
argument describes single tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import peftc
from benchmarks.families import build
from benchmarks.families.rolling import cache_difference
from tests import zoo
from tests.laws.harness import randomise
from tests.matrix import some

SPEC = "peft 1\nedit p at input.embed { h = concat(prompt(len=3), h) }"
FRONT = torch.tensor([[5, 9, 6]])
OF_EACH_TOKEN = ("attention_mask", "token_type_ids", "mm_token_type_ids")
# At least one model for every way to pass tokens to a stack.
TAKING = some(
    [
        "causal-lm/falcon",  # positions as a bias
        "causal-lm/roc_bert",  # embeds shapes and pronunciations, too
        "seq2seq/encoder-decoder",  # two embeddings for two stacks
        "seq2seq/t5gemma2",  # a decoder that attends to itself and to the encoder at once
        "image-text-to-text/qwen3_vl",  # has an argument for the tokens of images
        "image-text-to-text/blip-2",  # another stack attends to images, not to the prompted stack
        "image-text-to-text/qwen2_vl",  # three numbers a position
        "image-text-to-text/evolla",  # proteins have an embedding of their own
        "masked-lm/xlm-roberta",  # counts positions from unpadded ids
        "seq2seq/m2m_100",  # and so do sinusoidal positions
        "causal-lm/xglm",
        "masked-lm/fnet",
        "causal-lm/gpt_neo",
        "causal-lm/biogpt",
        "causal-lm/bloom",
        "masked-lm/deberta-v2",
        "causal-lm/granite",
        "causal-lm/gemma2",
        "seq2seq/granite_speech",
    ],
    3,
)
REFUSED = {
    "causal-lm/gemma3n_text": "`model` needs the ids of tokens",  # has a second embedding for every layer
    "causal-lm/gemma4_text": "without them it raises RuntimeError",  # searches the ids of embedded tokens
    "masked-lm/esm": "`esm` needs the ids of tokens",  # expects `inputs_embeds` with positions
    "causal-lm/prophetnet": "returns more states of tokens than the last one: `last_hidden_state_ngram`",
    "causal-lm/gemma3": "an attention mask with the type dict",  # made by the module around the stack
    "image-text-to-text/idefics": "`image_attention_mask` has values of each token",
    "causal-lm/xlm": "no module takes the tokens of `embed`",  # no list of layers
    "causal-lm/reformer": "no module takes the tokens of `embed`",
}


def longer(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the same call with the tokens FRONT in front."""
    kwargs = dict(inputs)
    front = FRONT.expand(len(inputs["input_ids"]), -1)
    kwargs["input_ids"] = torch.cat([front, inputs["input_ids"]], 1)
    for name in OF_EACH_TOKEN:
        if name in kwargs:
            kind = torch.full_like(front, int("mask" in name))
            kwargs[name] = torch.cat([kind.to(kwargs[name].dtype), kwargs[name]], 1)
    return kwargs


def embedding_of(model: nn.Module) -> nn.Module:
    """The embedding module of the prompted stack."""
    (key,) = peftc.parameters(model)
    path = key.split("/")[1]
    (site,) = (site for site in peftc.sites(model).sites if site.path == path)
    return model.get_submodule(site.module)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.filterwarnings("ignore")  # warnings of the models' own code
@pytest.mark.parametrize("key", TAKING)
def test_a_prompt_of_embedded_tokens_equals_these_tokens(key: str) -> None:
    """A prompt with the embeddings of tokens t equals the base on t and the input. A cache contains
    the rows, and the rows have gradients.
    """
    model, inputs = build(*key.split("/"))
    base = cache_difference(model, inputs)
    peftc.compile(SPEC, model, seed=0)
    (rows,) = peftc.parameters(model).values()
    with torch.no_grad():
        rows.copy_(embedding_of(model)(FRONT)[0])
        actual = model(**inputs).logits
        with peftc.disabled(model):
            expected = model(**longer(inputs)).logits
    own = getattr(model.config, "is_encoder_decoder", False)
    close(actual, expected if own else expected[:, FRONT.shape[1] :])
    randomise(peftc.parameters(model))
    edited = model(**inputs).logits
    assert float((edited - actual).detach().abs().max()) > 1e-3
    edited.sum().backward()
    assert rows.grad is not None
    assert bool(rows.grad.any())
    if not isinstance(base, str):
        assert base < 1e-4
        assert cache_difference(model, inputs) < 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_an_embedding_scale_on_ids_only(scale: float) -> None:
    # Seen in: Falcon-H1, MVP; their scale is 1 in some checkpoints.
    model: Any = build("causal-lm", "falcon_h1")[0]
    model.model.embedding_multiplier = scale
    if scale == 1:
        peftc.compile(SPEC, model, seed=0)
    else:
        with pytest.raises(peftc.PeftcError, match="P418"):
            peftc.compile(SPEC, model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", REFUSED)
def test_stacks_that_need_ids_are_refused_by_the_planner(key: str) -> None:
    model, _ = build(*key.split("/"))
    before = type(model), list(model.state_dict())
    for act in (peftc.plan, peftc.compile):
        with pytest.raises(peftc.PeftcError, match="P418") as excinfo:
            act(SPEC, model)
        assert REFUSED[key] in str(excinfo.value)
        (diagnostic,) = excinfo.value.diagnostics
        assert diagnostic.source
        assert diagnostic.span
        assert diagnostic.source.text[diagnostic.span.start :].startswith("h = concat")
    assert (type(model), list(model.state_dict())) == before


class Stack(LlamaModel):
    """A stack that uses ids for their embedding and for `extra`."""

    extra, scale = "", 3.0

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.kinds = nn.Embedding(7, config.hidden_size)

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **more: Any) -> Any:
        if input_ids is not None:
            inputs_embeds = self.embed_tokens(input_ids)
            if self.extra == "looks up":
                inputs_embeds = inputs_embeds + self.kinds(input_ids % 7)
            elif self.extra == "scales":
                inputs_embeds = inputs_embeds * self.scale
            elif self.extra == "masks" and more.get("attention_mask") is None:
                more["attention_mask"] = (input_ids != zoo.PAD).long()
        elif self.extra == "needs":
            raise ValueError("no ids")
        return super().forward(inputs_embeds=inputs_embeds, **more)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("looks up", "something else"),
        ("scales", "something else"),
        ("needs", "ValueError: no ids"),
        ("masks", "something else"),
        ("", None),
    ],
)
def test_stacks_that_use_ids_otherwise_are_refused(extra: str, reason: str | None) -> None:
    config = zoo.config("llama")
    base = zoo.build("llama")
    base.model = type("Stack", (Stack,), {"extra": extra})(config).eval()
    if reason is None:
        peftc.compile(SPEC, base, seed=0)
        assert cache_difference(base, {"input_ids": torch.tensor([[5, 6, 7, 8]])}) < 1e-4
    else:
        with pytest.raises(peftc.PeftcError, match="P418") as excinfo:
            peftc.compile(SPEC, base)
        assert reason in str(excinfo.value)


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_maximum_of_positions() -> None:
    """XLNet's configuration has -1 positions."""
    assert peftc.plan(SPEC.replace("len=3", "len=300"), build("causal-lm", "xlnet")[0]).totals.trained == 300 * 32


def test_calls_with_an_argument_for_each_token_are_refused() -> None:
    model, inputs = build("causal-lm", "roc_bert")
    peftc.compile(SPEC, model, seed=0)
    ids = inputs["input_ids"]
    with pytest.raises(peftc.PeftcError, match="P419") as excinfo:
        model(**inputs, input_shape_ids=ids)
    assert "`input_shape_ids` has values of each token" in str(excinfo.value)


@pytest.mark.filterwarnings("ignore")
def test_tokens_that_are_not_first_in_the_output_are_refused() -> None:
    """Image tokens come before text tokens: which rows are the prompt's is unknown."""
    model, inputs = build("image-text-to-text", "git")
    peftc.compile(SPEC, model, seed=0)
    with pytest.raises(peftc.PeftcError, match="P419") as excinfo:
        model(**inputs)
    assert "the stack returns 28" in str(excinfo.value)
    assert model(inputs["input_ids"]).logits.shape[1] == inputs["input_ids"].shape[1]
