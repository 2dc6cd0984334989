"""Model names, paths, configs and modules; and the diagnostics for names that do not resolve."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.models.skeleton import skeleton
from peftc.models.sources import resolve
from tests import zoo


def refusal(act: Callable[[], object]) -> Diagnostic:
    with pytest.raises(PeftcError) as excinfo:
        act()
    (diagnostic,) = excinfo.value.diagnostics
    return diagnostic


def write(folder: Path, values: object) -> Path:
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_folder_and_its_config_are_the_same_model(tmp_path: Path, as_path: type) -> None:
    zoo.config("bart").save_pretrained(tmp_path)
    folder, file = resolve(as_path(tmp_path)), resolve(as_path(tmp_path / "config.json"))
    assert (folder.kind, file.kind) == ("folder", "config.json")
    assert folder.id == str(tmp_path)
    assert folder.model_class is file.model_class
    assert folder.model_class is not None
    assert folder.model_class.__name__ == "BartForConditionalGeneration"


def test_a_config_without_architecture_gets_the_likely_head() -> None:
    heads = {"bart": "BartForConditionalGeneration", "llama": "LlamaForCausalLM", "bert": "BertModel"}
    for name, head in heads.items():
        config = zoo.config(name)
        config.architectures = None
        source = resolve(config)
        assert source.model_class is not None
        assert source.model_class.__name__ == head


def test_a_module_is_taken_as_it_is() -> None:
    model = zoo.build("bert-classifier")
    source = resolve(model)
    assert (source.kind, source.type, source.module) == ("module", "bert", model)
    assert resolve(nn.Linear(2, 3)).type == "Linear"


def test_an_unknown_id_offline_suggests_near_ids() -> None:
    diagnostic = refusal(lambda: resolve("facebook/bart-lrge"))
    assert diagnostic.code == "P501"
    assert diagnostic.message == "unknown model `facebook/bart-lrge`"
    assert any("hub cache" in note for note in diagnostic.notes)
    assert any("HF_HUB_OFFLINE" in note for note in diagnostic.notes)
    assert diagnostic.help is not None
    assert "`facebook/bart-large`" in diagnostic.help
    assert diagnostic.source is not None
    assert diagnostic.span is not None
    assert diagnostic.source.text[diagnostic.span.start : diagnostic.span.end] == "facebook/bart-lrge"


@pytest.mark.parametrize("name", ["", "no such/na me", "-bad-"])
def test_a_malformed_id_is_unknown(name: str) -> None:
    assert refusal(lambda: resolve(name)).code == "P501"


@pytest.mark.parametrize("name", ["./nowhere", "/no/where/config.json", "nowhere.json", "~/no-such-folder"])
def test_a_path_to_nothing(name: str) -> None:
    diagnostic = refusal(lambda: resolve(name))
    assert diagnostic.code == "P502"
    assert name in diagnostic.message


def test_an_object_that_holds_models_names_them() -> None:
    pipeline: Any = SimpleNamespace(unet=nn.Linear(2, 2), scheduler=3, text_encoder=nn.Linear(2, 2))
    assert refusal(lambda: resolve(pipeline)).help == "it holds `unet` and `text_encoder`: compile one of these"
    assert refusal(lambda: resolve(cast(Any, 3))).help is None


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert refusal(lambda: resolve(tmp_path)).message.endswith("has no config.json")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "is not a JSON object"),
        ({}, "has no `model_type`"),
        ({"model_type": "nope"}, "does not know the model type `nope`"),
        ({"model_type": "bert", "hidden_size": "wide"}, "makes no bert model"),
        ({"model_type": "bert", "architectures": ["BertForEverything"]}, "`BertForEverything`"),
    ],
)
def test_unusable_configurations(tmp_path: Path, values: object, part: str) -> None:
    diagnostic = refusal(lambda: resolve(write(tmp_path, values)))
    assert diagnostic.code == "P503"
    assert part in diagnostic.message


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration_mine.MyConfig", "AutoModel": "modeling_mine.MyModel"}
    (tmp_path / "configuration_mine.py").write_text("raise SystemExit('this was run')")
    write(tmp_path, {"model_type": "mine", "architectures": ["MyModel"], "auto_map": auto_map})
    assert refusal(lambda: resolve(tmp_path)).code == "P504"


def test_values_that_do_not_fit_together(tmp_path: Path) -> None:
    values = {"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4, "architectures": ["BertModel"]}
    diagnostic = refusal(lambda: skeleton(resolve(write(tmp_path, values))))
    assert diagnostic.code in ("P503", "P506")
    assert any("30" in note for note in diagnostic.notes)


def test_a_config_in_the_hub_cache_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, zoo.config("gpt2").to_dict())
    monkeypatch.setattr("peftc.models.sources.try_to_load_from_cache", lambda repo, file: str(path))
    source = resolve("somebody/some-gpt2")
    assert (source.id, source.kind, source.type) == ("somebody/some-gpt2", "hub", "gpt2")
