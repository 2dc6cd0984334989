"""Forms with arguments and shapes: the cases that the laws of forms run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from torch import Tensor

from peftc.equation_code.buffer_module import BufferModule
from peftc.equations.table import FORMS
from peftc.forms import Args, Dims, Form
from peftc.forms.form import Spot
from peftc.forms.member_module import Member
from peftc.forms.module import FormModule, build, build_of_all, build_owner
from peftc.forms.shapes import Heads, KeyValue, Rows, Scalar, Shape, Tokens, Vector, Weight

BATCH, TOKENS = 3, 5


@dataclass(frozen=True)
class Case:
    name: str
    target: Shape
    input: Shape | None = None
    values: Args = field(default_factory=dict)
    d_model: int = 12
    sites: int = 1

    @property
    def form(self) -> Form:
        return FORMS[self.name]

    @property
    def args(self) -> Args:
        return self.form.fill(self.values)

    @property
    def dims(self) -> Dims:
        spots = tuple(Spot(f"encoder.layer[{i}]", ("attn", "ffn")[i % 2], 12, 12) for i in range(self.sites))
        return Dims(
            self.input, self.target, self.d_model, self.sites, spots=spots, index=self.sites - 1, depth=self.sites
        )

    @property
    def grouped(self) -> bool:
        """Whether its sites have all parameters in common."""
        return self.form.common(self.args) is not None and not self.form.has_common_part

    @property
    def in_part(self) -> bool:
        """Whether its sites have some parameters in common."""
        return self.form.common(self.args) is not None and not self.grouped

    def __str__(self) -> str:
        arguments = ",".join(f"{k}={v}" for k, v in self.values.items())
        return f"{self.name}({arguments}):{self.input}->{self.target}".replace(" ", "")

    def like(self, dtype: torch.dtype = torch.float64, batch: int = BATCH) -> Tensor:
        """An input for the module."""
        shape = self.input or (Rows(2, 4) if isinstance(self.target, KeyValue) else self.target)
        return torch.randn(size(shape, batch), generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(
            dtype
        )


def size(shape: Shape, batch: int = BATCH) -> tuple[int, ...]:
    match shape:
        case Scalar(per_example):
            return (batch, 1, 1) if per_example else (1,)
        case Tokens(d):
            return (batch, TOKENS, d)
        case Heads(heads, d_head):
            return (batch, TOKENS, heads, d_head)
        case Rows(heads, d_head) | KeyValue(heads, d_head):
            return (batch, heads, TOKENS, d_head)
        case Weight(d_out, d_in):
            return (d_out, d_in)
        case Vector(d):
            return (d,)


T12, T8, H, R, W = Tokens(12), Tokens(8), Heads(3, 4), Rows(3, 4), Weight(6, 10)
MLP = ("mlp", 7)

CASES = (
    Case("adapter", T12, T12, {"r": 4}),
    Case("adapter", T8, T12, {"r": 20, "bias": False, "act": "gelu"}),
    Case("adapter", T12, T8, {"reduction": 3, "act": "silu", "init": "houlsby"}),
    Case("adapter", T12, T12, {"r": 4, "init": "lora", "norm_in": True}),
    Case("adapter", T8, T12, {"r": 4, "init": "lora", "norm_in": True, "norm_out": True, "act": "none"}),
    Case("adapter", T8, T12, {"r": 4, "act": "none", "dropout": 0.5}),
    Case("adapter", T8, T8, {"r": 4, "act": "none", "norm_out": True}),
    *(Case("adapter", T12, T12, {"r": 3, "act": act}) for act in ("gelu_tanh", "leaky_relu", "tanh", "sigmoid")),
    Case("bottleneck", H, R, {"r": 5}),
    Case("bottleneck", H, H, {"r": 5, "init": "lora", "act": "silu"}),
    Case("bottleneck", H, R, {"r": 3, "act": "softmax"}),
    Case("bottleneck", R, R, {"r": 2, "act": "none", "dropout": 0.3}),
    Case("coupling", T12, T12, {}),
    Case("coupling", T12, T12, {"act": "gelu", "inverse": True}),
    Case("coupling", Tokens(9), Tokens(9), {"reduction": 1, "act": "none"}),
    Case("coupling", Tokens(9), Tokens(9), {"reduction": 1.5, "act": "none", "inverse": True}),
    Case("lora", T8, T12, {"r": 4}),
    Case("lora", T12, T12, {"r": 12, "alpha": 16, "dropout": 0.1}),
    Case("lora", T12, T8, {"r": 4, "alpha": 3.5, "rslora": True}),
    Case("lowrank", W, None, {"r": 3, "alpha": 16}),
    Case("lowrank", Weight(10, 4), None, {"r": 4, "rslora": True}),
    Case("magnitude", W, W),
    Case("new_tokens", W, W, {"n": 4}),
    Case("prefix", KeyValue(2, 4), None, {"len": 6}),
    Case("prefix", KeyValue(2, 4), None, {"len": 1, "std": 1.0}),
    Case("prefix", KeyValue(2, 4), None, {"len": 6, "reparam": MLP}, sites=3),
    Case("prefix", KeyValue(2, 4), None, {"len": 2, "reparam": MLP, "keep": True}, d_model=5, sites=4),
    Case("vector", T12),
    Case("vector", H, None, {"init": 0.5}),
    Case("vector", R, None, {"init": 0}),
    Case("vector", Vector(9)),
    Case("scalar", T12, None, {"init": 4}),
    Case("kron", T12, T12, {}),
    Case("kron", T8, T12, {"rows": 2, "columns": 3, "r": 2, "alpha": 6, "dropout": 0.2}),
    Case("hadamard", W, None, {"r": 2, "alpha": 16}),
    Case("product", W, W, {"r": 3}),
    Case("image", Vector(6), W),
    Case("orthogonal", W, W, {"block": 5}),
    Case("orthogonal", W, W, {"block": 2, "neumann": 5}),
    Case("vera", T8, T12, {"r": 5}, sites=2),
    Case("vera", T8, T12, {"r": 20}, sites=2),
    Case("fastfood", W, None, {"d": 7}, sites=2),
    Case("fastfood", Vector(3), None, {"d": 9, "seed": 1}, sites=2),
    Case("linear", T8, T12),
    Case("linear", T12, T12, {"bias": False, "dropout": 0.1}),
    Case("mixture", T8, T12, {"r": 4, "n": 3}),
    Case("mixture", T12, T12, {"reduction": 3, "n": 2, "share": "up", "act": "gelu", "init": "lora", "keep": True}),
    Case("mixture", T12, T12, {"r": 2, "n": 2, "share": "down", "act": "none", "bias": False, "dropout": 0.2}),
    Case("sparse", W, None, {"density": 0.2, "select": "random"}),
    Case("sparse", Vector(9), None, {"density": 0.5, "select": "random", "seed": 3}),
    Case("lines", W, None, {"density": 0.4, "select": "random"}),
    Case("lines", W, None, {"density": 0.3, "select": "random", "by": "column", "seed": 1}),
    Case("lines", Vector(9), None, {"density": 0.5, "select": "random"}),
    Case("sparse_adapter", T8, T12, {"r": 4, "density": 0.6, "select": "random"}),
    Case(
        "sparse_adapter", T12, T12, {"reduction": 3, "density": 0.5, "select": "random", "act": "none", "bias": False}
    ),
    Case("masked", W, None, {"density": 0.2, "alpha": 0.5, "lower": -0.2, "upper": 1.2}),
    Case("masked", Vector(9), None, {"density": 0.5, "alpha": 0.5, "structured": False, "lower": -0.5, "upper": 1.2}),
    Case("masked", W, None, {"density": 0.2, "alpha": 0.5, "lower": -0.2, "keep": True}),
    Case("svd", T8, T12, {"r": 4, "alpha": 16}),
    Case("svd", T12, T8, {"r": 4, "target": 2, "total": 10, "dropout": 0.1}),
    Case("phm", T12, T12, {"r": 8, "n": 2}, sites=2),
    Case("phm", T8, T12, {"reduction": 3, "n": 4, "shared": False, "act": "none"}),
    Case("phm", T8, T12, {"r": 4, "n": 2, "factorised": False, "bias": False, "act": "gelu", "dropout": 0.2}, sites=2),
    Case("phm", T12, T12, {"r": 4, "n": 2, "rank": 2, "shared": False, "factorised": False}),
    Case("reft", T12, T12, {"r": 3}),
    Case("reft", T12, T12, {"r": 3, "orthogonal": False, "subtract": False}),
    Case("prompt", T12, None, {"len": 4}),
    Case("prompt", T12, None, {"len": 1, "std": 1.0}),
    Case("prompt", T12, None, {"len": 4, "reparam": MLP}),
    Case("prompt", T8, None, {"len": 3, "reparam": MLP, "intrinsic": 2, "keep": True}),
    Case("ladder", T12, T12, {"r": 3}),
    Case(
        "ladder",
        T12,
        T12,
        {"reduction": 4, "expand": 1, "bias": False, "init": "lora", "act": "tanh", "dropout": 0.2},
        sites=2,
    ),
    Case("ladder", T12, T12, {"r": 3, "temperature": 0.1, "replace": True}),
    Case("fusion", T12, T12, {"n": 3, "r": 4}),
    Case("fusion", T12, T12, {"n": 2, "reduction": 3, "act": "gelu", "bias": False, "value": False, "dropout": 0.2}),
    Case("layer_attention", T12, T12, sites=2),
    Case("hyper", T12, T12, {"r": 3, "t": 5, "m": 4}, sites=3),
    Case(
        "hyper",
        T12,
        T12,
        {"reduction": 6, "t": 4, "nets": "positions", "norm": False, "act": "none", "dropout": 0.2},
    ),
    Case("hyper", T12, T12, {"r": 3, "t": 4, "bias": False, "norm": False, "act": "tanh"}, sites=2),
    Case("hyper", T12, T12, {"r": 3, "t": 4, "m": 5, "nets": "stacks", "offset": True}, sites=3),
    Case("gate", T12, T12),
    Case("gate", KeyValue(2, 4), T12, {"rows": 4}),
    Case("gate", H, T8),
)


def seeded(name: str) -> torch.Generator:
    """A generator that depends on the parameter's name alone."""
    return torch.Generator().manual_seed(int.from_bytes(sha256(name.encode()).digest()[:4], "big"))


