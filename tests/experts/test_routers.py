"""Routers, networks that run next to the experts, and experts in a `ModuleList`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.dataflow.layer_graph import LayerGraph
from peftc.fakes.tensors import new_mode
from peftc.planning.report.plan import plain_text
from peftc.planning.report.site_tree import render_sites
from peftc.recognition.moe.experts import find_experts
from peftc.recognition.roles import sub_layers
from peftc.tracing.tracer import RegionTracer
from tests.experts.models import MODELS, fresh, logits, original, perturb

functional: Any = nn.functional
ROUTED = [*MODELS, "switch_transformers"]


@pytest.mark.parametrize("name", ROUTED)
def test_the_router_is_found_and_has_one_logit_an_expert(name: str) -> None:
    model, inputs = original(name)
    table = peftc.sites(model, sample=inputs)
    routers = [site for site in table.sites if site.path.endswith(".router")]
    assert routers
    for site in routers:
        above = site.path.removesuffix(".router")
        experts = {s.steps[-2] for s in table.sites if s.path.startswith(f"{above}.experts[")}
        assert site.states["w"].shape.d_out == site.states["h"].shape.d == len(experts)
        assert site.states["w"].shape.d_in == site.states["x"].shape.d


@pytest.mark.parametrize("name", MODELS)
def test_edits_of_a_router(name: str) -> None:
    """Edits of the router's logits and of its weight: identity at initialisation, gradients, fold,
    remove.
    """
    model, inputs = fresh(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    text = """peft 1
edit h at layer[*].ffn.router { h += lora(x, r=1) }
edit w at layer[*].ffn.router { w += lowrank(r=1) }"""
    with torch.no_grad():
        base = logits(model, inputs)
        peftc.compile(text, model, sample=inputs)
        assert torch.equal(logits(model, inputs), base)
    perturb(peftc.parameters(model))
    edited = logits(model, inputs)
    assert not torch.equal(edited, base)
    edited.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in peftc.parameters(model).values())
    peftc.remove(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ROUTED)
def test_routers_fold_as_the_plan_says(name: str) -> None:
    """A router returns more than its logits: choices, and what is computed from them."""
    model, inputs = fresh(name)
    routers = {s.module: s.path for s in peftc.sites(model, sample=inputs).sites if s.path.endswith(".router")}
    spec = "\n".join(f'edit e{i} at "{module}" {{ h += lora(x, r=1) }}' for i, module in enumerate(routers))
    spec = f"peft 1\n{spec}\nedit s at layer[*].ffn.router {{ h *= vector(init=1) }}"
    planned = peftc.plan(spec, model, sample=inputs)
    assert [site.path for edit in planned.edits[:-1] for site in edit.sites] == list(routers.values())
    assert all(edit.foldable for edit in planned.edits), planned
    peftc.compile(spec, model, seed=0, sample=inputs)
    perturb(peftc.parameters(model))
    with torch.no_grad():
        edited = logits(model, inputs)
    report = peftc.fold(model, sample=inputs)
    assert len(report.folded) == len(planned.edits)
    with torch.no_grad():
        torch.testing.assert_close(logits(model, inputs), edited, rtol=1e-5, atol=1e-5)  # routers compute in float32


def test_the_first_result_of_a_router_is_not_taken_for_its_logits() -> None:
    model, inputs = fresh("llama4_text")
    model = model.float()
    peftc.compile("peft 1  edit e at layer[*].ffn.router { h += lora(x, r=1) }", model, sample=inputs)
    report = peftc.verify(model, inputs)
    assert report.ok, report
    assert "no module computes `h`" in str(report)


@pytest.mark.parametrize(
    ("name", "module"),
    [("qwen2_moe", "shared_expert"), ("deepseek_v3", "shared_experts"), ("llama4_text", "shared_expert")],
)
def test_a_network_next_to_the_experts_is_the_shared_expert(name: str, module: str) -> None:
    model, inputs = fresh(name)
    table = peftc.sites(model, sample=inputs)
    shared = [site for site in table.sites if ".ffn.shared." in site.path]
    assert {site.steps[-1][0] for site in shared} == {"gate", "up", "down"}
    assert all(f".{module}.{site.steps[-1][0]}_proj" in site.module for site in shared)
    with torch.no_grad():
        base = logits(model, inputs)
        peftc.compile("peft 1\nedit s at layer[*].ffn.shared.down { h += lora(x, r=2) }", model, sample=inputs)
        assert torch.equal(logits(model, inputs), base)
        perturb(peftc.parameters(model))
        edited = logits(model, inputs)
        assert not torch.equal(edited, base)
        peftc.fold(model, sample=inputs)
        assert (logits(model, inputs) - edited).abs().max() < 1e-10


def test_experts_in_a_list_are_ordinary_linears(tmp_path: Path) -> None:
    model, inputs = fresh("switch_transformers")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    text = """peft 1
