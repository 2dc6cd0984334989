"""P2xx and P3xx that need a model: what a selector names there, and whether the equations fit."""

from __future__ import annotations

from peftc.diagnostics.code_info import CodeInfo

PLAN: dict[str, CodeInfo] = {
    "P201": CodeInfo(
        "selector that matches nothing",
        "Every arm of a selector (each side of `|` and `-`, each pattern) must name at least one site of the model: an arm that "
        "names nothing is a misspelling or is meant for another model, and would be lost without a word. `peftc sites --model M` "
        "prints what there is.",
    ),
    "P202": CodeInfo(
        "index that does not exist",
        "`layer[99]` of a model with 12 layers, a range with an end that no stack has, a range that ends before it starts, or an "
        "index on a step that is not numbered. Layers count from 0, negative numbers from the end, and both ends of a range are "
        "included.",
    ),
    "P203": CodeInfo(
        "difference without effect",
        "The right side of `-` takes away none of the sites on the left, or all of them. One of the two sides is not what was meant.",
    ),
    "P204": CodeInfo(
        "uneven coverage",
        "A warning: some of the layers that the selector asks for have no such site (grouped or shared keys and values, layers "
        "without attention), a range goes past the end of one stack, or no site has a state that `train` names.",
    ),
    "P214": CodeInfo(
        "what may be in a module that could not be read",
        "Roles are read off a layer's code. Code that decides on the values of tensors, or that calls what cannot be traced, "
        "leaves a module of which nothing is known but what it is called with. If a selector asks for what may be in it, such as "
        "`layer[*].attn.q` beside an attention that was not read, an edit would act on some of the layer's attentions and not on "
        "others. Name the modules by a pattern in quotes, or ask for a part that was read, such as `attn.cross`. "
        "`peftc sites --model M` lists what could not be read, and why.",
    ),
    "P215": CodeInfo(
        "module that could not be read",
        "A warning: a layer that the selector reaches has modules whose code could not be followed. Nothing in them has a name, "
        "and the spec asks for nothing that may be in them. They can be named by a pattern in quotes.",
    ),
    "P211": CodeInfo(
        "part of a shared module",
        "Layers may have a part in common: one module under several names (`layers[1].mlp = layers[0].mlp`). What is done to it in one "
        "layer is done in all, so a selector names all of its sites or none. Named together they have one set of parameters, "
        "counted and saved once, which acts at each use. Modules of their own may have one parameter (`b.weight = a.weight`): `train` "
        "names all of its uses in layers. Uses outside of the layers, such as a head's that is tied to the embedding, need not be named.",
    ),
    "P212": CodeInfo(
        "parameters over the same memory",
        "Two parameters of the model are views of one storage, with entries in common. A step of training would write both and "
        "know the gradient of one alone. Make them one parameter (`b.weight = a.weight`), whose gradient is that of all its uses, "
        "and name all of these that are in layers (P211). "
        "The same holds for entries of one parameter in the same place, as `expand` makes them.",
    ),
    "P301": CodeInfo(
        "shapes that do not go together",
        "Every expression has a shape: hidden states [batch, tokens, d], heads, keys and values, weights [out, in], vectors and "
        "scalars. A scalar goes with anything, a vector [d] with hidden states of width d, all else with its own shape only; the "
        "value of an equation has the shape of the state that it writes.",
    ),
    "P303": CodeInfo(
        "keys and values out of place",
        "Keys and values are changed by `kv = concat(…, kv)`: rows to add, and exactly once `kv` itself. `k` and `v` can be scaled "
        "on their own.",
    ),
    "P304": CodeInfo(
        "expectation that does not hold",
        "`expect` is a budget or a fact that is checked when the spec is planned. The plan is printed, with what was found; nothing "
        "is compiled.",
    ),
    "P305": CodeInfo(
        "shared parameters of two shapes",
        "`let NAME = shared(…)` is one set of parameters. All places that use it must have states of the same width; bind one for "
        "each width.",
    ),
    "P306": CodeInfo(
        "state that cannot be written",
        "`x`, `c` and `res` are what a site reads; they belong to the modules before it. An edit writes what its site computes: "
        "`h`, `q`, `k`, `v`, `kv`, `z`, or the weight `w` and bias `b`.",
    ),
    "P307": CodeInfo(
        "frozen module that the site does not have",
        "`norm(…)` and `head(…)` are the model's own modules, applied where they belong to the site of the edit.",
    ),
    "P309": CodeInfo(
        "part of a parameter",
        "A parameter gets a gradient as a whole, and this site is only some of its rows (the q of a fused query-key-value "
        "projection). Name the whole module by a pattern in quotes, or all of its parts.",
    ),
}
