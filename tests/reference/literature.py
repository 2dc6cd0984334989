"""Methods of the literature on weights, Linears and layers, as code; see `methods.py`.

Frozen tensors (VeRA's A and B, the random matrices of Fastfood) and those shared by the sites of an
edit are among the weights, too, as `<edit>/<edit>.<form>/<form>.<name>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.reference import forms
from tests.reference.methods import Method, Weights, at_sublayers, linears, sublayers
from tests.reference.reference import Reference, part
from tests.reference.table import Attention, Layer


def whole(weights: Weights, edit: str, path: str, form: str) -> dict[str, Tensor]:
    """The tensors of a form at a site, and those it shares with other sites."""
    common = f"{edit}/{edit}.{form}/{form}."
    return part(weights, edit, path, form) | {k.removeprefix(common): v for k, v in weights.items() if common in k}


def krona(edit: str, roles: str, s: float = 1.0) -> Method:
    """h ← h + s (A ⊗ B) x."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "kron")
            ref.linear(rows, lambda h, x, w=w: h + forms.kron(w, x, s))

    return apply


def krona_res_linear(edit: str, roles: str) -> Method:
    """h ← h + (A ⊗ B) x + s x, for Linears with as many outputs as inputs."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w, s = part(weights, edit, path, "kron"), part(weights, edit, path, "scalar")["scale"]
            ref.linear(rows, lambda h, x, w=w, s=s: h + forms.kron(w, x, 1.0) + s * x)

    return apply


def krona_res(edit: str) -> Method:
    """h ← h + (A ⊗ B) x + s x of the ffns (KronA^B_res)."""
    return at_sublayers(
        edit, "ffn", lambda at, w: at.h + forms.kron(w("kron"), at.x, 1.0) + w("scalar")["scale"] * at.x
    )


def loha(edit: str, roles: str, alpha: float) -> Method:
    """w ← w + (α/r) (B A) ⊙ (D C)."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "hadamard")
            ref.weight(rows, lambda base, w=w: base + forms.hadamard(w, alpha))

    return apply


def glora(edit: str, roles: str, bias: bool = True) -> Method:
    """w ← w + w A + B; b ← b + b ⊙ d + e + w c."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            inner, outer = part(weights, edit, path, "product"), part(weights, edit, path, "lowrank")
            w, b = ref.w(rows)
            if bias:
                assert b is not None
                d, e = (part(weights, edit, path, form)["scale"] for form in ("vector", "vector_2"))
                b = b + b * d + e + w @ part(weights, edit, path, "image")["c"]
            w = w + forms.product(inner, w) + forms.lowrank(outer, float(len(outer["A"])))
            ref.linear(rows, lambda h, x, w=w, b=b: linear(x, w, b))

    return apply


def bias_after_weight(edit: str, roles: str) -> Method:
    """w ← w + B A, then b ← b + w c with the new w."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            low, (w, b) = part(weights, edit, path, "lowrank"), ref.w(rows)
            assert b is not None
            w = w + forms.lowrank(low, float(len(low["A"])))
            b = b + w @ part(weights, edit, path, "image")["c"]
            ref.linear(rows, lambda h, x, w=w, b=b: linear(x, w, b))

    return apply


def oft(edit: str, roles: str, block: int, neumann: int | None = None) -> Method:
    """w ← w Rᵀ, R = diag(R_1, …) orthogonal."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "orthogonal")
            ref.weight(rows, lambda base, w=w: forms.orthogonal(w, base, block, neumann))

    return apply


def vera(edit: str, roles: str) -> Method:
    """h ← h + b ⊙ B (d ⊙ A x)."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = whole(weights, edit, path, "vera")
            ref.linear(rows, lambda h, x, w=w: h + forms.vera(w, x))

    return apply


def intrinsic_said(edit: str, roles: str, scaled: bool = False) -> Method:
    """SAID: w ← w + s P θ, s = 1, or if `scaled` one trained number for each weight."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = ref.w(rows)[0]
            change = forms.fastfood(whole(weights, edit, path, "fastfood"), tuple(w.shape))
            if scaled:
                change = part(weights, edit, path, "scalar")["scale"] * change
            ref.weight(rows, lambda base, change=change: base + change)

    return apply


def adalora(edit: str, roles: str, alpha: float) -> Method:
    """h ← h + (α/r) P (λ ⊙ Q x)."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "svd")
            ref.linear(rows, lambda h, x, w=w: h + forms.svd(w, x, alpha))

    return apply