edit e at layer[*].ffn.experts[*].up | layer[*].ffn.experts[*].down { h += lora(x, r=2) }
edit w at layer[*].ffn.experts[0].up { w += lowrank(r=1) }"""
    with torch.no_grad():
        base = logits(model, inputs)
        peftc.compile(text, model, sample=inputs)
        assert torch.equal(logits(model, inputs), base)
    perturb(peftc.parameters(model))
    edited = logits(model, inputs)
    edited.square().sum().backward()
    hit = [p for p in peftc.parameters(model).values() if p.grad is not None and bool(p.grad.any())]
    assert len(hit) > len(peftc.parameters(model)) // 3  # an expert without tokens is not called
    peftc.save(model, tmp_path / "adapter")
    folded, _ = fresh("switch_transformers")
    peftc.load(tmp_path / "adapter", folded, sample=inputs)
    with torch.no_grad():
        assert torch.equal(logits(folded, inputs), logits(model, inputs))  # without gradients LoRA is added in place
        peftc.fold(folded, sample=inputs)
        assert (logits(folded, inputs) - edited).abs().max() < 1e-5  # its router computes in float32
    peftc.remove(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_all_experts_are_one_line_in_the_site_tree() -> None:
    model, inputs = original("qwen2_moe")
    lines = plain_text(render_sites(peftc.sites(model, sample=inputs), 150), 150).splitlines()
    (line,) = [line for line in lines if "experts[" in line]
    assert line.split() == ["experts[0..3]", "×", "4", "experts", "18,432"]
    assert sum(line.strip().startswith("down ") for line in lines) == 2  # of the experts, and of the shared one


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_experts_implementation_uses_the_edited_matrices(implementation: str) -> None:
    """Also as one whole graph under torch.compile, if the implementation compiles to one."""
    model, inputs = fresh("mixtral")
    model = model.float()
    with torch.no_grad():
        text = "peft 1\nedit e at layer[*].ffn.experts[*].up | layer[*].ffn.experts[*].down { w += lowrank(r=2) }"
        peftc.compile(text, model, sample=inputs)
        perturb(peftc.parameters(model))
        expected = logits(model, inputs)
        model.set_experts_implementation(implementation)
        actual = logits(model, inputs)
        assert torch.allclose(actual, expected, atol=1e-5)
        if implementation != "eager":
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert torch.allclose(logits(compiled, inputs), actual, atol=1e-6)
    torch.compiler.reset()


class Blocks(nn.Module):
    """Block-diagonal weights: each half of the features has a matrix of its own. No experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 4, 8)), nn.Parameter(torch.randn(2, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        halves = torch.relu(torch.bmm(x.reshape(-1, 2, 4).transpose(0, 1), self.up))
        return torch.bmm(halves, self.down).transpose(0, 1).reshape(x.shape)


class Layer(nn.Module):
    """`before` the blocks. With a Linear, there are enough features for one logit each, but nothing
    is routed.
    """

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.norm, self.before, self.blocks = nn.LayerNorm(8), before, Blocks()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks(self.before(self.norm(x)))


@pytest.mark.parametrize("before", [nn.Identity(), nn.Linear(8, 8)])
def test_block_matrices_without_a_router_are_no_experts(before: nn.Module) -> None:
    root = Layer(before)
    traced = RegionTracer(lambda _: False).trace_region(root, {"x": torch.randn(2, 5, 8)})
    (ffn,) = subs = sub_layers(LayerGraph(traced.graph, root))
    find_experts(traced, subs, LayerGraph(traced.graph, root), new_mode())
    assert (ffn.kind, ffn.router, ffn.experts) == ("ffn", None, [])


class Experts(nn.Module):
    def __init__(self, d: int, hidden: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, hidden, d)), nn.Parameter(torch.randn(4, d, hidden))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in range(4):
            place, token = torch.where(indices.T.eq(number))
            h = torch.relu(functional.linear(x[token], self.up[number]))
            out.index_add_(0, token, functional.linear(h, self.down[number]) * weights[token, place, None])
        return out


class Latent(nn.Module):
    """Experts on a projection of the tokens, divided by its largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.first, self.last = nn.Linear(8, 4), nn.Linear(8, 6), nn.Linear(6, 8)
        self.experts = Experts(6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        weights, indices = self.route(tokens).softmax(-1).topk(2, -1)
        latent = self.first(tokens)
        return x + self.last(self.experts(latent / latent.max(), indices, weights)).view(x.shape)


def test_the_router_is_the_linear_whose_logits_choose_the_expert() -> None:
    root = Latent()
    traced = RegionTracer(lambda _: False).trace_region(root, {"x": torch.randn(2, 5, 8)})
    (ffn,) = subs = sub_layers(LayerGraph(traced.graph, root))
    find_experts(traced, subs, LayerGraph(traced.graph, root), new_mode())
    assert ffn.router is not None
    assert ffn.router.weight == "route.weight"