def base(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"w": case.like(dtype)} if isinstance(case.target, Weight) else {}


def owner(case: Case, dtype: torch.dtype = torch.float64) -> FormModule:
    """Uninitialised, with all parameters of the case."""
    return build_owner(case, dtype=dtype) if case.grouped else build(case, dtype=dtype)


def initialised(case: Case, dtype: torch.dtype = torch.float64) -> FormModule:
    """Initialised, ready to be called at one site (the last of a group)."""
    module = owner(case, dtype)
    module.initialise(seeded, base(case, dtype))
    module.fix("a")
    if isinstance(module, BufferModule):
        fill(module)
    if case.in_part:
        common = build_owner(case, dtype=dtype)
        common.initialise(seeded, base(case, dtype))
        common.fix("")
        module.join(common, case.sites - 1)
        if case.form.tasks_module:
            everywhere = build_of_all(case, dtype=dtype)
            everywhere.initialise(seeded, base(case, dtype))
            common.join(everywhere, 0)
    return Member(module, case.sites - 1) if case.grouped else module


def fill(module: BufferModule) -> None:
    """Gives a fusion its adapters."""
    for name in module.adapter():
        buffer = module.get_buffer(name)
        buffer.copy_(torch.randn(buffer.shape, generator=seeded(name)))
    module.get_buffer("filled").fill_(True)


def parameters(module: FormModule) -> dict[str, Tensor]:
    """Its own parameters, and those it shares with others."""
    common = module.owner_module
    own = dict(module.named_parameters())
    return own if common is None else own | parameters(common)


def buffers(module: FormModule) -> dict[str, Tensor]:
    """Its buffers, and those it shares with others."""
    common = module.owner_module
    return dict(module.named_buffers()) | ({} if common is None else dict(common.named_buffers()))


def shaken(case: Case, dtype: torch.dtype = torch.float64) -> FormModule:
    """As after training: every parameter is perturbed."""
    module = initialised(case, dtype)
    with torch.no_grad():
        for name, parameter in parameters(module).items():
            parameter.add_(torch.randn(parameter.shape, generator=seeded(name + "!")).to(dtype))
    return module.eval()


def alone(case: Case) -> bool:
    """Whether a form does anything at a single site: a mixture of one layer is its state."""
    return case.name != "layer_attention"


def every(keep: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    return [case for case in CASES if keep(case)]
