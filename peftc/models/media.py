"""Small images and sounds without content, in each form that models take, and calls with them."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from peftc.diagnostics import PeftcError
from peftc.models.samples import copy_sample
from peftc.models.skeleton import BATCH, TOKENS, floating_dtype, sample_inputs, token_ids

SIDE = 4  # patches along each side of an image that comes as patches
FRAMES = 32  # of a sound that comes as a spectrogram
SAMPLES = 19_200  # of a sound that comes as a waveform: frames of many lengths divide it
PIXELS = 224  # along each side of an image, if the configuration has no image size


@dataclass(frozen=True)
class InputForm:
    """One form of an input. `extras`: arguments that may go with it, or must (at least one)."""

    tensor: torch.Tensor
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    needs_extras: bool = False


@dataclass(frozen=True)
class Medium:
    """A kind of input. `config_keys`: fields of the config section that describes it."""

    modality: str
    feature: str
    parameters: tuple[str, ...]  # names that a forward may have for it
    forms: Callable[[Any], Iterator[InputForm]]
    config_keys: tuple[str, ...]

    def inputs(
        self, model: nn.Module, parameters: Mapping[str, Any], any_name: bool = False
    ) -> Iterator[dict[str, Any]]:
        """The arguments of a function; with `any_name`, its first parameter may take the medium."""
        name = next((n for n in self.parameters if n in parameters), next(iter(parameters), None) if any_name else None)
        if not name:
            return
        for form in self.forms(_section(getattr(model, "config", None), self.config_keys)):
            extras = {n: v for n, v in form.extras.items() if n in parameters}
            if extras or not form.needs_extras:
                yield {name: form.tensor.to(floating_dtype(model)), **extras}


def _section(config: Any, keys: tuple[str, ...]) -> Any:
    """The outermost section of a configuration that has any of these fields."""
    level = [config]
    for _ in range(4):
        for section in level:
            if any(getattr(section, key, None) is not None for key in keys):
                return section
        inner = [getattr(section, name, None) for section in level for name in getattr(section, "sub_configs", {})]
        level = [section for section in inner if section is not None]
    return config


def _images(config: Any) -> Iterator[InputForm]:
    size = _integer(config, "image_size", "img_size") or PIXELS
    channels = _integer(config, "num_channels", "in_channels", "in_chans") or 3
    patch = _integer(config, "patch_size") or 14
    frames = _integer(config, "temporal_patch_size")
    tiles = _integer(config, "max_num_tiles") or 1
    for depth in (frames,) if frames else (1, 2):
        yield from _patches(channels * depth, patch, SIDE * (_integer(config, "spatial_merge_size", "merge_size") or 1))
    image = torch.ones(BATCH, channels, size, size)  # some models skip an image of zeros
    sizes = torch.tensor([[size, size]] * BATCH)
    extras = {
        "image_sizes": sizes,
        "original_sizes": sizes,
        "target_sizes": sizes // patch,
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, tiles, dtype=torch.long),
        "qformer_input_ids": torch.ones(BATCH, TOKENS, dtype=torch.long),
        "image_attention_mask": torch.ones(BATCH, TOKENS, 1, dtype=torch.long),
    }
    yield InputForm(image, extras)
    yield InputForm(image[:, None], extras)  # one image of several in a text
    yield InputForm(image[:, None, None].repeat(1, 1, tiles, 1, 1, 1), extras)
    yield InputForm(image[:, None].repeat(1, 2, 1, 1, 1), extras)
    patches = (size // patch) ** 2
    target_sizes = {"target_sizes": sizes // patch}
    yield InputForm(torch.zeros(1, channels, patch, BATCH * patches * patch), target_sizes, needs_extras=True)
    yield InputForm(torch.zeros(BATCH, patches, channels * patch**2))


def _patches(channels: int, patch: int, side: int) -> Iterator[InputForm]:
    """An image as patches with their grid: in one row for all images, or in a row for each."""
    grid = torch.tensor([[1, side, side]] * BATCH)
    grids = {
        **dict.fromkeys(("image_grid_thw", "grid_thw", "video_grid_thw"), grid),
        **dict.fromkeys(("image_grid_hws", "grid_hw", "grid_hws", "image_grid_hw"), grid[:, 1:]),
        "merge_sizes": torch.ones(BATCH, dtype=torch.long),
        "image_merge_sizes": torch.ones(BATCH, dtype=torch.long),
    }
    patches = torch.zeros(BATCH * side * side, channels * patch * patch)
    yield InputForm(patches, grids, needs_extras=True)
    yield InputForm(patches.reshape(-1, channels, patch, patch), grids, needs_extras=True)
    steps = torch.arange(side)
    positions = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1).reshape(1, -1, 2).repeat(BATCH, 1, 1)
    rows = {
        "spatial_shapes": grid[:, 1:],
        "pixel_attention_mask": torch.ones(BATCH, side * side, dtype=torch.long),
        **dict.fromkeys(("image_position_ids", "pixel_position_ids"), positions),
    }
    yield InputForm(patches.reshape(BATCH, side * side, -1), rows, needs_extras=True)


def _flattened_patches(config: Any) -> Iterator[InputForm]:
    # Patches as vectors, each behind its row and column. Seen in: Pix2Struct.
    width = _integer(config, "patch_embed_hidden_size")
    width = width or (_integer(config, "num_channels") or 3) * (_integer(config, "patch_size") or 16) ** 2
    yield InputForm(torch.ones(BATCH, SIDE * SIDE, 2 + width), {"attention_mask": torch.ones(BATCH, SIDE * SIDE)})


def _boxes(config: Any) -> Iterator[InputForm]:
    # The position of each token on a page. Seen in: LayoutLM.
    yield InputForm(torch.zeros(BATCH, TOKENS, 4))


def _sounds(config: Any) -> Iterator[InputForm]:
    """Spectrograms, with mel bands before or after the frames, and waveforms."""
    bands = _integer(config, "num_mel_bins", "input_feat_size", "feature_size", "n_mels", "input_dim") or 80
    frames = 2 * (_integer(config, "max_source_positions") or FRAMES)
    mask = torch.ones(BATCH, frames, dtype=torch.long)
    masks: dict[str, Any] = dict.fromkeys(("input_features_mask", "feature_attention_mask", "audio_mel_mask"), mask)
    lengths = {"feature_lens": torch.tensor([frames] * BATCH), "aftercnn_lens": torch.tensor([frames // 2] * BATCH)}
    yield InputForm(torch.zeros(BATCH, bands, frames), {**masks, **lengths})
    yield InputForm(torch.zeros(bands, BATCH * frames), lengths, needs_extras=True)
    yield InputForm(torch.zeros(BATCH, frames, bands), masks)
    yield InputForm(torch.zeros(BATCH, SAMPLES))
    yield InputForm(torch.zeros(BATCH, 1, SAMPLES))


def _integer(config: Any, *names: str) -> int | None:
    """The first of these fields that is an integer, or a list that ends with one."""
    for name in names:
        value = getattr(config, name, None)
        value = value[-1] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


IMAGE = ("image_size", "patch_size")
SOUND = ("num_mel_bins", "n_mels", "input_feat_size")
MEDIA = (
    Medium("vision", "image", ("pixel_values", "images"), _images, IMAGE),
    Medium("vision", "image", ("flattened_patches",), _flattened_patches, (*IMAGE, "patch_embed_hidden_size")),
    Medium("vision", "video", ("pixel_values_videos",), _images, IMAGE),
    Medium("audio", "audio", ("input_features", "input_values", "audio_values"), _sounds, SOUND),
    Medium("text", "layout", ("bbox",), _boxes, ()),
)


# Calls that run the towers of a model, which a sample of text does not reach: the model with an
# image or a sound in each form; its functions for the features of a medium; each submodule that is
# a model itself.

R = TypeVar("R")


@dataclass(frozen=True)
class TowerCall:
    """One call. `modality`: `vision`, `audio` or `text`."""

    modality: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(**self.arguments)


def run_on_sample(
    model: nn.Module, sample: Mapping[str, Any] | None, run: Callable[[Mapping[str, Any]], R]
) -> tuple[Mapping[str, Any], R]:
    """Runs on a copy of `sample`, else on inputs made for the model. Returns the arguments and the
    result. Raises: the error of the plain inputs.
    """
    if sample is not None:
        return copy_sample(sample), run(copy_sample(sample))
    plain: Mapping[str, Any] = {}
    try:
        plain = sample_inputs(model)
        return plain, run(plain)
    except Exception as error:
        if isinstance(error, PeftcError) and error.diagnostics[0].code != "P507":
            raise
        for call in _model_calls(model, plain):
            try:
                return call.arguments, run(call.arguments)
            except PeftcError:
                raise
            except Exception:  # the model does not take this form either
                continue
        raise


def tower_calls(
    model: nn.Module, sample: Mapping[str, Any], has_unreached_layers: Callable[[str], bool]
) -> Iterator[TowerCall]:
    """Calls to try, those of the whole model first."""
    yield from _model_calls(model, sample)
    for medium in MEDIA:
        for owner in (model, getattr(model, "base_model", model)):
            getter = getattr(owner, f"get_{medium.feature}_features", None)
            if getter is not None:
                yield from _medium_calls(getter, model, medium, {})
    for name, tower in model.named_modules():
        if name and isinstance(tower, PreTrainedModel) and has_unreached_layers(name):
            yield from _calls_of(tower)


def _model_calls(model: nn.Module, sample: Mapping[str, Any]) -> Iterator[TowerCall]:
    parameters = inspect.signature(model.forward).parameters
    text = {"input_ids": token_ids()} if "input_ids" in parameters else {}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        text["decoder_input_ids"] = token_ids()
    for medium in MEDIA:
        yield from _medium_calls(model.forward, model, medium, {**text, **sample})


def _medium_calls(
    function: Callable[..., Any], model: nn.Module, medium: Medium, others: Mapping[str, Any]
) -> Iterator[TowerCall]:
    for inputs in medium.inputs(model, inspect.signature(function).parameters):
        yield TowerCall(medium.modality, function, {**others, **inputs})


def _calls_of(tower: PreTrainedModel) -> Iterator[TowerCall]:
    parameters = inspect.signature(tower.forward).parameters
    declared: Any = tower.input_modalities
    declared = {declared} if isinstance(declared, str) else set(declared)
    names = {tower.main_input_name, next(iter(parameters), None)}
    for medium in MEDIA:
        admits = bool(names & set(medium.parameters)) or declared == {medium.feature}
        if admits or tower.main_input_name == "hidden_states":
            for inputs in medium.inputs(tower, parameters, any_name=True):
                yield TowerCall(medium.modality, tower.forward, inputs)
    if "input_ids" in parameters:
        yield TowerCall("text", tower.forward, {"input_ids": token_ids()})
