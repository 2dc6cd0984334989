"""Types of PEFT that decompose the weights of the base, and train a part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import PREFIX, damaged
from peftc.exchange.peft_format.types import Files, NoConfig, Numbers, OfBase, PeftRow, PeftType, Size, Tensors
from peftc.semantics.recipes import form_text

_TINYLORA = form_text("tinylora")

_OSF = form_text("osf")

_PSOFT = form_text("psoft")

_FROD = form_text("frod")

# TinyLoRA

_V = "base_model.tinylora_v."


def _tinylora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.whole("r", 2)  # the tensors tell: a weight may be smaller
    config.number("weight_tying", 0.0)
    config.number("projection_seed", 42)
    config.read("save_projection", True)
    return {"r": len(tensors["tinylora_A"]), "u": config.whole("u", 64)}


def _unpack_tinylora(config: PeftConfig, tensors: Files, model: nn.Module) -> dict[str, Tensor]:
    """The vector of each module, which is that of a group of them, and its random matrices."""
    own = {key: tensor for key, tensor in tensors.items() if not key.startswith(_V)}
    names = [name for name, _ in model.named_modules() if f"{PREFIX}{name}.tinylora_A" in own]
    groups = _groups(len(names), config.number("weight_tying", 0.0))
    seed = int(config.number("projection_seed", 42))
    for number, (name, group) in enumerate(zip(names, groups, strict=True)):
        if not isinstance(model.get_submodule(name), nn.Linear) and isinstance(model.get_submodule(name), nn.Embedding):
            raise refusal("target_modules", name, "peftc has no TinyLoRA of an embedding")
        vector, a = tensors.get(f"{_V}{group}"), own[f"{PREFIX}{name}.tinylora_A"]
        if vector is None:
            raise damaged(f"the adapter has no tensor `{_V}{group}`")
        is_shared = groups.count(group) > 1
        own[f"{PREFIX}{name}.tinylora_{'shared_' if is_shared else ''}v"] = vector
        if f"{PREFIX}{name}.tinylora_P" not in own:  # drawn again
            size, generator = (len(vector), len(a), len(a)), torch.Generator().manual_seed(seed + number)
            own[f"{PREFIX}{name}.tinylora_P"] = torch.normal(0.0, len(a) ** -0.5, size, generator=generator).to(a.dtype)
    return own


def _groups(modules: int, tying: float) -> list[int]:
    """The number of the vector of each module."""
    count = max(1, round(modules * (1 - tying)))
    return [min(i // max(1, modules // count), count - 1) for i in range(modules)]


def _pack_tinylora(config: dict[str, Any], tensors: Files, modules: Sequence[str]) -> dict[str, Tensor]:
    """Raises: NoConfig where no `weight_tying` gives the modules their vectors."""
    names = [name for name in modules if f"{PREFIX}{name}.tinylora_A" in tensors]
    vectors = [
        next(tensors[key] for end in ("v", "shared_v") if (key := f"{PREFIX}{name}.tinylora_{end}") in tensors)
        for name in names
    ]
    numbers = list(dict.fromkeys(vector.data_ptr() for vector in vectors))
    groups = [numbers.index(vector.data_ptr()) for vector in vectors]
    config["weight_tying"] = 1 - len(numbers) / len(names)
    if groups != _groups(len(names), config["weight_tying"]):
        raise NoConfig("PEFT ties the vectors of modules that follow each other, and these are others")
    ends = (".tinylora_A", ".tinylora_B", ".tinylora_P")
    own = {key: tensor for key, tensor in tensors.items() if key.endswith(ends)}
    return own | {f"{_V}{group}": vector for group, vector in zip(groups, vectors, strict=True)}


def _tinylora_config(args: Mapping[str, Any]) -> dict[str, Any]:
    keys = {"r": args["r"], "u": args["u"], "save_projection": True}
    return {**keys, "tinylora_dropout": 0.0, "bias": "none"}


# OSF


def _osf(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    for key in ("effective_rank", "rank_pattern"):  # the tensors tell
        config.read(key, None)
    rows, low = tensors["osf_svd_params.U_low"].shape
    return {"high": min(rows, tensors["osf_svd_params.V_low"].shape[1]) - low}


def _svd(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As PEFT does, in float32."""
    return torch.linalg.svd(weight.float(), full_matrices=False)