def compacter(edit: str, which: str, act: str) -> Method:
    """h ← h + f(h), f a bottleneck whose weights are sums of Kronecker products."""

    def apply(ref: Reference, weights: Weights) -> None:
        for site in sublayers(ref, which):
            w = whole(weights, edit, site.path, "phm")
            ref.h(site, lambda at, w=w: at.h + forms.phm(w, at.h, act))

    return apply


def compacter_after(edit: str, which: str, act: str, norm: bool) -> Method:
    """h ← h + f(z), z = h + res or, with `norm`, its norm: AdapterHub's Compacter++."""

    def apply(ref: Reference, weights: Weights) -> None:
        for site in sublayers(ref, which):
            w = whole(weights, edit, site.path, "phm")
            ref.h(
                site,
                lambda at, w=w: at.h + forms.phm(w, at.norm(at.h + at.res) if norm else at.h + at.res, act),
            )

    return apply


def reft(
    edit: str, orthogonal: bool = True, subtract: bool = True, first: int | None = None, last: int | None = None
) -> Method:
    """h ← h + Rᵀ (W h + b − R h) of whole layers; with `first` or `last`, only at that many tokens
    of either end.
    """

    def apply(ref: Reference, weights: Weights) -> None:
        masks: dict[str, Tensor | None] = {}

        def remember(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            masks["encoder"] = masks["decoder"] = kwargs.get("attention_mask")
            if ref.model.config.is_encoder_decoder:
                masks["decoder"] = None

        ref.model.register_forward_pre_hook(remember, with_kwargs=True)
        for layer in ref.layers:
            w = part(weights, edit, layer.path, "reft")

            def edit_of(h: Tensor, _: Tensor, w: dict[str, Tensor] = w, stack: str = layer.stack) -> Tensor:
                f = forms.reft(w, h, orthogonal, subtract)
                return h + (f if first is last is None else f * ends(h, masks[stack], first or 0, last or 0))

            ref.output(layer.module, edit_of)

    return apply


def ladder(
    edit: str,
    act: str = "relu",
    temperature: float = 1.0,
    *,
    start: bool = False,
    replace: bool = False,
    on: str = "every",
) -> Method:
    """A side network for each stack, or for the stack `on` only, reads h of every layer and is
    added to the last h or replaces it. `start`: it starts from the input of the first layer.
    """

    def apply(ref: Reference, weights: Weights) -> None:
        states = dict[str, Tensor]()
        last = {layer.stack: layer.index for layer in ref.layers}
        for layer in ref.layers:
            if on == "output" and layer.stack == "encoder" and "decoder" in last:
                continue
            w = part(weights, edit, layer.path, "ladder")
            end = part(weights, edit, f"{edit}.ladder.{layer.stack}", "ladder")

            def change(h: Tensor, x: Tensor, at: Layer = layer, w: Weights = w, end: Weights = end) -> Tensor:
                first = forms.ladder_start(end, x) if start else None
                states[at.stack] = forms.rung(w, h, states[at.stack] if at.index else first, act, temperature)
                if at.index < last[at.stack]:
                    return h
                side = forms.ladder_end(end, states[at.stack])
                return side if replace else h + side

            ref.output(layer.module, change)

    return apply


def layer_attention(edit: str) -> Method:
    """The last state of each stack becomes a weighted mean of the states of all its layers."""

    def apply(ref: Reference, weights: Weights) -> None:
        states = dict[str, list[Tensor]]()
        last = {layer.stack: layer.index for layer in ref.layers}
        for layer in ref.layers:
            w = part(weights, edit, f"{edit}.layer_attention.{layer.stack}", "layer_attention")

            def change(h: Tensor, x: Tensor, at: Layer = layer, w: Weights = w) -> Tensor:
                states[at.stack] = [*(states[at.stack] if at.index else []), h]
                return forms.layer_attention(w, states[at.stack]) if at.index == last[at.stack] else h

            ref.output(layer.module, change)

    return apply


Addition = Callable[[Callable[[Tensor], Tensor]], None]


def places_of(ref: Reference, which: str) -> Iterable[tuple[str, Addition]]:
    """Sub-layers, or `hidden`, the input of `down`, in model order: the path, and the reference's
    method for h.
    """
    for layer in ref.layers:
        for site in (*layer.attentions, layer.ffn):
            if site in tuple(sublayers(ref, which)):
                yield site.path, lambda f, site=site: ref.h(site, lambda at: at.h + f(at.h))
        if "hidden" in which.split():
            yield f"{layer.ffn.path}.hidden", lambda f, down=layer.ffn.down: ref.input(down, lambda z: z + f(z))


def hyper(edit: str, which: str, act: str = "relu", nets: str = "one") -> Method:
    """h ← h + f(h), f an adapter whose weights come from one hypernetwork, from one for each place
    in a layer, or from one for each stack.
    """

    def apply(ref: Reference, weights: Weights) -> None:
        places = list(places_of(ref, which))
        split = [(head, tail) for head, _, tail in (path.partition("].") for path, _ in places)]
        layers = list(dict.fromkeys(head for head, _ in split))
        stacks = list(dict.fromkeys(head.partition(".")[0] for head in layers))
        head = f"{edit}/{edit}.hyper"  # of all tasks, and of the one task
        common = {name.rpartition("/hyper.")[2]: value for name, value in weights.items() if name.startswith(head)}
        for (_, add), (layer, place) in zip(places, split, strict=True):
            stack = layer.partition(".")[0]
            alike = [tail for head, tail in split if nets != "stacks" or head.startswith(stack)]
            position = list(dict.fromkeys(alike)).index(place)
            net = {"one": 0, "positions": position, "stacks": stacks.index(stack)}[nets]
            w = forms.hyper_of_stack(common, net) if nets == "stacks" else common
            at = layers.index(layer), position, net
            add(lambda h, w=w, at=at: forms.hyper(w, h, *at, act))

    return apply


def mixture(edit: str, act: str, routes: Mapping[str, int] | None = None) -> Method:
    """h ← h + act(h W_i + b_i) W_up + b_up at the ffns, i by the site's path; without routes W and
    b are the means.
    """

    def apply(ref: Reference, weights: Weights) -> None:
        for ffn in ref.ffns:
            w = part(weights, edit, ffn.path, "mixture")
            if routes is not None:
                w |= {name: w[name][routes[ffn.path]][None] for name in ("down", "down_bias")}
            ref.h(ffn, lambda at, w=w: at.h + forms.mixture(w, at.h, act))

    return apply


def adaptive_prefix(edit: str, which: str = "attn") -> Method:
    """K ← [λ g ⊙ P_k; K], V ← [λ g ⊙ P_v; V], g of each row from the input of the attention."""

    def apply(ref: Reference, weights: Weights) -> None:
        for site in sublayers(ref, which):
            assert isinstance(site, Attention)
            w, g, s = (part(weights, edit, site.path, form) for form in ("prefix", "gate", "scalar"))
            hidden_states: list[Tensor] = []
            ref.input(site.q, lambda x, states=hidden_states: states.append(x) or x)

            def rows(
                w: Weights = w, g: Weights = g, s: Weights = s, states: list[Tensor] = hidden_states
            ) -> tuple[Tensor, Tensor]:
                by = s["scale"] * forms.gate(g, states[-1])[:, None]
                key, value = forms.prefix(w)
                return by * key, by * value

            ref.prefix(site, rows)

    return apply


def ends(h: Tensor, mask: Tensor | None, first: int, last: int) -> Tensor:
    """1 at the first and last tokens of each row, 0 elsewhere: (batch, tokens, 1)."""
    ends_mask = torch.zeros(*h.shape[:2], 1, dtype=h.dtype)
    for row, attended in zip(ends_mask, torch.ones(h.shape[:2]) if mask is None else mask, strict=True):
        tokens = attended.nonzero().flatten().tolist()
        row[[*tokens[:first], *(tokens[-last:] if last else [])]] = 1
    return ends_mask


def gammas(edit: str, which: str) -> Method:
    """h ← γ h, γ one number for each sub-layer (DiffFit)."""
    return at_sublayers(edit, which, lambda at, w: at.h * w("scalar")["scale"])


def unfrozen(*edits: str) -> Method:
    """Parameters of the model itself: `<edit>/<dotted name>`."""

    def apply(ref: Reference, weights: Weights) -> None:
        for key, value in weights.items():
            edit, _, name = key.partition("/")
            if edit in edits:
                owner, _, last = name.rpartition(".")
                module = ref.model.get_submodule(owner)
                del module._parameters[last]
                setattr(module, last, value)

    return apply
