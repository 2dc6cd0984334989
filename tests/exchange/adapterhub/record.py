"""Adapters of AdapterHub's library on small models, and what the library computes with them.

It runs with the library and the transformers that it pins. `make adapterhub` compares what these
compute with the numbers beside the adapters of a folder (`--check FOLDER`).
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.exchange.adapterhub.models import COUNTS, FOLDER, MODELS, NAMES, base, gradients, output

hub: Any = importlib.import_module("adapters")
REFLECTIONS = "projection.parametrizations.weight.original"
PICKLED = ("prefix", "mam", "unipelt", "norms")  # of which one module has a tensor twice, which safetensors refuses


def _seq(**options: Any) -> Any:
    return hub.SeqBnConfig(reduction_factor=4, **options)


def _prefix(**options: Any) -> Any:
    return hub.PrefixTuningConfig(prefix_length=3, bottleneck_size=5, **options)


def _reft(kind: Any, **options: Any) -> Any:
    return kind(r=2, prefix_positions=2, **options)


def _unipelt(**options: Any) -> Any:
    return hub.UniPELTConfig(_prefix(), _seq(), hub.LoRAConfig(r=2, alpha=4), **options)


COMMON: dict[str, Any] = {
    "double_seq_bn": lambda: hub.DoubleSeqBnConfig(reduction_factor=4),
    "seq_bn": _seq,
    "seq_bn_inv": lambda: hub.SeqBnInvConfig(reduction_factor=4),
    "scaled_par_bn": lambda: hub.ParBnConfig(reduction_factor=4, scaling="learned"),
    "mam": lambda: hub.MAMConfig(_prefix(), hub.ParBnConfig(reduction_factor=4)),
    "compacter": lambda: hub.CompacterConfig(reduction_factor=2),
    "prefix": _prefix,
    "unipelt": _unipelt,
    "ia3": hub.IA3Config,
    "lora": lambda: hub.LoRAConfig(r=2, alpha=3, attn_matrices=["q", "v"], intermediate_lora=True, output_lora=True),
    "vera": lambda: hub.VeraConfig(r=3),
    "dora": lambda: hub.DoRAConfig(r=2, alpha=3, output_lora=True),
    "dvora": lambda: hub.DvoRAConfig(r=2),
    "mtl_lora": lambda: hub.MTLLoRAConfig(r=2, alpha=3, n_up_projection=2),
    "loreft": lambda: _reft(hub.LoReftConfig),
    "loreft_pair": lambda: _reft(hub.LoReftConfig, suffix_positions=1),
    "noreft": lambda: _reft(hub.NoReftConfig),
    "direft": lambda: _reft(hub.DiReftConfig),
}
OTHERS: dict[str, dict[str, Any]] = {
    "bert": {
        "double_seq_bn_inv": lambda: hub.DoubleSeqBnInvConfig(reduction_factor=4, inv_adapter_reduction_factor=4),
        "par_bn": lambda: hub.ParBnConfig(reduction_factor=4),
        "compacter++": lambda: hub.CompacterPlusPlusConfig(reduction_factor=2),
        "prefix_flat": lambda: _prefix(flat=True),
        "prefix_left_out": lambda: _prefix(leave_out=[0]),
        "lora_gated": lambda: hub.LoRAConfig(r=2, alpha=3, attn_matrices=["k"], use_gating=True),
        "ia3_gated": lambda: hub.IA3Config(use_gating=True, alpha=2),
        "ia3_alpha": lambda: hub.IA3Config(alpha=2),
        "residual_behind": lambda: _seq(residual_before_ln=False, use_gating=True),
        "post_add": lambda: _seq(residual_before_ln="post_add"),
        "norms": lambda: _seq(ln_before=True, ln_after=True),
        "channel": lambda: _seq(scaling="channel", mh_adapter=True, leave_out=[1], non_linearity="gelu_new"),
        "mapping": lambda: _seq().replace(reduction_factor={"0": 2, "default": 8}, dropout=0.1),
        "head": _seq,
        "two": lambda: hub.ConfigUnion(
            _seq(), hub.ParBnConfig(mh_adapter=True, output_adapter=False, reduction_factor=8)
        ),
        "vera_gated": lambda: hub.VeraConfig(r=3, use_gating=True, attn_matrices=["k"]),
        "loreft_tied": lambda: _reft(hub.LoReftConfig, suffix_positions=2, tied_weights=True, layers=[1]),
        "loreft_overlap": lambda: hub.LoReftConfig(r=2, prefix_positions=5, suffix_positions=3, non_linearity="relu"),
        "noreft_pair": lambda: _reft(hub.NoReftConfig, suffix_positions=3),
        "noreft_tied": lambda: _reft(hub.NoReftConfig, suffix_positions=1, tied_weights=True),
        "direft_last": lambda: hub.DiReftConfig(r=2, prefix_positions=0, suffix_positions=2, non_linearity="gelu"),
        "phm_whole": lambda: hub.CompacterConfig(
            reduction_factor=2, factorized_phm_W=False, shared_phm_rule=False, non_linearity="swish"
        ),
    },
    "bart": {"cross": lambda: _seq(cross_adapter=True, mh_adapter=True), "prefix_flat": lambda: _prefix(flat=True)},
    "gpt2": {
        "adapter_plus": lambda: hub.AdapterPlusConfig(reduction_factor=4, stochastic_depth=0.0),
        "lora_one": lambda: hub.LoRAConfig(r=2, alpha=3, attn_matrices=["k"]),
        "lora_gated": lambda: hub.LoRAConfig(r=2, use_gating=True),
    },
}
FUSIONS = ("bert/fusion", "gpt2/fusion")
LIMIT = {"t5": 1e-5}  # its norms compute in float32, and releases of transformers round otherwise
# Of models without a head the library does not save what modules share. Prefixes of T5 are refused.
# ReFT counts the tokens of a decoder by the mask of the encoder, and fails; so do VeRA, DoRA and
# MTL-LoRA at a fused Linear.
LEFT_OUT = {
    *(("roberta", case) for case in ("compacter", "vera", "dvora")),
    *(("t5", case) for case in ("compacter", "vera", "dvora", "mam", "unipelt")),
    *((name, case) for name in ("bart", "t5") for case in ("loreft", "loreft_pair", "noreft", "direft")),
    *(("gpt2", case) for case in ("vera", "dora", "dvora", "mtl_lora")),
    *(("qwen2", case) for case in COMMON if case not in ("seq_bn_inv", "lora")),
}


def cases() -> dict[tuple[str, str], Any]:
    every = {(name, case): make for name in MODELS for case, make in {**COMMON, **OTHERS.get(name, {})}.items()}
    return {key: make for key, make in every.items() if key not in LEFT_OUT}


@torch.no_grad()
def randomise(parameters: Any, std: float = 0.3) -> None:
    for parameter in parameters:
        parameter.add_(torch.randn(parameter.shape) * std)


@contextmanager
def double() -> Generator[None]:
    """The library makes a part of ReFT's tokens in the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def names() -> dict[str, dict[str, Any]]:
    """Each name of the library, with its configuration."""
    configs = importlib.import_module("adapters.configuration.adapter_config").ADAPTER_CONFIG_MAP
    return {name: dict(sorted(config.to_dict().items())) for name, config in configs.items()}


