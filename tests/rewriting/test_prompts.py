"""Prompt rows before the input: equal to the base on longer inputs, by hand and by PEFT; caches,
masks, files.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import peftc
from benchmarks.families import build
from tests import zoo
from tests.laws.harness import close, randomise

LENGTH = 3
RECURRENT = ("mamba", "mamba2", "falcon_mamba", "xlstm")
HYBRID = ("jamba", "recurrent_gemma", "qwen3_next", "falcon_h1")
DECODERS = ("gpt2", "llama", "opt", "qwen3")
ENCODER_DECODERS = ("bart", "t5")
ENCODERS = ("bert", "roberta")
EVERY = (*DECODERS, *ENCODER_DECODERS, *ENCODERS)
PROMPT = f"h = concat(prompt(len={LENGTH}), h)"


def spec(equation: str = PROMPT) -> str:
    return f"peft 1\nedit p at input.embed {{ {equation} }}"


def compiled(name: str, equation: str = PROMPT) -> Any:
    model = peftc.compile(spec(equation), zoo.build(name, torch.float64), seed=0)
    randomise(peftc.parameters(model))
    return model.eval()


def model_inputs(name: str, model: nn.Module, padding: zoo.Padding | None) -> dict[str, Tensor]:
    inputs = zoo.inputs(name, model, padding=padding)
    inputs.pop("labels", None)
    return inputs


def by_hand(name: str, rows: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The base on [rows; embeddings], without its outputs for the rows."""
    base: Any = zoo.build(name, torch.float64).eval()
    ids = inputs["input_ids"]
    embedded = base.get_input_embeddings()(ids)
    if name in ENCODER_DECODERS:
        embedded = base.get_encoder().embed_tokens(ids)
    longer = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask", "token_type_ids")}
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    longer["attention_mask"] = torch.cat([torch.ones(len(ids), len(rows), dtype=mask.dtype), mask], 1)
    longer["inputs_embeds"] = torch.cat([rows.expand(len(ids), -1, -1), embedded], 1)
    logits = base(**longer).logits
    return logits if name in ENCODER_DECODERS else logits[:, len(rows) :]


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("name", EVERY)
def test_the_base_on_longer_inputs(name: str, padding: zoo.Padding | None) -> None:
    model = compiled(name)
    inputs = model_inputs(name, model, padding)
    ((_, tokens),) = peftc.parameters(model).items()
    rows = tokens.detach().clone().requires_grad_()
    got, want = model(**inputs).logits, by_hand(name, rows, inputs)
    close(got, want, "logits")
    direction = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    (got * direction).sum().backward()
    (want * direction).sum().backward()
    close(tokens.grad, rows.grad, "gradient")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # a warning of PEFT
@pytest.mark.parametrize("name", ["llama", "opt", "t5"])
def test_peft(name: str) -> None:
    kind = "SEQ_2_SEQ_LM" if name == "t5" else "CAUSAL_LM"
    model = compiled(name)
    config = peft.PromptTuningConfig(
        task_type=kind, num_virtual_tokens=LENGTH, num_transformer_submodules=1, token_dim=32, num_layers=1
    )
    theirs: Any = peft.get_peft_model(zoo.build(name, torch.float64), config).double().eval()
    ((_, tokens),) = peftc.parameters(model).items()
    theirs.prompt_encoder["default"].embedding.weight.data.copy_(tokens)
    inputs = model_inputs(name, model, "right")
    want = theirs(**inputs).logits
    close(model(**inputs).logits, want if name == "t5" else want[:, LENGTH:], "logits")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_mlp_of_peft() -> None:
    model = compiled("llama", f"h = concat(prompt(len={LENGTH}, reparam=mlp(7)), h)")
    config = peft.PromptEncoderConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=LENGTH,
        encoder_hidden_size=7,
        encoder_reparameterization_type="MLP",
        token_dim=32,
        num_layers=1,
        num_transformer_submodules=1,
    )
    theirs: Any = peft.get_peft_model(zoo.build("llama", torch.float64), config).double().eval()
    parameters = {name.rpartition(".")[2]: p for name, p in peftc.parameters(model).items()}
    encoder = theirs.prompt_encoder["default"]
    layers = {"inner": encoder.mlp_head[0], "middle": encoder.mlp_head[2], "outer": encoder.mlp_head[4]}
    encoder.embedding.weight.data.copy_(parameters["embedding"])
    for name, layer in layers.items():
        layer.weight.data.copy_(parameters[name])
        layer.bias.data.copy_(parameters[f"{name}_bias"])
    inputs = model_inputs("llama", model, None)
    close(model(**inputs).logits, theirs(**inputs).logits[:, LENGTH:], "logits")


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
def test_generating_with_a_cache_is_generating_without(name: str, padding: zoo.Padding | None, beams: int) -> None:
    model = compiled(name)
    inputs = {k: v for k, v in model_inputs(name, model, padding).items() if k in ("input_ids", "attention_mask")}
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    cached, plain = (
        model.generate(**inputs, max_new_tokens=5, do_sample=False, num_beams=beams, use_cache=use)
        for use in (True, False)
    )
    assert torch.equal(cached, plain)


