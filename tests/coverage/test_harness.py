"""The coverage benchmark itself: how it shrinks configurations, what it observes, and that it
notices broken compilations.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import peftc
from benchmarks.families import build, pairs
from benchmarks.families import checks as checks_module
from benchmarks.families.checks import checked
from benchmarks.families.depth import shallow
from benchmarks.families.observation import observe
from benchmarks.families.report import summary
from benchmarks.families.shrink import FIRST_FREE, LAST_FREE, shrunk
from benchmarks.families.state import difference, state_of


def test_all_pairs_of_the_six_mappings_are_there() -> None:
    families = list(pairs())
    assert len(families) == len({p.key for p in families}) > 400
    assert {"causal-lm/llama", "seq2seq/bart", "image-classification/vit"} <= {p.key for p in families}


def test_one_layer_of_each_kind_is_kept() -> None:
    kinds = ["sliding", "sliding", "full"] * 4
    fields = shallow({"num_hidden_layers": 12, "layer_types": kinds, "moe_layers": [1, 4], "name": "x" * 12})
    assert fields == {"num_hidden_layers": 3, "layer_types": ["sliding", "sliding", "full"], "moe_layers": [1]}


def test_a_layer_with_its_own_sizes_keeps_their_proportion() -> None:
    exceptions = {"05": {"head_dim": 512}, "03": {"head_dim": 512}}
    values = {"num_hidden_layers": 6, "head_dim": 256, "hidden_size": 1024, "per_layer_config": exceptions}
    config = shrunk(values)
    assert config["head_dim"] == 8
    assert config["per_layer_config"] == {1: {"head_dim": 16}}


def test_special_tokens_differ_from_text_and_from_each_other() -> None:
    tokens = {"pad_token_id": 1, "image_token_id": 151655, "text_config": {"model_type": "x", "eos_token_id": 151643}}
    config = shrunk({**tokens, "vocab_size": 151936})
    ids = {config["pad_token_id"], config["image_token_id"], config["text_config"]["eos_token_id"]}
    assert len(ids) == 3
    assert not ids & set(range(FIRST_FREE, LAST_FREE))
    assert max(ids) < config["vocab_size"]


def test_the_same_seed_builds_the_same_model() -> None:
    (one, inputs), (two, again) = build("causal-lm", "llama"), build("causal-lm", "llama")
    other, _ = build("causal-lm", "llama", seed=1)
    assert difference(state_of(one), state_of(two)) == ""
    assert difference(state_of(one), state_of(other)) != ""
    assert torch.equal(inputs["input_ids"], again["input_ids"])
    assert not one.training
    assert all(bool((p != 0).all()) for n, p in one.named_parameters() if n.endswith("bias"))


@pytest.mark.parametrize(
    ("key", "attending", "feed_forward"),
    [
        ("causal-lm/llama", 2, True),
        ("seq2seq/bart", 6, True),
        ("causal-lm/mamba", 0, False),
        ("masked-lm/fnet", 0, True),
    ],
)
def test_attention_and_feed_forward_are_observed(key: str, attending: int, feed_forward: bool) -> None:
    observations = observe(*build(*key.split("/")))
    assert len(observations.attending) == attending
    assert observations.has("ffn") == feed_forward


def test_a_router_is_no_attention() -> None:
    observations = observe(*build("causal-lm", "mixtral"))
    assert {name.rsplit(".", 1)[-1] for name in observations.attending} == {"self_attn"}


class TestBrokenCompilations:
    """Each broken promise gives a failing verdict with its reason."""

    @pytest.fixture
    def llama(self) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        return build("causal-lm", "llama")

    def verdict(self, llama: tuple[nn.Module, dict[str, torch.Tensor]], edit: str = "a") -> str:
        result = checked(*llama, edits=edit)["edits"][edit]
        assert result["verdict"] == "fail"
        return result["reason"]

    def test_not_the_identity(self, llama, monkeypatch) -> None:
        self._after_compile(monkeypatch, lambda model: [p.add_(1.0) for p in peftc.parameters(model).values()])
        assert "not the identity" in self.verdict(llama)

    def test_nothing_changes(self, llama, monkeypatch) -> None:
        monkeypatch.setattr(checks_module, "_draw", lambda _: None)
        assert self.verdict(llama) == "does not change the output"

    def test_no_gradient(self, llama, monkeypatch) -> None:
        frozen = lambda model: [p.requires_grad_(False) for p in peftc.parameters(model).values()]  # noqa: E731
        self._after_compile(monkeypatch, frozen)
        assert "RuntimeError" in self.verdict(llama)

    def test_left_behind(self, llama, monkeypatch) -> None:
        remove = peftc.remove

        def leaves(model: nn.Module) -> nn.Module:
            remove(model)
            model.model.norm.left = True
            return model

        monkeypatch.setattr(peftc, "remove", leaves)
        assert "not gone after remove: attributes" in self.verdict(llama)

    def test_a_base_weight_that_moved(self, llama, monkeypatch) -> None:
        self._after_compile(monkeypatch, lambda model: model.lm_head.weight.mul_(1.0 + 1e-6))
        assert "identity" in self.verdict(llama)

    def test_refused_where_there_is_one(self, llama, monkeypatch) -> None:
        def refuses(*_args: object, **_more: object) -> None:
            raise peftc.PeftcError(peftc.Diagnostic("P201", "nothing there"))

        monkeypatch.setattr(peftc, "compile", refuses)
        assert self.verdict(llama) == "P201 nothing there"

    def test_compiled_where_there_is_none(self, monkeypatch) -> None:
        monkeypatch.setattr(peftc, "compile", lambda _text, model, **_more: model)
        result = checked(*build("causal-lm", "mamba"), edits="a")["edits"]["a"]
        assert result == {"verdict": "fail", "reason": "compiled although there is no such sub-layer"}

    @staticmethod
    def _after_compile(monkeypatch, act) -> None:
        compile_ = peftc.compile

        def wrapped(*args, **more) -> nn.Module:
            model = compile_(*args, **more)
            with torch.no_grad():
                act(model)
            return model

        monkeypatch.setattr(peftc, "compile", wrapped)


def test_percentages_are_of_models_that_ran() -> None:
    good = {key: {"verdict": "pass"} for key in "abcde"}
    rows = {
        "a": {
            "type": "a",
            "built": True,
            "ran": True,
            "attention": 2,
            "sites": {"layer": 2, "layer.attn.self": 2},
            "edits": good,
        },
        "b": {
            "type": "b",
            "built": True,
            "ran": True,
            "attention": 0,
            "sites": {"layer": 2},
            "edits": {**good, "d": {"verdict": "refused"}, "a": {"verdict": "fail", "reason": "x"}},
        },
        "c": {"type": "c", "built": False, "ran": False, "why_not": "large"},
        "d": {"type": "d", "built": True, "error": "took longer than 120 s"},
    }
    totals = SimpleNamespace(**{k.replace(" ", "_").replace(",", ""): v for k, v in summary(rows).items()})
    assert (totals.pairs, totals.built, totals.ran) == (4, 3, 3)
    assert totals.a.startswith("1/3")
    assert totals.d.startswith("1/1")
    assert totals.a_b_c_e.startswith("1/3")


@pytest.mark.parametrize(("name", "projecting"), [("llama", True), ("bert", True), ("xlnet", False)])
def test_bare_parameters_are_no_projections(name: str, projecting: bool) -> None:
    """Where q and v are parameters, not modules, an edit of them must be refused."""
    observations = observe(*build("causal-lm", name))
    assert observations.has("attn")
    assert observations.has("projection") == projecting
