"""AdapterHub `adapters` 1.3.0 on the zoo; its outputs are in `adapterhub.json`.

The library needs transformers 4.57, so it has to run in an environment of its own, with
`adapters==1.3.0` (which installs `transformers==4.57.6`):

    python -m tests.reference.adapterhub > tests/reference/adapterhub.json

Where AdapterHub differs from the papers:

* Attention is eager: with sdpa and a causal mask its prefixes are wrong.
* T5 has no prefixes: AdapterHub gives their columns a position bias, peftc gives them none.
* T5's softmax is in float32 for every dtype; here it is in float64.
* `compacter++` and the adapter of `unipelt` read norm(h + res) (h + res in pre-norm models), the
  papers' read h. The methods `…-paper` follow the papers.
* A LoRA with a gate lacks the papers' factor α / r: the tests set α = r.
* ReFTs of a decoder count tokens by the encoder's mask: encoder-decoders have first tokens only,
  which are right without left padding.

Gradients are saved as slopes along random directions, see `measured`.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests import zoo
from tests.reference.forms import orthonormal

NAMES: dict[str, dict[str, str]] = {  # form: our name of a tensor -> its name in the module that has the form
    "adapter": {
        "down": "adapter_down.0.weight",
        "down_bias": "adapter_down.0.bias",
        "up": "adapter_up.weight",
        "up_bias": "adapter_up.bias",
    },
    "phm": {
        "down_left": "adapter_down.0.W_left",
        "down_right": "adapter_down.0.W_right",
        "down_bias": "adapter_down.0.b",
        "up_left": "adapter_up.W_left",
        "up_right": "adapter_up.W_right",
        "up_bias": "adapter_up.b",
    },
    "prefix": {
        "embedding": "wte.weight",
        "down": "control_trans.0.weight",
        "down_bias": "control_trans.0.bias",
        "up": "control_trans.2.weight",
        "up_bias": "control_trans.2.bias",
    },
    "lora": {"A": "lora_A", "B": "lora_B"},
    "gate": {"weight": "gate.weight", "bias": "gate.bias"},
    "reft": {"R": "projection.weight", "W": "learned_source.weight", "b": "learned_source.bias"},
}
RULE = "phm_rule"  # A of `phm`
POST = ("bert-base", "bart")
Along = Callable[[str, Tensor], Tensor]
FOUR = (*POST, "t5", "gpt2")
THREE = (*POST, "gpt2")
METHODS: dict[str, tuple[str, ...]] = {  # method: the zoo models it is run on
    "seq_bn": FOUR,
    "double_seq_bn": FOUR,
    "par_bn": FOUR,
    "prefix": THREE,
    "mam": THREE,
    "compacter": FOUR,
    "compacter++": ("bert-base",),
    "compacter++-paper": ("bert-base", "gpt2"),
    "unipelt": ("bert-base",),
    "unipelt-paper": THREE,
    "loreft": ("bert-base", "gpt2"),
    "loreft-first": ("bart", "t5"),
    "loreft-ends": ("bert-base", "gpt2"),
    "noreft": ("gpt2",),
    "direft": ("bert-base",),
}
FUSION = ("bert-base", "gpt2")  # the zoo models on which adapters `a` and `b` are fused
FUSION_NAMES = {  # our names of its tensors; a bias of the keys is the same in all scores, and we have none
    "query": "query.weight",
    "query_bias": "query.bias",
    "key": "key.weight",
    "value": "value.weight",
}
LENGTH, WIDTH, REDUCTION = 3, 5, 8  # of the prefix and its MLP; of mam's adapter
PHM, RANK, REFT = 4, 4, 2  # reduction of compacter's adapter; ranks of unipelt's LoRA and of the ReFTs
FIRST, LAST = 2, 1  # tokens
ALPHA = 2  # of unipelt's LoRA, where it has none
FUSED_BY = "adapter_fusion_layer.a,b."
FUSED = "c_attn.loras.a."  # of q, and then of v


def adapter_module(name: str, stack: str, index: int, slot: str) -> str:
    """AdapterHub's module with the adapter of a sub-layer (`self`, `ffn`)."""
    if name == "bert-base":
        return f"encoder.layer.{index}.{'attention.' if slot == 'self' else ''}output"
    if name == "t5":
        return f"{stack}.block.{index}.layer.{0 if slot == 'self' else {'encoder': 1, 'decoder': 2}[stack]}"
    layer = f"model.{stack}.layers.{index}" if name == "bart" else f"transformer.h.{index}"
    return f"{layer}.{'attention' if slot == 'self' else 'output'}_adapters"