def names_text() -> str:
    return json.dumps(names(), indent=1) + "\n"


def record(keys: Sequence[str] = ()) -> None:
    """All cases anew, or some beside those that are recorded."""
    if not keys:
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
    outputs, derivatives = _tensors("outputs"), _tensors("gradients")
    counts: dict[str, int] = json.loads((FOLDER / COUNTS).read_text(encoding="utf-8")) if keys else {}
    for name, make in MODELS.items():
        if (FOLDER / f"{name}.safetensors").exists():
            continue
        torch.manual_seed(0)
        model = make().double().eval()
        randomise(model.parameters(), 0.2)
        state = {key: value.clone() for key, value in model.state_dict().items() if value.is_floating_point()}
        save_file(state, FOLDER / f"{name}.safetensors")
        outputs[f"{name}/base"] = output(name, model)
    chosen = {key: config for key, config in cases().items() if not keys or "/".join(key) in keys}
    for (name, case), config in chosen.items():
        torch.manual_seed(1)
        model = base(name)
        hub.init(model)
        before = {id(parameter) for parameter in model.parameters()}
        model.add_adapter("task", config=config())
        model.double()
        model.train_adapter("task")
        own = {n: p for n, p in model.named_parameters() if id(p) not in before}
        counts[f"{name}/{case}"] = sum(one.numel() for one in own.values() if one.requires_grad)
        randomise(own.values())
        for parameter_name, parameter in own.items():
            if parameter_name.endswith(REFLECTIONS):  # its diagonal are signs, and has no gradient
                parameter.data.diagonal().copy_(torch.tensor([1.0, -1.0]))
        if case == "head":
            randomise(model.classifier.parameters())
        with double():
            outputs[f"{name}/{case}"] = output(name, model.eval())
            derivatives |= {f"{name}/{case}:{n}": one.contiguous() for n, one in gradients(name, model, own).items()}
        is_safe = not case.startswith(PICKLED)
        (FOLDER / name).mkdir(exist_ok=True)
        model.save_adapter(str(FOLDER / name / case), "task", with_head=case == "head", use_safetensors=is_safe)
        if case.startswith("direft"):
            _say_projection(FOLDER / name / case / "adapter_config.json")
    for key in [one for one in FUSIONS if not keys or one in keys]:
        _record_fusion(key, outputs, derivatives)
    save_file(outputs, FOLDER / "outputs.safetensors")
    save_file(derivatives, FOLDER / "gradients.safetensors")
    (FOLDER / COUNTS).write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    (FOLDER / NAMES).write_text(names_text(), encoding="utf-8")
    print(f"recorded {len(outputs)} outputs")


