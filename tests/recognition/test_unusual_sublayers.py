"""Sub-layers that few models have: the weights of each role, by their modules and rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from peftc.diagnostics import PeftcError
from tests.layers import Attention, Layers, Network

D, T = 8, 6
Roles = dict[str, str]


class Shortcut(nn.Module):
    """Set Transformer: the attention is added to its queries, through whose Linear x goes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.fc = (nn.Linear(D, D) for _ in range(4))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        x = self.norm(q + (q @ k.transpose(1, 2)).softmax(-1) @ v)
        return x + torch.relu(self.fc(x))


class Sorted(nn.Module):
    """Sinkhorn: keys are sorted by an attention of their own, and stand beside values, too."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        means = [z.unflatten(1, (2, -1)).mean(2) for z in (q, k)]
        order = (means[0] @ means[1].transpose(1, 2)).softmax(-1)
        first = torch.einsum("buv,bvtd->butd", order, k.unflatten(1, (2, -1))).flatten(1, 2)
        keys, values = torch.cat((first, k), 1), torch.cat((first, v), 1)
        return x + self.o((q @ keys.transpose(1, 2)).softmax(-1) @ values)


class Levels(nn.Module):
    """H-Transformer: `exp` and a division by sums, of tokens and of means of pairs of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        levels = [(q, k, v), tuple(z.unflatten(1, (-1, 2)).mean(2) for z in (q, k, v))]
        sums: list[Tensor] = []
        counts: list[Tensor] = []
        for q, k, v in levels:
            scores = torch.einsum("...id,...jd->...ij", q, k)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            times = T // q.shape[1]
            sums.append(torch.einsum("...ij,...jd->...id", weights, v).repeat_interleave(times, 1))
            counts.append(weights.sum(-1).repeat_interleave(times, 1))
        return x + self.o(torch.stack(sums).sum(0) / torch.stack(counts).sum(0)[..., None])


class Frequencies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.ones(D))

    def forward(self, t: Tensor) -> Tensor:
        return t[:, None] * self.freqs