@pytest.mark.parametrize(
    "arguments", ["", ", reparam=mlp(7)", ", reparam=mlp(7), keep=true", ", reparam=mlp(7), intrinsic=2"]
)
@pytest.mark.parametrize("name", ["llama", "bart", "bert"])
def test_saved_loaded_disabled_and_removed(name: str, arguments: str, tmp_path: Path) -> None:
    model, base = compiled(name, f"h = concat(prompt(len={LENGTH}{arguments}), h)"), zoo.build(name, torch.float64)
    inputs = model_inputs(name, model, None)
    want, plain = model(**inputs).logits, base.eval()(**inputs).logits
    assert not torch.allclose(want, plain)
    plan = peftc.plan(spec(f"h = concat(prompt(len={LENGTH}{arguments}), h)"), base)
    assert plan.totals.trained == sum(p.numel() for p in peftc.parameters(model).values())
    assert not plan.edit("p").identity
    assert not plan.edit("p").foldable
    peftc.save(model, tmp_path / "a")
    loaded = peftc.load(tmp_path / "a", zoo.build(name, torch.float64)).eval()
    close(loaded(**inputs).logits, want, "loaded")
    assert plan.totals.stored == sum(p.numel() for p in peftc.parameters(loaded).values())
    with peftc.disabled(model):
        assert torch.equal(model(**inputs).logits, plain)
    assert torch.equal(peftc.remove(model)(**inputs).logits, plain)


def test_with_other_edits() -> None:
    """The prompted embedding is the edited one; layers and their prefixes see longer inputs."""
    text = spec() + "\nedit e at embed { h += adapter(h, r=2, act=tanh) }"
    text += "\nedit k at layer[*].attn { kv = concat(prefix(len=2), kv) }"
    model = peftc.compile(text, zoo.build("llama", torch.float64), seed=0).eval()
    randomise(peftc.parameters(model))
    ids = model_inputs("llama", model, None)["input_ids"]
    whole = model(ids).logits
    out = model(ids[:, :4], use_cache=True)
    rest = model(ids[:, 4:], past_key_values=out.past_key_values).logits
    close(torch.cat([out.logits, rest], 1), whole, "with a cache")
    peftc.remove(model)


@pytest.mark.parametrize("name", [n for n in EVERY if n != "t5"])
def test_the_longest_prompt(name: str) -> None:
    """The longest prompt leaves one position. A position table with a padding row has one less than
    its size; one with extra rows in front has more.
    """
    model = zoo.build(name, max_position_embeddings=16)
    limit = 16 - (model.config.pad_token_id + 1 if name == "roberta" else 0)
    with pytest.raises(peftc.PeftcError, match="P314"):
        peftc.plan(spec(f"h = concat(prompt(len={limit}), h)"), model)
    peftc.compile(spec(f"h = concat(prompt(len={limit - 1}), h)"), model)
    one = torch.tensor([[5]])
    assert model(one, **({"decoder_input_ids": one} if name in ENCODER_DECODERS else {})).logits.isfinite().all()


def test_two_prompts_are_in_the_order_of_the_text() -> None:
    text = "h = concat(prompt(len=2), prompt(len=1), h)"
    one, inputs = compiled("llama", text), model_inputs("llama", zoo.build("llama"), None)
    parameters = peftc.parameters(one)
    rows = torch.cat(
        [parameters["p/decoder.embed/prompt.tokens"], parameters["p/decoder.embed/prompt_2.tokens"]]
    ).detach()
    close(one(**inputs).logits, by_hand("llama", rows, inputs), "logits")