def group_module(name: str, group: str) -> str:
    """AdapterHub's name of our attention group (`encoder.self`)."""
    if name != "bart":
        return "self_prefix"
    return {"encoder.self": "encoder_prefix", "decoder.self": "self_prefix", "decoder.cross": "cross_prefix"}[group]


def draw(label: str, shape: tuple[int, ...]) -> Tensor:
    """The values of a tensor, seeded by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)


def direction(label: str, tensor: Tensor) -> Tensor:
    """The direction for the slope of a tensor."""
    return draw(f"along {label}", tuple(tensor.shape))


def results(model: nn.Module, name: str) -> Iterator[Tensor]:
    """The outputs on unpadded tokens, flat: for inputs without and with a mask."""
    for padding in (None, "right"):
        inputs = zoo.inputs(name, model, padding=padding)
        out = model(**inputs)[0]
        if "attention_mask" in inputs and not model.config.is_encoder_decoder:
            out = out[inputs["attention_mask"].bool()]
        yield out.flatten()


def numbers(flats: Iterable[Tensor], name: str) -> list[float]:
    """Eight projections of the results."""
    return [float(flat.detach() @ draw(f"{name}{i}", tuple(flat.shape))) for flat in flats for i in range(4)]


def measured(
    model: nn.Module, name: str, tensors: Mapping[str, Tensor], along: Along = direction
) -> tuple[list[float], dict[str, float]]:
    """The numbers of a model, and how the first of each four change along a direction of the
    tensors.

    `tensors`: by label. There is one slope for each kind of tensor, Σ ⟨gradient, direction⟩ over
    all that are of it.
    """
    flats = list(results(model, name))
    loss = torch.stack([flat @ draw(f"{name}0", tuple(flat.shape)) for flat in flats]).sum()
    gradients = torch.autograd.grad(loss, list(tensors.values()))
    slopes: dict[str, float] = {}
    for (label, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        slopes[kind(label)] = slopes.get(kind(label), 0.0) + float((gradient * along(label, tensor)).sum())
    return numbers(flats, name), dict(sorted(slopes.items()))


def kind(label: str) -> str:
    """A tensor's name without its layer: `adapter_down.0.weight`."""
    return label.rpartition(FUSED_BY if FUSED_BY in label else ".a.")[2]


def main() -> None:
    import adapters

    prefix = adapters.PrefixTuningConfig(prefix_length=LENGTH, flat=False, bottleneck_size=WIDTH)
    lora = adapters.LoRAConfig(r=RANK, alpha=ALPHA)
    reads_h = adapters.SeqBnConfig(reduction_factor=16, original_ln_before=False)
    everywhere: dict[str, Any] = {"r": REFT, "prefix_positions": 7, "tied_weights": True}
    configs: dict[str, Any] = {
        "seq_bn": "seq_bn",
        "double_seq_bn": "double_seq_bn",
        "par_bn": "par_bn",
        "prefix": prefix,
        "mam": adapters.ConfigUnion(prefix, adapters.ParBnConfig(reduction_factor=REDUCTION)),
        "compacter": adapters.CompacterConfig(reduction_factor=PHM),
        "compacter++": adapters.CompacterPlusPlusConfig(reduction_factor=PHM),
        "compacter++-paper": adapters.CompacterPlusPlusConfig(reduction_factor=PHM, original_ln_before=False),
        "unipelt": adapters.UniPELTConfig(prefix_tuning=prefix, lora=lora),
        "unipelt-paper": adapters.UniPELTConfig(prefix_tuning=prefix, adapter=reads_h, lora=lora),
        "loreft": adapters.LoReftConfig(**everywhere),
        "loreft-first": adapters.LoReftConfig(r=REFT, prefix_positions=FIRST, tied_weights=True),
        "loreft-ends": adapters.LoReftConfig(r=REFT, prefix_positions=FIRST, suffix_positions=LAST, tied_weights=True),
        "noreft": adapters.NoReftConfig(**everywhere),
        "direft": adapters.DiReftConfig(**everywhere),
    }
    outputs: dict[str, dict[str, list[float]]] = {"base": {}}
    gradients: dict[str, dict[str, dict[str, float]]] = {}
    for method, names in METHODS.items():
        for name in names:
            model = zoo.build(name, torch.float64, attn_implementation="eager")
            with _exact(), torch.no_grad():
                outputs["base"][name] = numbers(results(model, name), name)
            own = set(model.state_dict())
            adapters.init(model)
            model.add_adapter("a", config=configs[method])
            model.set_active_adapters("a")
            model.double().eval()
            _fill(model, own)
            with _exact(), parametrize.cached():
                measured, slopes = _measured(model, name, own)
            outputs.setdefault(method, {})[name] = measured
            gradients.setdefault(method, {})[name] = slopes
    for name in FUSION:
        model = zoo.build(name, torch.float64, attn_implementation="eager")
        measured, slopes = _fused(model, name, reads_h)
        outputs.setdefault("fusion", {})[name] = measured
        gradients.setdefault("fusion", {})[name] = slopes
    json.dump({"outputs": outputs, "gradients": gradients}, sys.stdout, indent=1)