class Positions(nn.Module):
    """A rotation by positions and learned frequencies, in a module of its own: no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.norm, self.pos_emb = nn.LayerNorm(D), Frequencies()

    def forward(self, x: Tensor) -> Tensor:
        angles = self.pos_emb(torch.arange(x.shape[1]))
        q, k = (z * angles.cos() for z in (self.q(self.norm(x)), self.k(self.norm(x))))
        return x + self.o((q @ k.transpose(1, 2)).softmax(-1) @ self.v(self.norm(x)))


class Convolutions(nn.Module):
    """Axial Attention: two networks of 3 x 3 convolutions, behind the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.first, self.second = (
            nn.Sequential(nn.Conv1d(D, 16, 3, padding=1), nn.LeakyReLU(inplace=True), nn.Conv1d(16, D, 3, padding=1))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)
        x = x + self.first(x.transpose(1, 2)).transpose(1, 2)
        return x + self.second(x.transpose(1, 2)).transpose(1, 2)


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(1, 1, D)), nn.Parameter(torch.zeros(1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.g + self.b


class Channels(nn.Module):
    """ResMLP: a pointwise convolution whose channels are the tokens, behind an affine map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.down = nn.Conv1d(T, T, 1), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.affine = Affine()
        self.scale = nn.Parameter(torch.ones(1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(self.affine(x)) * self.scale
        return x + self.down(torch.relu(self.up(x)))


class AddedTwice(nn.Module):
    """Jukebox: the sum that the second norm reads is written again in the result."""

    def __init__(self, result: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.result, self.attn, self.mlp = result, Attention(D), Network(D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        a = self.attn(self.norm1(x))
        return self.result(x, a, self.mlp(self.norm2(x + a)))


RESULTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "x + a + m": lambda x, a, m: x + a + m,
    "m + (x + a)": lambda x, a, m: m + (x + a),
    "a + (x + m)": lambda x, a, m: a + (x + m),
    "x + (a + m)": lambda x, a, m: x + (a + m),
    "x + (a + m) / 2": lambda x, a, m: x + 0.5 * (a + m),
    "(x + a + m) / 2": lambda x, a, m: 0.5 * (x + a + m),
}


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class BatchNorms(nn.Module):
    """PatchTST: norms of channels between transposes, behind each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(D), Network(D)
        self.norm1, self.norm2 = (nn.Sequential(Transpose(), nn.BatchNorm1d(D), Transpose()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Padded(nn.Module):
    """VITS: convolutions over (batch, d, tokens), which a function pads, behind a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = Attention(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.first, self.second = nn.Conv1d(D, 16, 3), nn.Conv1d(16, D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x)).mT
        mask = torch.ones_like(x[:, :1])
        z = torch.relu(self.first(F.pad(x * mask, (1, 1))))
        x = x + self.second(F.pad(z * mask, (1, 1))) * mask
        return self.norm2(x.mT)


class Unnormed(nn.Module):
    """A convolution over tokens and a Linear over features, without norms: either may be either."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.down = nn.Conv1d(T, T, 1), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(x)
        return x + self.down(torch.relu(self.up(x)))


class Mixed(nn.Module):
    """One of the functions below, and a feed-forward part."""

    def __init__(self, mix: Callable[[Mixed, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.q, self.k, self.v, self.o, self.memory = (nn.Linear(D, D) for _ in range(5))
        self.up, self.down, self.norm = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.LayerNorm(D)
        self.table = nn.Parameter(torch.randn(T, T))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.mix(self, x))
        return x + self.down(torch.relu(self.up(self.norm(x))))


def attention_free(layer: Mixed, x: Tensor) -> Tensor:
    keys, weights = layer.k(x).exp(), layer.table.exp()
    return layer.q(x).sigmoid() * (weights @ (keys * layer.v(x))) / (weights @ keys)


def recurrent(layer: Mixed, x: Tensor) -> Tensor:
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(layer.q(x[:, t]) + layer.k(h))
        states.append(h)
    return torch.stack(states, 1)


def external(layer: Mixed, x: Tensor) -> Tensor:
    return layer.v(layer.memory(layer.q(x)).softmax(1))


def random_synthesizer(layer: Mixed, x: Tensor) -> Tensor:
    return layer.table.softmax(-1) @ layer.v(x)


def entry_by_entry(layer: Mixed, x: Tensor) -> Tensor:
    weights = (layer.q(x)[:, :, None] * layer.k(x)[:, None]).sum(-1).softmax(-1)
    return (weights[..., None] * layer.v(x)[:, None]).sum(2)


def additive(layer: Mixed, x: Tensor) -> Tensor:
    """SwiftFormer: a sum of the queries, each times a number of its own."""
    weights = F.normalize(layer.k(x)[..., :1], dim=1)
    return layer.v((weights * layer.q(x)).sum(1, keepdim=True) * layer.q(x))


def slots(layer: Mixed, x: Tensor) -> Tensor:
    weights = (layer.k(x) @ layer.q(x).transpose(1, 2)).softmax(-1)
    return (weights / weights.sum(1, keepdim=True)).transpose(1, 2) @ layer.v(x)


ATTENTION = {"attn.self.q": "q", "attn.self.k": "k", "attn.self.v": "v"}
KINDS: dict[str, tuple[Callable[[], nn.Module], Roles]] = {
    "queries are the shortcut": (Shortcut, ATTENTION | {"attn.self.norm": "norm", "ffn.down": "fc"}),
    "sorted keys": (Sorted, ATTENTION | {"attn.self.k": "kv[0:8]", "attn.self.v": "kv[8:16]", "attn.self.o": "o"}),
    "levels of exp": (
        Levels,
        {f"attn.self.{role}": f"qkv[{8 * i}:{8 * i + 8}]" for i, role in enumerate("qkv")} | {"attn.self.o": "o"},
    ),
    "positions": (Positions, ATTENTION | {"attn.self.o": "o", "attn.self.norm": "norm"}),
    "convolutions": (
        Convolutions,
        ATTENTION
        | {"ffn[0].up": "first.0", "ffn[0].down": "first.2", "ffn[1].up": "second.0", "ffn[1].down": "second.2"},
    ),
    "norms of channels": (
        BatchNorms,
        {f"attn.self.{role}": f"attn.{role}" for role in "qkvo"}
        | {"attn.self.norm": "norm1.1", "ffn.up": "mlp.up", "ffn.down": "mlp.down", "ffn.norm": "norm2.1"},
    ),
    "padded convolutions": (
        Padded,
        {f"attn.self.{role}": f"attn.{role}" for role in "qkvo"}
        | {"attn.self.norm": "norm1", "ffn.up": "first", "ffn.down": "second", "ffn.norm": "norm2"},
    ),
    "channels are tokens": (
        Channels,
        {"mixer.conv": "conv", "mixer.norm": "affine", "ffn.up": "up", "ffn.down": "down"},
    ),
}


NETWORK = {"ffn.up": "up", "ffn.down": "down", "ffn.norm": "norm"}
MIXERS: dict[Callable[[Mixed, Tensor], Tensor], set[str]] = {
    attention_free: {"mixer"},
    recurrent: {"mixer"},
    additive: {"mixer"},
    external: {"mixer"},
    random_synthesizer: set(),  # an attention of an unknown kind is refused
    entry_by_entry: set(),
}


def roles(model: nn.Module, sample: Tensor) -> Roles:
    """The weights of the first layer by role, with their rows."""
    weights: Roles = {}
    for site in peftc.sites(model, sample={"x": sample}).sites:
        weight = site.states["w"].weight if "w" in site.states else None
        if ("layer", 0) in site.steps and (weight is not None or site.steps[-1][0] == "norm"):
            rows = f"[{weight.rows.start}:{weight.rows.stop}]" if weight is not None and weight.rows else ""
            role = site.path.rpartition("layer[0].")[2]
            weights[role] = site.module.removeprefix("layers.0.") + rows
    return weights


@pytest.mark.parametrize("name", KINDS)
def test_roles_of(name: str) -> None:
    layer, expected = KINDS[name]
    assert roles(Layers(layer(), layer()), torch.randn(2, T, D)) == expected


@pytest.mark.parametrize("mix", MIXERS)
def test_what_mixes_tokens_is_no_network(mix: Callable[[Mixed, Tensor], Tensor]) -> None:
    model, x = Layers(Mixed(mix), Mixed(mix)), torch.randn(2, T, D)
    own = roles(model, x)
    others = {role.partition(".")[0] for role in own.keys() - NETWORK.keys()}
    assert {role: own.get(role) for role in NETWORK} == NETWORK
    assert others == MIXERS[mix]
    untraced = peftc.sites(model, sample={"x": x}).untraced
    assert bool(untraced) is not bool(others)


def test_keys_are_what_the_values_are_summed_over() -> None:
    """Slot Attention: the softmax is over queries."""
    assert roles(Layers(Mixed(slots), Mixed(slots)), torch.randn(2, T, D)).items() >= ATTENTION.items()


def test_without_norms_either_of_two_dimensions_may_have_the_features() -> None:
    own = roles(Layers(Unnormed(), Unnormed()), torch.randn(2, T, D))
    assert {role.partition("[")[0] for role in own} == {"mixer"}


@pytest.mark.parametrize("result", RESULTS)
def test_what_two_sums_add_is_one_sub_layer(result: str) -> None:
    """An edit of its result is one of both sums, and no sum has it alone."""
    torch.manual_seed(0)
    model = Layers(*(AddedTwice(RESULTS[result]) for _ in range(2))).double().eval()
    x = torch.randn(2, T, D, dtype=torch.float64)
    assert roles(model, x) == (
        {f"attn.self.{role}": f"attn.{role}" for role in "qkvo"}
        | {"attn.self.norm": "norm1", "ffn.up": "mlp.up", "ffn.down": "mlp.down", "ffn.norm": "norm2"}
    )
    table = peftc.sites(model, sample={"x": x})
    assert [site.path.rpartition("layer[0].")[2] for site in table.sites if "layer[0]" in site.path].count(
        "ffn.add"
    ) == 1
    assert not [site for site in table.sites if site.path.endswith("attn.self.add")]
    peftc.compile("peft 1  edit e at layer[*].attn { h += linear(h, bias=false) }", model, seed=0, sample={"x": x})
    weights = [nn.init.normal_(weight) for weight in peftc.parameters(model).values()]
    edited = model(x)
    peftc.remove(model)
    for layer, weight in zip(model.layers, weights, strict=True):
        layer.attn.register_forward_hook(lambda _, args, h, w=weight: h + h @ w.T)  # pyright: ignore
    torch.testing.assert_close(edited, model(x), rtol=0, atol=1e-10)


def test_states_around_padded_convolutions_have_no_padding() -> None:
    torch.manual_seed(0)
    model, x = Layers(Padded(), Padded()).double().eval(), torch.randn(2, T, D, dtype=torch.float64)
    spec = """peft 1
    edit a at layer[*].ffn { h += linear(x, bias=false) }
    edit b at layer[*].ffn.hidden { h += vector(init=0) }
    """
    peftc.compile(spec, model, seed=0, sample={"x": x})
    parameters = {name: nn.init.normal_(p).detach() for name, p in peftc.parameters(model).items()}
    edited = model(x)
    peftc.remove(model)
    for i, layer in enumerate(model.layers):
        matrix, vector = (next(p for n, p in parameters.items() if f"layer[{i}]" in n and p.ndim == d) for d in (2, 1))
        seen: list[Tensor] = []
        layer.first.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0][..., 1:-1]))
        layer.second.register_forward_pre_hook(
            lambda _, args, v=vector: args[0] + F.pad(v[:, None].expand(-1, T), (1, 1))
        )
        layer.second.register_forward_hook(lambda _, args, h, w=matrix, seen=seen: h + w @ seen.pop())
    torch.testing.assert_close(edited, model(x), rtol=0, atol=1e-10)


def test_an_adapter_of_a_padded_state_is_refused(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Layers(Padded(), Padded()).eval()

    sample = {"x": torch.randn(2, T, D)}
    spec = "peft 1  edit b at layer[*].ffn.hidden { h += vector(init=0) }"
    peftc.save(peftc.compile(spec, build(), seed=0, sample=sample), tmp_path)
    peftc.load(tmp_path, build(), sample=sample)
    metadata = tmp_path / "adapter.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"format_version": "1.3"}))
    with pytest.raises(PeftcError, match="P567"):
        peftc.load(tmp_path, build(), sample=sample)


class Constant(nn.Module):
    """A Linear reads features that are padded with ones: its hidden features are all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.up, self.down = Attention(D), nn.Linear(D, 16), nn.Linear(19, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.down(F.pad(torch.relu(self.up(x)), (0, 3), value=1.0))


def test_padded_features_of_a_linear_are_hidden_features() -> None:
    torch.manual_seed(0)
    model, x = Layers(Constant(), Constant()).double().eval(), torch.randn(2, T, D, dtype=torch.float64)
    peftc.compile("peft 1  edit e at layer[*].ffn.hidden { h *= vector(init=1) }", model, seed=0, sample={"x": x})
    factors = [nn.init.normal_(p).detach() for p in peftc.parameters(model).values()]
    edited = model(x)
    assert peftc.fold(model).folded
    torch.testing.assert_close(model(x), edited, rtol=0, atol=1e-10)
    torch.manual_seed(0)
    base = Layers(Constant(), Constant()).double().eval()
    for layer, factor in zip(base.layers, factors, strict=True):
        assert factor.shape == (19,)
        layer.down.register_forward_pre_hook(lambda _, args, v=factor: args[0] * v)  # pyright: ignore
    torch.testing.assert_close(edited, base(x), rtol=0, atol=1e-10)