def _record_fusion(key: str, outputs: dict[str, torch.Tensor], derivatives: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(1)
    name, setup = key.partition("/")[0], hub.composition.Fuse("a", "b")
    model = base(name)
    hub.init(model)
    before = {id(parameter) for parameter in model.parameters()}
    for one in "ab":
        model.add_adapter(one, config=_seq())
    model.add_adapter_fusion(setup)
    model.double()
    model.train_adapter_fusion(setup)
    own = {n: p for n, p in model.named_parameters() if id(p) not in before}
    randomise(own.values())
    outputs[key] = output(name, model.eval())
    derivatives |= {f"{key}:{n}": one.contiguous() for n, one in gradients(name, model, own).items()}
    model.save_adapter_setup(str(FOLDER / key), setup, use_safetensors=True)
    for file in FOLDER.glob(f"{key}/*/*head*"):  # that of the base
        file.unlink()


def _tensors(name: str) -> dict[str, torch.Tensor]:
    file = FOLDER / f"{name}.safetensors"
    return load_file(file) if file.exists() else {}


def _say_projection(file: Path) -> None:
    """What peftc reads, and the library does not write: it loads NoReFT."""
    values = json.loads(file.read_text(encoding="utf-8"))
    values["config"]["subtract_projection"] = False
    file.write_text(json.dumps(values, indent=2), encoding="utf-8")


def _load_in_float64(model: Any, folder: Path) -> None:
    """The library loads into parameters of float32; here are the bits of the file."""
    model.double()
    for file in folder.rglob("*.safetensors"):
        model.load_state_dict(load_file(file), strict=False)
    for file in folder.glob("*.bin"):
        model.load_state_dict(torch.load(file, weights_only=True), strict=False)


def check(folder: Path) -> None:
    """Compares what the library computes with adapters with the numbers beside them."""
    expected, worst = load_file(folder / "outputs.safetensors"), 0.0
    adapters = {key: value for key, value in expected.items() if not key.endswith("/base") and "/direft" not in key}
    for key, value in adapters.items():
        name = key.partition("/")[0]
        model = base(name)
        hub.init(model)
        info: dict[str, Any] = {}
        if key in FUSIONS:
            model.load_adapter_setup(str(folder / key), set_active=True, use_safetensors=True)
        else:
            model.set_active_adapters(model.load_adapter(str(folder / key), loading_info=info, use_safetensors=True))
        _load_in_float64(model, folder / key)
        with double():
            error = (output(name, model.eval()) - value).abs().max().item()
        worst = max(worst, error)
        if not error < LIMIT.get(name, 1e-10) or info.get("missing_keys") or info.get("unexpected_keys"):
            raise SystemExit(f"{key}: {error:.2g} {json.dumps({k: v for k, v in info.items() if v})}")
    print(f"{folder}: {len(adapters)} adapters are the same in AdapterHub's library, to {worst:.2g}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        for folder in sys.argv[2:]:
            check(Path(folder))
        if (FOLDER / NAMES).read_text(encoding="utf-8") != names_text():
            raise SystemExit(f"{FOLDER / NAMES}: the library has other names")
    else:
        record(sys.argv[1:])
