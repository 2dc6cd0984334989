"""The base an adapter belongs to: a base with another structure is refused; other weights are a
warning with their distance.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlavaConfig

import peftc
from peftc.adapters.base import VALUES, describe_base, differences, digest_of, samples
from peftc.adapters.metadata import METADATA
from peftc.models import settings
from peftc.models.identity import fingerprint, fingerprint_of, identity
from tests import zoo
from tests.laws.harness import Before, randomise

SPEC = "peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2) }\ntrain n = [w] at layer[*].norm"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


class Plain(nn.Module):
    """A module with a configuration and one parameter."""

    def __init__(self, config: object = None, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(40, 3, generator=torch.Generator().manual_seed(seed)))


def llama(**values: Any) -> Plain:
    return Plain(LlamaConfig(hidden_size=32, num_attention_heads=4, **values))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved adapter; read-only."""
    model = zoo.build("llama")
    peftc.compile(SPEC, model)
    randomise(peftc.parameters(model))
    return peftc.save(model, tmp_path_factory.mktemp("saved") / "a")


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / METADATA).read_text())


def diagnostic_of(action: Callable[[], object]) -> peftc.Diagnostic:
    with pytest.raises(peftc.PeftcError) as excinfo:
        action()
    (result,) = excinfo.value.diagnostics
    return result


# The fingerprint
# -----------------------------------------------------------------------------------------

OTHER_FUNCTIONS: dict[str, dict[str, Any]] = {
    "rope theta": {"rope_parameters": {**ROPE, "rope_theta": 500000.0}},
    "rope scaling": {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0}},
    "epsilon of norms": {"rms_norm_eps": 1e-5},
    "activation": {"hidden_act": "relu"},
    "biases": {"attention_bias": True},
    "window": {"sliding_window": 16},
    "a key of somebody's own": {"residual_scale": 0.5},
}
SAME_FUNCTIONS: dict[str, dict[str, Any]] = {
    "names": {"name_or_path": "elsewhere", "id2label": {0: "no", 1: "yes"}, "architectures": ["LlamaModel"]},
    "storage": {"dtype": "bfloat16"},
    "outputs": {"output_hidden_states": True, "use_cache": False},
    "tokens": {"pad_token_id": 7, "eos_token_id": 9},
    "dropout": {"attention_dropout": 0.5},
    "first values": {"initializer_range": 0.5},
    "whole numbers": {"rms_norm_eps": 1e-06, "rope_parameters": {**ROPE, "rope_theta": 10000}},
}


@pytest.mark.parametrize("case", OTHER_FUNCTIONS)
def test_another_function_is_another_fingerprint(case: str) -> None:
    base = describe_base(llama(), "a")
    other = llama(**OTHER_FUNCTIONS[case])
    assert fingerprint(other) != base.fingerprint
    (key,) = OTHER_FUNCTIONS[case]
    notes = differences(base, other)
    assert notes
    assert all(f"`{key}" in note for note in notes)
    assert differences(describe_base(other, "b"), llama()), "from the other side, too"
    assert (
        fingerprint_of(identity(other, version=1)) == fingerprint_of(identity(llama(), version=1))
        or case == "activation"
    )


@pytest.mark.parametrize("case", SAME_FUNCTIONS)
def test_the_same_function_is_the_same_fingerprint(case: str) -> None:
    other = llama(**SAME_FUNCTIONS[case])
    assert fingerprint(other) == fingerprint(llama())


def test_parts_of_a_model_have_configurations_of_their_own() -> None:
    one, two = Plain(LlavaConfig()), Plain(LlavaConfig())
    two.config.vision_config.layer_norm_eps = 1e-3
    (note,) = differences(describe_base(one, "a"), two)
    assert note == "`vision_config.layer_norm_eps` of the configuration is 1e-05 there and 0.001 here"
    two.config = LlavaConfig()
    two.config.text_config.use_cache = False
    assert differences(describe_base(one, "a"), two) == []


@pytest.mark.parametrize("config", [None, object(), {"d": 3}], ids=["none", "object", "dictionary"])
def test_without_a_configuration_the_structure_is_compared(config: object) -> None:
    assert settings.settings(Plain(config)) == {}
    assert differences(describe_base(Plain(config), "a"), Plain(config, seed=1)) == []
    wider = Plain(config)
    wider.weight = nn.Parameter(torch.zeros(41, 3))
    assert differences(describe_base(Plain(config), "a"), wider)


