"""Unsuitable models: each is a diagnostic, never a traceback, and never a half-changed model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import peftc
from peftc.cli.main import main
from peftc.fakes import data_answers
from peftc.tracing import tracer_base
from tests import zoo
from tests.laws.harness import Before
from tests.refusals import DORA, FFN, NORMS, Q, refused

# Without attention
# --------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """A layer that mixes tokens by convolution."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(d), nn.Linear(d, d)
        self.conv = nn.Conv1d(d, d, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.into(self.norm(x)).transpose(1, 2)).transpose(1, 2)


def without_attention() -> Iterator[tuple[str, nn.Module, dict[str, Tensor] | None]]:
    torch.manual_seed(0)
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=50, state_size=4)
    yield "state space", transformers.MambaForCausalLM(config), None
    conv = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    yield "conv", transformers.ResNetForImageClassification(conv), {"pixel_values": torch.zeros(1, 3, 32, 32)}
    yield "mixers", nn.Sequential(*(Mixer(16) for _ in range(3))), {"input": torch.zeros(2, 5, 16)}


@pytest.mark.parametrize(("model", "sample"), [pytest.param(m, s, id=name) for name, m, s in without_attention()])
def test_a_model_without_attention_says_so(model: nn.Module, sample: dict[str, Tensor] | None) -> None:
    table = peftc.sites(model, sample=sample)
    assert not any("attn" in site.path for site in table.sites)
    assert any("no attention" in warning or "no transformer layers" in warning for warning in table.warnings)
    for call in (peftc.plan, peftc.compile):
        diagnostic = refused("P201", lambda call=call: call(Q, model, sample=sample), model)
        assert any(warning in diagnostic.notes for warning in table.warnings)


def test_sites_on_the_command_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "state_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["sites", "--model", str(tmp_path)]) == 0
    assert "has no attention" in capsys.readouterr().err