def test_caches_that_are_counted_elsewhere_are_refused() -> None:
    model = compiled("llama")
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    want = model.generate(ids, **options)
    with pytest.raises(peftc.PeftcError, match="P419"):
        model.generate(ids, cache_implementation="static", **options)
    cache = model(ids[:, :4], use_cache=True).past_key_values
    with pytest.raises(peftc.PeftcError, match="P419"):
        model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(model.generate(ids, assistant_model=zoo.build("llama", torch.float64).eval(), **options), want)


def recurrent(name: str) -> Any:
    """A model with a recurrent state as cache, at least in some layers."""
    model = build("causal-lm", name)[0].eval()
    peftc.compile(spec(), model, seed=0)
    randomise(peftc.parameters(model))
    return model


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", [*RECURRENT, *HYBRID])
def test_a_prompt_is_in_the_state_of_a_recurrence_once(name: str, padding: str | None) -> None:
    model = recurrent(name)
    ids = torch.tensor([[5, 6, 7, 5, 6, 4], [3, 4, 6, 5, 7, 3]])
    mask = torch.ones_like(ids)
    mask[0, : 2 if padding else 0] = 0
    cached, plain = (
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            pad_token_id=1,
            use_cache=use,
            output_logits=True,
            return_dict_in_generate=True,
        ).logits
        for use in (True, False)
    )
    assert len(cached) == 4
    for one, other in zip(cached, plain, strict=True):
        near(one, other)


def near(one: Tensor, other: Tensor) -> None:
    """In float32, where a duplicate prompt changes the logits by about their own size."""
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.detach().abs().max()))


@pytest.mark.parametrize(("name", "cache"), [("rwkv", "state"), ("mamba", "cache_params"), ("mamba2", "cache_params")])
def test_tokens_that_continue_a_state_are_those_of_the_whole_input(name: str, cache: str) -> None:
    model = recurrent(name)
    ids = torch.tensor([[5, 6, 7, 5, 6, 4]])  # one row: transformers' code broadcasts the state of several
    whole = model(ids, use_cache=True).logits
    out = model(ids[:, :3], use_cache=True)
    parts = [out.logits]
    for i in range(3, ids.shape[1]):
        out = model(ids[:, i : i + 1], use_cache=True, **{cache: out[cache]})
        parts.append(out.logits)
    near(torch.cat(parts, 1), whole)
    if cache == "cache_params":
        first = model(ids[:, :3], use_cache=True, cache_params=transformers.DynamicCache(config=model.config))
        near(first.logits, whole[:, :3])


def test_a_cache_of_unknown_length_is_refused() -> None:
    model = compiled("llama")
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(peftc.PeftcError, match="P419") as excinfo:
        model(ids, past_key_values=((torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8)),))
    assert "tokens in `past_key_values`, a tuple, is unknown" in str(excinfo.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("edit p at layer[*] { h = concat(prompt(len=2), h) }", "P303"),
        ("edit p at embed { h = concat(h, prompt(len=2)) }", "P303"),
        ("edit p at embed { h = concat(prompt(len=2), h, h) }", "P303"),
        ("edit p at embed { h += prompt(len=2) }", "P301"),
        ("edit p at embed { h = concat(prompt(len=64), h) }", "P314"),
        ("edit p at embed { h = concat(prompt(len=0), h) }", "P106"),
        ("edit p at layer[*].attn { kv = concat(prompt(len=2), kv) }", "P310"),
    ],
)
def test_refused(text: str, code: str) -> None:
    model = zoo.build("llama")
    with pytest.raises(peftc.PeftcError, match=code):
        peftc.compile("peft 1\n" + text, model)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not peftc.installation.record.is_installed(model)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # warnings of transformers and torch
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_copies_compilers_and_checkpoints(name: str) -> None:
    model = compiled(name)
    inputs = model_inputs(name, model, "right")
    want = model(**inputs).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**inputs).logits, want)
    torch._dynamo.reset()
    with torch.no_grad():
        close(torch.compile(model, backend="eager", fullgraph=True)(**inputs).logits, want, "compiled")
    ((_, tokens),) = peftc.parameters(model).items()
    want.sum().backward()
    plain, tokens.grad = tokens.grad, None
    model.train().gradient_checkpointing_enable()
    model(**inputs, use_cache=False).logits.sum().backward()
    close(tokens.grad, plain, "gradient")