# Another version of transformers
# -------------------------------------------------------------------------------------


class NewerConfig(LlamaConfig):
    """A configuration of a later version with two more keys: one plain, one without an informative
    default.
    """

    def __init__(self, attention_sinks: int = 0, router: dict[str, Any] | None = None, **values: Any) -> None:
        self.attention_sinks = attention_sinks
        self.router = router
        super().__init__(**values)


def newer(**values: Any) -> Plain:
    return Plain(NewerConfig(hidden_size=32, num_attention_heads=4, **values))


def test_added_keys_may_have_their_defaults() -> None:
    old, new = llama(), newer()
    assert fingerprint(old) != fingerprint(new)
    assert differences(describe_base(old, "a"), new) == []
    assert differences(describe_base(new, "a"), old) == []


@pytest.mark.parametrize("values", [{"attention_sinks": 4}, {"router": {"top": 2}}], ids=str)
def test_other_values_of_added_keys_are_reported(values: dict[str, Any]) -> None:
    (key,) = values
    for one, other in ((llama(), newer(**values)), (newer(**values), llama())):
        (note,) = differences(describe_base(one, "a"), other)
        assert f"`{key}" in note
        assert "not set" in note


class WithoutDefaults(LlamaConfig):
    """A class that needs constructor arguments: its defaults are unknown."""

    def __init__(self, depth: int, **values: Any) -> None:
        self.depth = depth
        super().__init__(**values)


def test_with_unknown_defaults_keys_of_one_side_pass() -> None:
    one, two = (
        Plain(WithoutDefaults(3, hidden_size=32, num_attention_heads=4, **values)) for values in ({}, {"more": 1})
    )
    assert settings.defaults(one) == {}
    assert differences(describe_base(one, "a"), two) == []
    two.config.depth = 4
    (note,) = differences(describe_base(one, "a"), two)
    assert "`depth` of the configuration is 3 there and 4 here" in note


# Adapters
# --------------------------------------------------------------------------------------------------


def test_the_saved_fingerprint(folder: Path) -> None:
    text = description(folder)
    base = text["base"]
    assert base["fingerprint_version"] == text["plan"]["model"]["fingerprint_version"] == 2
    assert base["fingerprint"] == text["plan"]["model"]["fingerprint"]
    assert base["configuration"]["rope_parameters.rope_theta"] == 10000
    assert "pad_token_id" not in base["configuration"]
    assert text["weights_digest"]["values"] == VALUES
    assert len(text["weights_digest"]["sha256"]) == 64
    trained = [name for name, tensor in base["tensors"].items() if not tensor["sample"]]
    assert trained
    assert all("norm" in name for name in trained)
    assert {len(t["sample"]) for t in base["tensors"].values()} == {0, VALUES}


def test_another_function_is_refused(folder: Path) -> None:
    model = zoo.build("llama", rms_norm_eps=1e-2)
    before = Before.of(model)
    result = diagnostic_of(lambda: peftc.load(folder, model, other_weights=True))
    assert result.code == "P523"
    assert result.notes == ("`rms_norm_eps` of the configuration is 1e-06 there and 0.01 here",)
    before.assert_same(model)


def first_version(folder: Path, target: Path) -> Path:
    """The same adapter with version 1 of the fingerprint."""
    text, model = description(folder), zoo.build("llama")
    for name in ("configuration", "configured", "fingerprint_version"):
        del text["base"][name]
    del text["weights_digest"], text["plan"]["model"]["fingerprint_version"]
    text["base"]["fingerprint"] = text["plan"]["model"]["fingerprint"] = fingerprint_of(identity(model, version=1))
    for tensor in text["base"]["tensors"].values():
        tensor["sample"] = []
    target.mkdir()
    (target / METADATA).write_text(json.dumps(text))
    (target / text["file"]).write_bytes((folder / text["file"]).read_bytes())
    return target


def test_version_1_fingerprints_are_compared_by_version_1(folder: Path, tmp_path: Path) -> None:
    old = first_version(folder, tmp_path / "old")
    peftc.load(old, zoo.build("llama"))
    peftc.load(old, zoo.build("llama", rms_norm_eps=1e-2))
    assert diagnostic_of(lambda: peftc.load(old, zoo.build("llama", hidden_act="relu"))).code == "P523"