# Models that are not from transformers
# -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, written_out: bool) -> None:
        super().__init__()
        self.heads, self.written_out = heads, written_out
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if not self.written_out:
            output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5).masked_fill(future, float("-inf"))
            output = scores.softmax(-1) @ v
        return self.out(output.transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, d: int, written_out: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(d), Attention(d, 4, written_out)
        self.ln_2, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 48), nn.GELU(), nn.Linear(48, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Hand-written: no config, no base class, its own blocks."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.ModuleList(Block(32, written_out) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_hand(written_out: bool = False) -> tuple[Transformer, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Transformer(written_out), {"ids": torch.randint(50, (2, 6))}


class Settling(Block):
    """A layer with a loop that the values of its input end."""

    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x / 2
        return super().forward(x)


class Counting(Block):
    """The same, with a number that Python compares."""

    def forward(self, x: Tensor) -> Tensor:
        while x.norm().item() > 0.5:
            x = x / 2
        return super().forward(x)


@pytest.mark.parametrize("layer", [Settling, Counting])
def test_a_loop_that_values_end_is_named_and_not_run_without_end(
    layer: type[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_answers, "MOST_ANSWERS", 20)
    monkeypatch.setattr(tracer_base, "MOST_OUTCOMES", 20)
    model, sample = by_hand()
    model.blocks = nn.ModuleList(layer(32, False) for _ in range(3))
    want = model.eval()(**sample)
    diagnostic = refused("P214", lambda: peftc.compile(Q, model, sample=sample), model)
    assert any("test_bad_models.py" in note and "while x.norm()" in note for note in diagnostic.notes)
    by_name = 'peft 1\nedit a at "blocks.*.mlp.0" { h += lora(x, r=2) }'
    edited = peftc.compile(by_name, model, sample=sample, seed=0)
    torch.testing.assert_close(edited(**sample), want)


@pytest.mark.parametrize("written_out", [False, True])
def test_a_model_written_by_hand_is_compiled(written_out: bool) -> None:
    """With a sample; its roles are inferred. A second spec needs no sample."""
    model, sample = by_hand(written_out)
    before, base = Before.of(model), model(**sample)
    peftc.compile(Q, model, seed=0, sample=sample, name="q")
    assert torch.equal(model(**sample), base)
    peftc.compile(FFN, model, seed=0)
    assert len(peftc.parameters(model, "q")) == 2 * 3
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter += 0.1
    output = model(**sample)
    for off in ("q", "default"):
        with peftc.disabled(model, off):
            assert not torch.equal(model(**sample), output)
            assert not torch.equal(model(**sample), base)
    more = {"ids": torch.randint(50, (3, 9))}
    model(**more).mean().backward()
    assert all(p.grad is not None for p in peftc.parameters(model).values())
    peftc.remove(model, "default")
    assert [f.edit for f in peftc.fold(model).folded] == ["q"]
    assert not torch.equal(model(**sample), base)
    model.load_state_dict(before.state)
    before.assert_same(model)


def test_a_model_without_config_needs_a_sample() -> None:
    model, _ = by_hand()
    diagnostic = refused("P507", lambda: peftc.compile(Q, model), model)
    assert "sample=" in str(diagnostic.help)


def test_a_torch_encoder_works_or_names_what_is_missing() -> None:
    """torch's attention is one fused call: its layers are edited around it."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    sample = {"src": torch.randn(2, 5, 32)}
    refused("P507", lambda: peftc.compile(Q, model), model)
    base = model(**sample)
    peftc.compile(
        'peft 1\nedit l at "layers.*.linear1" { h += adapter(x, r=2, act=gelu) }', model, seed=0, sample=sample
    )
    assert not torch.equal(model(**sample), base)
    assert torch.equal(peftc.remove(model)(**sample), base)
    table = peftc.sites(model, sample=sample)
    if not any(site.path.endswith("attn.self.q") for site in table.sites):
        diagnostic = refused("P201", lambda: peftc.compile(Q, model, sample=sample), model)
        assert diagnostic.notes


@pytest.mark.parametrize(
    ("sample", "code"),
    [
        ({"tokens": torch.zeros(2, 3, dtype=torch.long)}, "P509"),
        ({"ids": torch.zeros(2, 3)}, "P509"),
        ({}, "P509"),
        (torch.zeros(2, 3, dtype=torch.long), "P545"),
        ({3: torch.zeros(1)}, "P545"),
    ],
    ids=str,
)
def test_a_wrong_sample_is_refused(sample: Any, code: str) -> None:
    model, _ = by_hand()
    refused(code, lambda: peftc.sites(model, sample=sample), model)
    refused(code, lambda: peftc.compile(Q, model, sample=sample), model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_a_scripted_module_is_named() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(4, 4), torch.jit.script(nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.act(self.linear(x))

    model = nn.Sequential(Scripted(), Scripted())
    with pytest.raises(peftc.PeftcError, match=r"`0.act` is a ScriptModule") as caught:
        peftc.sites(model, sample={"input": torch.randn(1, 2, 4)})
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "P512"
    assert diagnostic.help is not None
    assert "in its place" in diagnostic.help


def test_packed_sequences_ask_for_data() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.out(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])

    sample = {"x": torch.randn(2, 5, 4), "lengths": torch.tensor([5, 3])}
    error = refused("P509", lambda: peftc.sites(Packed(), sample=sample))
    assert "asks for the data of tensors" in error.message
    assert any("_pack_padded_sequence" in note for note in error.notes)


def test_a_model_that_checks_a_mask_is_told_that_the_analysis_has_no_data() -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            if mask.nonzero(as_tuple=True)[0].numel() != 7:
                raise ValueError("the mask marks other tokens")
            return x + self.linear(x)

    sample = {"x": torch.randn(1, 9, 4), "mask": torch.arange(9)[None] < 7}
    model = Checked()
    assert model(**sample).shape == (1, 9, 4)
    diagnostic = refused("P509", lambda: peftc.sites(model, sample=sample))
    assert any("the mask marks other tokens" in note for note in diagnostic.notes)
    assert diagnostic.help is not None
    assert "tensors without data" in diagnostic.help


def test_a_model_without_layers_has_modules() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x).relu())

    error = refused("P201", lambda: peftc.plan(Q, Plain(), sample={"x": torch.randn(3, 4)}))
    assert error.help is not None
    for selector in ("**.linear", '"encoder"'):
        assert f"`{selector}`" in error.help
        assert peftc.plan(
            f"peft 1  edit e at {selector} {{ h += lora(x, r=2) }}", Plain(), sample={"x": torch.randn(3, 4)}
        )


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model, sample = by_hand()
    model.blocks[0].lock = threading.Lock()
    assert "lock" in str(refused("P509", lambda: peftc.compile(Q, model, sample=sample), model))


def test_an_adapter_is_not_loaded_onto_a_name(tmp_path: Path) -> None:
    name: Any = "facebook/bart-large"
    refused("P545", lambda: peftc.load(tmp_path, name))


# Without weights
# --------------------------------------------------------------------------------------------------


def on_meta(*modules: str) -> nn.Module:
    """A model with these modules on the meta device; the whole model if none is named."""
    model = zoo.build("llama")
    for name in modules or ("",):
        model.get_submodule(name).to("meta")
    return model


@pytest.mark.parametrize("modules", [(), ("model.layers.1.self_attn.q_proj",)], ids=["all", "part"])
def test_planning_needs_no_weights(modules: tuple[str, ...]) -> None:
    model, there = on_meta(*modules), zoo.build("llama")
    assert [s.path for s in peftc.sites(model).sites] == [s.path for s in peftc.sites(there).sites]
    for spec in (Q, DORA, NORMS):
        assert peftc.plan(spec, model) == peftc.plan(spec, there)


def test_operations_that_need_weights_are_refused(tmp_path: Path) -> None:
    model = on_meta()
    for spec in (DORA, NORMS, Q + DORA.removeprefix("peft 1")):
        refused("P527", lambda spec=spec: peftc.compile(spec, model), model)
    peftc.compile(Q, model)
    assert {p.device.type for p in peftc.parameters(model).values()} == {"meta"}
    for spec in (DORA, NORMS):
        refused("P527", lambda spec=spec: peftc.compile(spec, model), model)
    refused("P527", lambda: peftc.fold(model), model)
    refused("P527", lambda: peftc.save(model, tmp_path / "a"), model)
    assert not (tmp_path / "a").exists()
    saved = peftc.save(peftc.compile(FFN, zoo.build("llama"), seed=0), tmp_path / "b")
    refused("P527", lambda: peftc.load(saved, model), model)
    peftc.remove(model)
    refused("P527", lambda: peftc.load(saved, model), model)


def test_a_model_loaded_in_part_is_compiled_where_it_has_weights() -> None:
    model = on_meta("model.layers.1.self_attn.q_proj")
    for spec in (Q, DORA):
        assert "layers.1" in refused("P527", lambda spec=spec: peftc.compile(spec, model), model).message
    peftc.compile(FFN, model, seed=0)
    assert {p.device.type for p in peftc.parameters(model).values()} == {"cpu"}
    refused("P527", lambda: peftc.fold(model), model)
    peftc.remove(model)
    peftc.compile(Q.replace("layer[*]", "layer[0]"), model, seed=0)
    assert {p.device.type for p in peftc.parameters(model).values()} == {"cpu"}
