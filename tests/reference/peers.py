"""PEFT on the zoo, with weights in the format of peftc: an independent reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import peft
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.reference.methods import linears
from tests.reference.reference import Reference, part
from tests.reference.table import Rows

Parameters = dict[str, nn.Parameter]  # by the name under which this project saves the same tensor


def targets(ref: Reference, roles: str) -> list[tuple[str, Rows]]:
    """Unfused Linears in these roles: PEFT edits a Linear only as a whole."""
    return [(path, rows) for path, rows in linears(ref, roles) if rows.stop is None]


def lora(
    ref: Reference,
    sites: Iterable[tuple[str, Rows]],
    weights: Mapping[str, Tensor],
    edit: str,
    alpha: float,
    dora: bool,
    rslora: bool = False,
) -> tuple[nn.Module, Parameters]:
    """The model under PEFT's LoRA (DoRA) with our A, B (m), and PEFT's parameters by our names."""
    sites = list(sites)
    form = "lowrank" if dora else "lora"
    r = part(weights, edit, sites[0][0], form)["A"].shape[0]
    config = peft.LoraConfig(
        r=r,
        lora_alpha=alpha,
        target_modules=[rows.module for _, rows in sites],
        use_dora=dora,
        use_rslora=rslora,
        fan_in_fan_out=_transposed(ref, sites),
    )
    model = injected(ref, config)
    parameters: Parameters = {}
    for path, rows in sites:
        module, w = model.get_submodule(rows.module), part(weights, edit, path, form)
        parameters[f"{edit}/{path}/{form}.A"] = module.lora_A["default"].weight
        parameters[f"{edit}/{path}/{form}.B"] = module.lora_B["default"].weight
        if dora:
            parameters[f"{edit}/{path}/magnitude.m"] = module.lora_magnitude_vector["default"].weight
        assert w["A"].shape == parameters[f"{edit}/{path}/{form}.A"].shape
    _copy(parameters, weights)
    return model, parameters


def ia3(
    ref: Reference,
    outputs: Iterable[tuple[str, Rows]],
    inputs: Iterable[tuple[str, Rows]],
    weights: Mapping[str, Tensor],
) -> tuple[nn.Module, Parameters]:
    """(IA)³: `outputs` are scaled after, `inputs` before; pairs of (our name of the vector's
    tensor, Linear).
    """
    outputs, inputs = list(outputs), list(inputs)
    before = [rows.module for _, rows in inputs]
    config = peft.IA3Config(
        target_modules=[rows.module for _, rows in outputs] + before,
        feedforward_modules=before,
        fan_in_fan_out=_transposed(ref, inputs),
    )
    model = injected(ref, config)
    parameters = {key: model.get_submodule(rows.module).ia3_l["default"] for key, rows in (*outputs, *inputs)}
    _copy(parameters, weights)
    return model, parameters


# PEFT's names of our A, B, …
NAMES = {
    "hadamard": {"A": "hada_w1_b", "B": "hada_w1_a", "C": "hada_w2_b", "D": "hada_w2_a"},
    "kron": {"A": "lokr_w1", "B": "lokr_w2", "B_up": "lokr_w2_a", "B_down": "lokr_w2_b"},
    "orthogonal": {"Q": "oft_R"},
    "svd": {"P": "lora_B", "Q": "lora_A", "values": "lora_E"},
    "vera": {"d": "vera_lambda_d", "b": "vera_lambda_b"},
}


def at_linears(
    ref: Reference, config: peft.PeftConfig, sites: Iterable[tuple[str, Rows]], weights: Mapping[str, Tensor], form: str
) -> tuple[nn.Module, Parameters]:
    """The model under a PEFT config without its targets, with the weights of the edit `e`."""
    sites = list(sites)
    config.target_modules = {rows.module for _, rows in sites}  # type: ignore[attr-defined]
    if hasattr(config, "fan_in_fan_out"):
        config.fan_in_fan_out = _transposed(ref, sites)
    model = injected(ref, config)
    parameters: Parameters = {}
    for path, rows in sites:
        module = model.get_submodule(rows.module)
        for name in part(weights, "e", path, form):
            parameter = getattr(module, NAMES[form][name])["default"]
            parameters[f"e/{path}/{form}.{name}"] = parameter.weight if isinstance(parameter, nn.Module) else parameter
    _copy(parameters, weights)
    return model, parameters


def norms(ref: Reference, weights: Mapping[str, Tensor]) -> tuple[nn.Module, Parameters]:
    """LN tuning of the norms of these parameters, which are named `<edit>/<dotted name>`."""
    modules = {key.partition("/")[2].rpartition(".")[0] for key in weights}
    model = injected(ref, peft.LNTuningConfig(target_modules=modules))
    parameters: Parameters = {}
    for key in weights:
        module, _, name = key.partition("/")[2].rpartition(".")
        parameters[key] = getattr(model.get_submodule(module).ln_tuning_layers["default"], name)
    _copy(parameters, weights)
    return model, parameters


def injected(ref: Reference, config: peft.PeftConfig) -> nn.Module:
    if isinstance(config, peft.VeraConfig):  # which `inject_adapter_in_model` refuses
        model = peft.VeraModel(ref.model, config, "default").model
    else:
        model = peft.inject_adapter_in_model(config, ref.model)
    return model.to(torch.float64).eval()


def _transposed(ref: Reference, sites: list[tuple[str, Rows]]) -> bool:
    return any(isinstance(ref.model.get_submodule(rows.module), Conv1D) for _, rows in sites)


@torch.no_grad()
def _copy(parameters: Parameters, weights: Mapping[str, Tensor]) -> None:
    for key, parameter in parameters.items():
        parameter.copy_(weights[key].reshape(parameter.shape))