def _fused(model: nn.Module, name: str, config: Any) -> tuple[list[float], dict[str, float]]:
    """Two adapters and their fusion; slopes for the fusion's tensors only."""
    import adapters

    own = set(model.state_dict())
    adapters.init(model)
    for one in "ab":
        model.add_adapter(one, config=config)
    both = adapters.Fuse("a", "b")
    model.add_adapter_fusion(both)
    model.set_active_adapters(both)
    model.double().eval().requires_grad_(True)
    added = {key: p for key, p in model.named_parameters() if key not in own}
    with torch.no_grad():
        for key, parameter in added.items():
            parameter.copy_(draw(key, tuple(parameter.shape)))
    queries = {key: p for key, p in added.items() if key.endswith(tuple(FUSION_NAMES.values())) and FUSED_BY in key}
    with _exact():
        return measured(model, name, queries)


@contextmanager
def _exact() -> Iterator[None]:
    """Without the steps through float32."""
    with patch.object(
        Tensor, "float", lambda tensor: tensor if tensor.is_floating_point() else tensor.to(torch.float32)
    ):
        yield


@torch.no_grad()
def _fill(model: nn.Module, own: set[str]) -> None:
    for label, tensor in _trained(model, own).items():
        tensor.copy_(_joined(draw, label, tensor))
    for path, module in _rotated(model):
        module.weight = orthonormal(draw(f"{path}.weight", tuple(module.weight.shape)))


def _measured(model: nn.Module, name: str, own: set[str]) -> tuple[list[float], dict[str, float]]:
    """`measured` of the trained tensors, and of the matrices with orthonormal rows: `orthonormal`
    computes R from ours.
    """
    rotated = {f"{path}.weight": module.weight for path, module in _rotated(model)}

    def along(label: str, tensor: Tensor) -> Tensor:
        if label not in rotated:
            return _joined(lambda part, shape: draw(f"along {part}", shape), label, tensor)
        ours = draw(label, tuple(tensor.shape))
        return torch.func.jvp(orthonormal, (ours,), (direction(label, tensor),))[1]

    return measured(model, name, _trained(model, own) | rotated, along)


def _trained(model: nn.Module, own: set[str]) -> dict[str, Tensor]:
    """The parameters that AdapterHub added, by label."""
    return {
        label: parameter
        for key, parameter in model.named_parameters()
        if key not in own and parameter.ndim and (label := _label(key))
    }


def _rotated(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            yield path, module


def _label(key: str) -> str:
    """The name that seeds the values; a module that hangs on every layer has one name."""
    for common in ("prefix_tunings.a.", "shared_parameters.a."):
        if common in key:
            return key.partition(common)[2]
    return key if ".a." in key and ".parametrizations." not in key else ""


def _joined(draw: Callable[[str, tuple[int, ...]], Tensor], label: str, tensor: Tensor) -> Tensor:
    """A tensor of a fused projection is that of q, then that of v."""
    if FUSED not in label:
        return draw(label, tuple(tensor.shape))
    half = (tensor.shape[0] // 2, *tensor.shape[1:])
    return torch.cat([draw(label.replace(FUSED, f"c_attn.{part}.loras.a."), half) for part in "qv"])


if __name__ == "__main__":
    main()
