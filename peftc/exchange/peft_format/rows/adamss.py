"""AdaMSS of PEFT: products of low rank, each for a cluster of the rows of a weight."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.folder import PREFIX, damaged
from peftc.exchange.peft_format.types import Files, Numbers, OfBase, PeftRow, PeftType, Tensors
from peftc.exchange.spec_text import unfit

_ADAMSS = """
# Clusters of the rows of a weight change by products of low rank, of which all read the same r directions.
# AdaMSS, as in PEFT, where these are singular vectors, and the places of B are those of each cluster
form adamss(
    x,
    r,  # directions
    ranks,  # those of all products together
    n,  # entries of B that are trained
    shift = false,  # the bias is a column of the weight
) {
    param A[ranks, r] = orthogonal
    param B[n] = 0
    param C[r, d(x)] = orthogonal
    param c[r] = 0 if shift
    fixed places[n] = choice(d(out) * ranks)
    let z = frozen(C) @ x + frozen(c) if shift
    let z = frozen(C) @ x if shift == false
    f = reshape(scatter(B, places, d(out) * ranks), d(out), ranks) @ A @ z
}
"""

_TRAINING = (  # how subspaces are given up
    *("use_asa", "asa_target_subspaces", "init_warmup", "final_warmup", "mask_interval", "asa_importance_beta"),
    *("asa_uncertainty_beta", "asa_schedule_exponent"),
)
_ROUNDS, _SEED = 10, 123456789  # of the clustering


def _numbers(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    for key in ("r", "subspace_rank", "use_dynamic_rank", "svd_threshold"):  # the tensors tell
        config.read(key, None)
    config.whole("num_subspaces", 5)
    config.number("random_seed", 0)
    (ranks, rank), n = tensors["adamss_A"].shape, len(tensors["adamss_B"])
    return {"rank": rank, "ranks": ranks, "n": n, "options": ", shift=true" if "adamss_shift" in tensors else ""}


def _unpack(config: PeftConfig, tensors: Files, model: nn.Module) -> dict[str, Tensor]:
    """A, and B with its places: the number of the cluster, of its row, and of the column."""
    own, parts = dict[str, Tensor](), defaultdict[str, dict[int, Tensor]](dict)
    for key, tensor in tensors.items():
        name, _, number = key.rpartition(".")
        if name.endswith((".adamss_A", ".adamss_B")) and number.isdecimal() and tensor.ndim == 2:
            parts[name][int(number)] = tensor
        else:
            own[key] = tensor
    for name in [name for name in parts if name.endswith("_A")]:
        module = name.removesuffix(".adamss_A")
        a, b = (list(dict(sorted(parts[f"{module}.adamss_{end}"].items())).values()) for end in "AB")
        weight = own.pop(f"{module}.adamss_newB", None)
        if (
            weight is None
            or len(a) != len(b)
            or any(one.shape[0] != two.shape[1] for one, two in zip(a, b, strict=True))
        ):
            raise damaged(f"the matrices of `{module}` do not fit together")
        own |= {f"{module}.adamss_A": torch.cat(a), f"{module}.adamss_B": torch.cat([one.flatten() for one in b])}
        own |= {f"{module}.adamss_places": _places(b), **_parts(module, weight, model)}
    return own


def _places(matrices: list[Tensor]) -> Tensor:
    places, first = list[Tensor](), 0
    for cluster, matrix in enumerate(matrices):
        rows, columns = (grid.flatten() for grid in torch.meshgrid(*map(torch.arange, matrix.shape), indexing="ij"))
        places.append(torch.stack([torch.full_like(rows, cluster), rows, columns + first]))
        first += matrix.shape[1]
    return torch.cat(places, 1)


def _parts(module: str, weight: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The directions, without the column of the bias."""
    owner = dict(model.named_modules()).get(module.removeprefix(PREFIX))
    has_bias = getattr(owner, "bias", None) is not None
    if not isinstance(owner, nn.Linear) or weight.shape[-1] != owner.in_features + has_bias:
        raise unfit(f"`{module}` has directions of {weight.shape[-1]} features, and the base has no such Linear")
    own = {f"{module}.adamss_newB": weight[:, : owner.in_features]}
    return own if not has_bias else {**own, f"{module}.adamss_shift": weight[:, -1]}


def _of_base(config: PeftConfig, tensors: Tensors, of_base: OfBase) -> dict[str, Tensor]:
    """The places of B, of the rows in each cluster. Raises: P802 without scikit-learn, P804."""
    weight, (q, rank) = of_base("weight").float(), tensors["adamss_A"].shape
    if "adamss_shift" in tensors:
        weight = torch.cat([weight, of_base("bias").float()[:, None]], 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(config.number("random_seed", 0)))
        directions = torch.svd_lowrank(weight, q=rank, niter=2)[0]
    labels = _clusters(directions, min(config.whole("num_subspaces", 5), len(weight)))
    clusters, rows, columns = tensors["adamss_places"]
    order = torch.empty_like(rows)
    for cluster in range(int(clusters.max()) + 1):
        members, own = (labels == cluster).nonzero().flatten(), clusters == cluster
        if len(members) != int(rows[own].max()) + 1:
            raise unfit("the clusters of rows are others than when the adapter was made")
        order[own] = members[rows[own]]
    return {"adamss.places": order * q + columns}


def _clusters(directions: Tensor, count: int) -> Tensor:
    """The number of the cluster of each row, as PEFT finds it."""
    try:
        k_means: Any = import_module("sklearn.cluster").KMeans
    except ImportError as error:
        message = (
            "the files of ADAMSS do not have the clusters of rows, and scikit-learn, which finds them, is not here"
        )
        raise PeftcError(Diagnostic("P802", message, help="pip install scikit-learn")) from error
    model = k_means(n_clusters=count, init="random", n_init=1, max_iter=_ROUNDS, random_state=_SEED)
    return torch.from_numpy(model.fit_predict(directions.numpy())).long()


_ROW = {
    f"adamss_{end}": f"adamss.{name}" for end, name in (("A", "A"), ("B", "B"), ("newB", "C"), ("places", "places"))
}

ADAMSS = PeftType(
    tuple(
        PeftRow(
            {**_ROW, **shift},
            "h += adamss(x, r={rank}, ranks={ranks}, n={n}{options})",
            _ADAMSS,
            computed=("adamss.places",),
            of_base=_of_base,
        )
        for shift in ({}, {"adamss_shift": "adamss.c"})
    ),
    _numbers,
    _TRAINING,
    unpack=_unpack,
)
