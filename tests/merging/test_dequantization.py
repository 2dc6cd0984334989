"""A quantised base, written out in full: as the library that quantised it dequantises it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import peftc
from peftc.cli.main import main
from tests import zoo
from tests.merging.checkpoints import LORA, same_bits, save_adapter, save_base, tensors

# Where `make` and `make quantized` install them: every process that finds them imports them.
FOLDERS = [Path(sys.prefix) / "torchao", Path(__file__).parents[2] / ".venv-quantized" / "packages"]
PREFIX = "edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }"
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture(name="libraries", autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))


def require(*names: str) -> None:
    for name in names:
        pytest.importorskip(name)


def check(root: Path, cls: Any, dense: Any, dtype: torch.dtype, spec: str = LORA) -> peftc.MergeReport:
    """The merge of `root/base` is the fold into `dense`, its dequantised model."""
    with pytest.raises(peftc.PeftcError, match=r"P707[\s\S]*--dequantize"):
        peftc.merge(root / "base", root / "adapter", root / "out")
    report = peftc.merge(root / "base", root / "adapter", root / "out", dequantize=True, verify=True)
    out = tensors(root / "out")
    assert {value.dtype for value in out.values()} == {dtype}
    assert "quantization" not in (root / "out" / "config.json").read_text()
    merged = cls.from_pretrained(root / "out", dtype="auto").eval()
    plain = cls(merged.config).to(dtype).eval()
    plain.load_state_dict({name: value for name, value in dense.state_dict().items() if name in plain.state_dict()})
    peftc.load(root / "adapter", plain, other_weights=True)
    if dtype == torch.float32:
        with torch.no_grad():
            want, result = (one(**zoo.inputs("llama", one))[0] for one in (plain, merged))
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)
    assert not peftc.fold(plain).refused
    expected, actual = dict(plain.named_parameters()), dict(merged.named_parameters())
    assert [n for n, value in expected.items() if not same_bits(value.data, actual[n].data)] == []
    assert set(report.dequantized) >= {key for tensor in report.tensors for key in tensor.keys}
    return report


def adapter_of_plain(root: Path, name: str, dtype: torch.dtype, spec: str = LORA, **options: Any) -> Any:
    cls = save_base(root / "plain", name, dtype, "1GB", **options)
    save_adapter(root / "adapter", root / "plain", cls, spec)
    return cls


# Bases as transformers quantises and saves them.
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", BITSANDBYTES)
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes(kind: str, name: str, tmp_path: Path) -> None:
    require("bitsandbytes")
    from transformers import BitsAndBytesConfig

    options: dict[str, Any] = WIDE if name == "llama" else {"n_embd": 64, "n_inner": 128}
    cls = adapter_of_plain(tmp_path, name, torch.bfloat16, **options)
    config = BitsAndBytesConfig(**BITSANDBYTES[kind])
    base = cls.from_pretrained(tmp_path / "plain", quantization_config=config, dtype="auto")
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    dense = cls.from_pretrained(tmp_path / "base", dtype="auto").dequantize()
    for module_name, module in dense.named_modules():  # transformers makes Linears of Conv1D
        if name == "gpt2" and isinstance(module, nn.Linear) and module_name != "lm_head":
            module.weight = nn.Parameter(module.weight.t().contiguous())
    check(tmp_path, cls, dense, torch.bfloat16)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
@pytest.mark.filterwarnings("ignore")
def test_torchao(kind: str, tmp_path: Path) -> None:
    require("torchao")
    torchao = import_module("torchao.quantization")
    support = import_module("torchao.prototype.safetensors.safetensors_support")
    cls = adapter_of_plain(tmp_path, "llama", torch.bfloat16, **WIDE)
    dense = cls.from_pretrained(tmp_path / "plain", dtype="auto")
    torchao.quantize_(dense.model, getattr(torchao, kind)())
    values, metadata = support.flatten_tensor_state_dict({k: v.data for k, v in dense.named_parameters()})
    write_quantized(tmp_path, {"quant_method": "torchao", "quant_type": "int8_weight_only"}, values, metadata)
    for module in dense.model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.dequantize())
    check(tmp_path, cls, dense, torch.bfloat16)


def write_quantized(
    root: Path, options: dict[str, Any], values: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """A base as other programs write it: two files, and the options in its configuration."""
    (root / "base").mkdir()
    data = json.loads((root / "plain" / "config.json").read_text()) | {"quantization_config": options}
    (root / "base" / "config.json").write_text(json.dumps(data))
    keys = sorted(values)
    weight_map = {key: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, key in enumerate(keys)}
    for file in set(weight_map.values()):
        own = {key: values[key].contiguous() for key in keys if weight_map[key] == file}
        save_file(own, root / "base" / file, {"format": "pt", **(metadata or {})})
    index = {"metadata": {}, "weight_map": weight_map}
    (root / "base" / "model.safetensors.index.json").write_text(json.dumps(index))


BLOCK = 24  # which divides neither 64 nor 128: the last blocks are smaller


def in_blocks(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and what they stand for."""
    rows, columns = (-(-size // BLOCK) for size in value.shape)
    codes, scales = torch.empty(value.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    dense = torch.empty(value.shape)
    for i in range(rows):
        for j in range(columns):
            part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = value[part].float().abs().max() / 448
            codes[part] = (value[part].float() / scales[i, j]).to(torch.float8_e4m3fn)
            dense[part] = codes[part].float() * scales[i, j]
    return codes, scales, dense


def quantise(root: Path, suffix: str, options: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Replaces the matrices of layers by codes and scales. Returns: the dense values."""
    dense, values = load_file(root / "plain" / "model.safetensors"), dict[str, torch.Tensor]()
    for key, value in tuple(dense.items()):
        if "layers" in key and value.ndim == 2 and "router" not in key and "mlp.gate.weight" not in key:
            values[key], values[f"{key.removesuffix('weight')}{suffix}"], full = function(value)
            dense[key] = full.to(value.dtype)
        else:
            values[key] = value
    write_quantized(root, options, values)
    return dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale"])
def test_fp8_in_blocks(suffix: str, dtype: torch.dtype, tmp_path: Path) -> None:
    cls = adapter_of_plain(tmp_path, "llama", dtype, **WIDE)
    options = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    values = quantise(tmp_path, suffix, options, in_blocks)
    dense = cls.from_pretrained(tmp_path / "plain", dtype="auto")
    dense.load_state_dict(values)
    report = check(tmp_path, cls, dense, dtype)
    assert len(report.dequantized) == 7 * dense.config.num_hidden_layers


def test_experts_in_fp8(tmp_path: Path) -> None:
    """Each expert has tensors of its own, which transformers stacks."""
    spec = "edit e at layer[*].ffn.experts[*].up { w += lowrank(r=2) }"
    cls = adapter_of_plain(tmp_path, "mixtral", torch.bfloat16, spec)
    options = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    values = quantise(tmp_path, "weight_scale_inv", options, in_blocks)
    save_file(values, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    check(tmp_path, cls, cls.from_pretrained(tmp_path / "plain", dtype="auto"), torch.bfloat16)


def by_row(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = value.float().abs().amax(1, keepdim=True) / 448
    codes = (value.float() / scales).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * scales


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        }
    },
}


@pytest.mark.filterwarnings("ignore")
def test_compressed_scales(tmp_path: Path) -> None:
    require("compressed_tensors")
    cls = adapter_of_plain(tmp_path, "llama", torch.bfloat16, **WIDE)
    values = quantise(tmp_path, "weight_scale", COMPRESSED, by_row)
    dense = cls.from_pretrained(tmp_path / "plain", dtype="auto")
    dense.load_state_dict(values)
    check(tmp_path, cls, dense, torch.bfloat16)


def test_floats_of_8_bits_without_scales(tmp_path: Path) -> None:
    cls = adapter_of_plain(tmp_path, "llama", torch.bfloat16, spec="edit a at layer[*].ffn.up { h += lora(x, r=2) }")
    values = load_file(tmp_path / "plain" / "model.safetensors")
    values = {k: v.to(torch.float8_e4m3fn) if "up_proj" in k else v for k, v in values.items()}
    save_file(values, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    base = tmp_path / "plain"
    with pytest.raises(peftc.PeftcError, match="P531"):
        peftc.merge(base, tmp_path / "adapter", tmp_path / "out", other_weights=True)
    peftc.merge(base, tmp_path / "adapter", tmp_path / "out", dequantize=True, verify=True)
    model = cls.from_pretrained(base, dtype=torch.bfloat16)
    peftc.load(tmp_path / "adapter", model, other_weights=True)
    peftc.fold(model)
    out = tensors(tmp_path / "out")
    assert all(same_bits(value.data, out[key]) for key, value in model.named_parameters())


def test_with_jobs_and_options(tmp_path: Path) -> None:
    """Tied embeddings get a second tensor, and edits that do not fold stay."""
    spec = (
        LORA + '\nedit t at "lm_head" { h += lora(x, r=2) }\nedit p at layer[*].attn { kv = concat(prefix(len=2), kv) }'
    )
    adapter_of_plain(tmp_path, "llama", torch.bfloat16, spec, **WIDE, tie_word_embeddings=True)
    dense = load_file(tmp_path / "plain" / "model.safetensors")
    values = dict[str, torch.Tensor]()
    for key, value in tuple(dense.items()):
        values[key] = value
        if value.ndim == 2:
            values[key], values[f"{key}_scale_inv"], full = in_blocks(value)
            dense[key] = full.bfloat16()
    write_quantized(tmp_path, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, values)
    save_file(dense, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    options: dict[str, Any] = {"untie": True, "partial": True, "verify": True, "other_weights": True}
    adapter = tmp_path / "adapter"
    report = peftc.merge(tmp_path / "base", adapter, tmp_path / "out", dequantize=True, jobs=2, **options)
    peftc.merge(tmp_path / "plain", adapter, tmp_path / "want", **options)
    out, want = tensors(tmp_path / "out"), tensors(tmp_path / "want")
    assert out.keys() == want.keys()
    assert [key for key in want if not same_bits(out[key], want[key])] == []
    assert [*report.refused] == ["p"]
    assert (tmp_path / "out" / "adapter" / "adapter.json").exists()


def refused(root: Path, code: str, text: str) -> None:
    with pytest.raises(peftc.PeftcError) as error:
        peftc.merge(root / "base", root / "adapter", root / "out", dequantize=True)
    assert [d.code for d in error.value.diagnostics] == [code], error.value
    assert text in str(error.value)
    assert not (root / "out").exists()


def test_a_base_that_is_not_quantised_is_refused(tmp_path: Path) -> None:
    adapter_of_plain(tmp_path, "llama", torch.bfloat16)
    (tmp_path / "plain").rename(tmp_path / "base")
    refused(tmp_path, "P545", "are not quantised")


@pytest.mark.parametrize(
    ("options", "text"),
    [({"quant_method": "gptq", "bits": 4}, "not of gptq"), ({"quant_method": "fp8"}, "cannot be written out in full")],
)
def test_what_cannot_be_dequantised_is_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    adapter_of_plain(tmp_path, "llama", torch.bfloat16, **WIDE)
    values = load_file(tmp_path / "plain" / "model.safetensors")
    values = {k: v.to(torch.float8_e4m3fn) if "up_proj" in k else v for k, v in values.items()}  # without scales
    write_quantized(tmp_path, options, values)
    refused(tmp_path, "P708", text)


def test_a_library_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    adapter_of_plain(tmp_path, "llama", torch.bfloat16)
    values = load_file(tmp_path / "plain" / "model.safetensors")
    write_quantized(tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True}, values)
    refused(tmp_path, "P708", "pip install bitsandbytes")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter_of_plain(tmp_path, "llama", torch.bfloat16, **WIDE)
    options = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    quantise(tmp_path, "weight_scale_inv", options, in_blocks)
    (tmp_path / "base" / "hf_quant_config.json").write_text("{}")
    arguments = ["merge", str(tmp_path / "base"), str(tmp_path / "adapter"), "-o", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert "error[P707]" in capsys.readouterr().err
    assert main([*arguments, "--dequantize"]) == 0
    assert "quantised weights" in capsys.readouterr().out
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