def _osf_of_base(config: PeftConfig, tensors: Tensors, of_base: OfBase) -> dict[str, Tensor]:
    """The first values, and the singular vectors that stay as they are."""
    weight = of_base("weight")
    u, s, v = (part.to(weight.dtype) for part in _svd(weight))
    r, (rows, columns) = len(s) - len(tensors["osf_svd_params.S_low"]), weight.shape
    own = {"osf.U_initial": u[:, r:], "osf.s_initial": s[r:], "osf.V_initial": v[r:]}
    own |= {"osf.high_u": u[:, :r]} if rows > columns else {}
    return own | ({"osf.high_v": v[:r]} if rows < columns else {})


def _osf_settle(numbers: Mapping[str, dict[str, Any]], tensors: Mapping[str, Tensors]) -> dict[str, Any]:
    """PEFT takes the first pattern that fits anywhere in a name."""
    ranks = {module: own["r"] for module, own in numbers.items()}
    return {"effective_rank": 1, "rank_pattern": {f"^{module.replace('.', '[.]')}$": r for module, r in ranks.items()}}


# PSOFT

_PSOFT_TENSORS = {"weight": "q", "vector_b": "left", "vector_a": "right"}


def _psoft(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    for key in ("psoft_alpha", "psoft_svd", "psoft_svd_lowrank_niter", "random_seed", "psoft_mag_a", "psoft_mag_b"):
        config.read(key, None)  # alpha is a factor of the singular values, and then of the result; the tensors tell
    reason = "peftc has no rotation that is scaled back where its norm is above a number"
    config.one_of("cayley_neumann_eps", (None,), reason)
    rank, terms = config.whole("r", 32), config.whole("num_cayley_neumann_terms", 5)
    series = config.read("use_cayley_neumann", False)
    kind = "free" if not config.read("psoft_orth", True) else "series" if series else "cayley"
    if kind == "series" and terms < 3:
        raise refusal("num_cayley_neumann_terms", terms, "peftc has a series of at least three terms")
    options = f", kind={kind}" if kind != "cayley" else ""
    options += f", terms={max(terms, 4)}" if kind == "series" and terms != 5 else ""  # of three, PEFT has the four
    options += ", left=false" if "psoft_R.vector_b" not in tensors else ""
    options += ", right=false" if "psoft_R.vector_a" not in tensors else ""
    return {"r": rank, "options": options + (", even=true" if _is_even(config) else "")}


def _is_even(config: PeftConfig) -> bool:
    known = ("psoft_init", "pissa_init")
    return config.one_of("ab_svd_init", known, f"PEFT knows {' and '.join(known)}") == "pissa_init"


def _psoft_of_base(config: PeftConfig, tensors: Tensors, of_base: OfBase) -> dict[str, Tensor]:
    rank, weight = config.whole("r", 32), of_base("weight")
    u, s, v = _low_rank_svd(config, weight, rank) if config.read("psoft_svd", "full") == "lowrank" else _svd(weight)
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    a, b = (s.sqrt()[:, None] * v, u * s.sqrt()) if _is_even(config) else (v, u * s)
    return {"psoft.A": a, "psoft.B": b}


def _low_rank_svd(config: PeftConfig, weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """With random numbers of a seed, as PEFT does."""
    rounds = config.whole("psoft_svd_lowrank_niter", 10)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(config.number("random_seed", 0)))
        u, s, v = torch.svd_lowrank(weight.float(), q=rank, niter=rounds)
    return u, s, v.T


def _psoft_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = args["psoft"]
    series = {"use_cayley_neumann": own["kind"] == "series", "num_cayley_neumann_terms": own["terms"]}
    factors = {"psoft_orth": own["kind"] != "free", "psoft_mag_b": own["left"], "psoft_mag_a": own["right"]}
    keys = {"r": own["r"], "psoft_alpha": own["r"], "psoft_svd": "full", "psoft_dropout": 0.0}
    return {**keys, **series, **factors, "ab_svd_init": "pissa_init" if own["even"] else "psoft_init"}


# FRoD


def _frod(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    for key in ("sparse_rate", "projection_prng_key", "regularization_alpha"):  # the file has the result
        config.read(key, None)
    return {"n": len(tensors["frod_lambda_s_values"])}


def _unpack_frod(config: PeftConfig, tensors: Files, model: nn.Module) -> dict[str, Tensor]:
    """V and the places of each module, which are those of its role."""
    reason = "PEFT decomposes the weights of all layers together, and its file does not have the result"
    config.one_of("save_projection", (True,), reason)
    own = {key: tensor for key, tensor in tensors.items() if key.startswith(PREFIX)}
    for key in [key for key in own if key.endswith(".frod_lambda_l")]:
        module = key.removeprefix(PREFIX).removesuffix(".frod_lambda_l")
        for end in ("V", "s_indices"):
            name = f"base_model.frod_{end}.{_role(module)}"
            if name not in tensors:
                raise damaged(f"the adapter has no tensor `{name}`")
            own[f"{PREFIX}{module}.frod_{end}"] = tensors[name]
    return own


def _role(module: str) -> str:
    """PEFT's name for the same modules of all layers."""
    parts = module.split(".")
    if len(parts) == 1 or parts[-2].isdigit():
        return parts[-1]
    role = f"{parts[-2]}_{parts[-1]}"
    return "attention_output" if role == "output_dense" and parts[-3:-2] == ["attention"] else role


def _read_frod(config: PeftConfig, tensors: Tensors, size: Size) -> dict[str, Tensor]:
    rows, columns = tensors["frod_s_indices"]
    named = {"frod.V": tensors["frod_V"], "frod.l": tensors["frod_lambda_l"], "frod.s": tensors["frod_lambda_s_values"]}
    return {**named, "frod.places": rows * size[1] + columns}


def _frod_of_base(config: PeftConfig, tensors: Tensors, of_base: OfBase) -> dict[str, Tensor]:
    """U, as PEFT makes it: the columns of W V⁻ᵀ of length 1, in float32."""
    weight, v = of_base("weight"), tensors["frod_V"].double()
    wide = weight.double()
    try:
        product = torch.linalg.solve(v, wide.T).T
    except RuntimeError:
        product = wide @ torch.linalg.pinv(v, rtol=1e-6).T
    lengths = product.norm(dim=0)
    u = torch.where(lengths > 1e-12, product / lengths.clamp(min=1e-12), 0.0)
    return {"frod.U": u.float().to(weight.dtype)}


TYPES: Mapping[str, PeftType] = {
    "TINYLORA": PeftType(
        tuple(
            PeftRow(
                {**{f"tinylora_{name}": f"tinylora.{name}" for name in "ABP"}, end: "tinylora.v"},
                f"w += tinylora(w, r={{r}}, u={{u}}{option})",
                _TINYLORA,
                config=lambda args: _tinylora_config(args["tinylora"]),
                shared=(end,) if option else (),
            )
            for end, option in (("tinylora_v", ""), ("tinylora_shared_v", ", tied=true"))
        ),
        _tinylora,
        ("init_v_bound", "tinylora_dropout"),
        has_transposition=True,
        dimensions=3,
        unpack=_unpack_tinylora,
        pack=_pack_tinylora,
    ),
    "OSF": PeftType(
        (
            PeftRow(
                {f"osf_svd_params.{end}_low": f"osf.{name}" for end, name in (("U", "U"), ("S", "s"), ("V", "V"))},
                "w = osf(w, r={high})",
                _OSF,
                config=lambda args: {"r": args["osf"]["r"]},
                linear_alone=True,
                computed=("osf.high_u", "osf.high_v"),
                of_base=_osf_of_base,
            ),
        ),
        _osf,
        ("target_svd_config",),
        settle=_osf_settle,
    ),
    "PSOFT": PeftType(
        tuple(
            PeftRow(
                {f"psoft_R.{end}": f"psoft.{_PSOFT_TENSORS[end]}" for end in ("weight", *ends)},
                "w = psoft(w, r={r}{options})",
                _PSOFT,
                config=_psoft_config,
                linear_alone=True,
                computed=("psoft.A", "psoft.B"),
                of_base=_psoft_of_base,
            )
            for ends in ((), ("vector_b",), ("vector_a",), ("vector_b", "vector_a"))
        ),
        _psoft,
        ("psoft_dropout",),
    ),
    "FROD": PeftType(
        (
            PeftRow(
                {
                    "frod_lambda_l": "frod.l",
                    "frod_lambda_s_values": "frod.s",
                    "frod_V": "frod.V",
                    "frod_s_indices": "frod.places",
                },
                "w = frod(w, n={n})",
                _FROD,
                read=_read_frod,
                computed=("frod.U",),
                of_base=_frod_of_base,
            ),
        ),
        _frod,
        ("frod_dropout", "progressbar", "runtime_offload_base_weight"),
        unpack=_unpack_frod,
    ),
}