# Other weights
# --------------------------------------------------------------------------------------------------

PROJECTION = "model.layers.1.self_attn.v_proj.weight"


def scaled(factor: float) -> nn.Module:
    model = zoo.build("llama")
    with torch.no_grad():
        model.get_parameter(PROJECTION).mul_(factor)
    return model


def test_other_weights_are_warned_of_with_their_distance(folder: Path) -> None:
    model = scaled(1.001)
    with pytest.warns(peftc.PeftcWarning) as warnings:
        peftc.load(folder, model)
    (record,) = warnings
    warning = record.message
    assert isinstance(warning, peftc.PeftcWarning)
    assert warning.code == warning.diagnostic.code == "P524"
    assert warning.diagnostic.severity == "warning"
    assert f"1 of 24 parameters differ, such as `{PROJECTION}`" in str(warning)
    assert f"the largest 0.001, in `{PROJECTION}`" in str(warning)
    assert record.filename == __file__, "the line of the caller"
    assert "e" in peftc.specs(model) or peftc.parameters(model)


def test_strict_refuses_other_weights(folder: Path) -> None:
    model = scaled(1.001)
    before = Before.of(model)
    assert diagnostic_of(lambda: peftc.load(folder, model, strict=True)).code == "P524"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(peftc.PeftcWarning):
            peftc.load(folder, model)
    before.assert_same(model)
    peftc.load(folder, model, other_weights=True)
    clash = diagnostic_of(lambda: peftc.load(folder, zoo.build("llama"), other_weights=True, strict=True))
    assert clash.code == "P545"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_keeps_the_fingerprint(dtype: torch.dtype, folder: Path) -> None:
    peftc.load(folder, zoo.build("llama").to(dtype), strict=True)


def test_non_finite_values_change_the_fingerprint(folder: Path) -> None:
    with pytest.warns(peftc.PeftcWarning, match="the largest inf"):
        peftc.load(folder, scaled(float("nan")))


def test_strict_refuses_weights_without_values(folder: Path) -> None:
    """A quantised weight has no values to compare."""
    model = zoo.build("llama")
    owner = model.get_submodule(PROJECTION.removesuffix(".weight"))
    owner.weight = nn.Parameter(owner.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    result = diagnostic_of(lambda: peftc.load(folder, model, strict=True))
    assert result.code == "P524"
    assert "1 parameters cannot be compared" in result.notes[0]


def test_warm_start_has_the_same_rule(folder: Path) -> None:
    model = peftc.compile(SPEC, scaled(1.001))
    with pytest.warns(peftc.PeftcWarning, match="P524"):
        peftc.warm_start(model, folder)
    assert diagnostic_of(lambda: peftc.warm_start(model, folder, strict=True)).code == "P524"
    peftc.warm_start(model, folder, other_weights=True)


# The sample
# --------------------------------------------------------------------------------------------------


def test_samples_are_values_at_equal_distances() -> None:
    values = torch.arange(46, dtype=torch.float32)
    parameters = {
        "whole": values,
        "transposed": values.reshape(2, 23).T,
        "short": values[:2].bfloat16(),
        "one": torch.tensor(3.0),
        "integers": values.int(),
        "meta": values.to("meta"),
        "empty": values[:0],
    }
    result = samples(parameters, dict.fromkeys(parameters, 4))
    assert result["whole"] == (0, 15, 30, 45)
    assert result["transposed"] == tuple(values.reshape(2, 23).T.flatten()[[0, 15, 30, 45]].tolist())
    assert result["short"] == (0, 0, 0, 1)
    assert result["one"] == (3, 3, 3, 3)
    assert [result[name] for name in ("integers", "meta", "empty")] == [None, None, None]


def test_the_digest_is_of_names_and_values() -> None:
    one, two = describe_base(Plain(), "a").tensors, describe_base(Plain(seed=1), "a").tensors
    assert digest_of(one) == digest_of(describe_base(Plain(), "b").tensors)
    assert digest_of(one).sha256 != digest_of(two).sha256
    assert digest_of({"other": one["weight"]}).sha256 != digest_of(one).sha256
