"""Images and sounds in each of the shapes in which models take them, small and without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BATCH, TOKENS = 2, 5
SIDE = 4  # patches along each side of an image that comes as patches
FRAMES = 32  # of a sound that comes as a spectrogram
SAMPLES = 19_200  # of a sound that comes as a wave: frames of many lengths divide it
PIXELS = 224  # along each side of an image where the configuration does not say

Accepted = Mapping[str, Any]
Shapes = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Form:
    """A shape of an input, and the arguments that may go with it; one of which must, where the form is `told` by them."""

    value: torch.Tensor
    beside: Mapping[str, Any] = field(default_factory=dict[str, Any])
    told: bool = False


@dataclass(frozen=True)
class Medium:
    """A sort of input. `feature`: its name in `get_…_features`; `main`: how a forward may call it."""

    word: str
    feature: str
    main: tuple[str, ...]
    make: Callable[[Any], Iterator[Form]]
    keys: tuple[str, ...]  # fields of a configuration that is about it

    def reads(self, part: Any, first: str | None) -> bool:
        """Whether a model says that this is what it takes; `first`: how its forward calls what it takes first."""
        said = part.input_modalities
        said = {said} if isinstance(said, str) else set(said)
        named = part.main_input_name in self.main or first in self.main
        return named or said == {self.feature} or part.main_input_name == "hidden_states"

    def shapes(self, model: nn.Module, accepted: Accepted, first: str | None = None) -> Shapes:
        """The arguments of a function that takes this medium, in each shape that it could have.

        `first`: the function may call the medium as it likes; it is its first parameter.
        """
        name = next((n for n in self.main if n in accepted), None) or (first and next(iter(accepted), None))
        if not name:
            return
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        for form in self.make(section(getattr(model, "config", None), self.keys)):
            more = {n: v for n, v in form.beside.items() if n in accepted}
            if more or not form.told:
                yield {name: form.value.to(dtype), **more}


def section(config: Any, keys: tuple[str, ...]) -> Any:
    """The first part of a configuration, from the outside in, that has any of these fields."""
    level = [config]
    for _ in range(4):
        for part in level:
            if any(getattr(part, key, None) is not None for key in keys):
                return part
        inner = [getattr(part, name, None) for part in level for name in getattr(part, "sub_configs", {})]
        level = [part for part in inner if part is not None]
    return config


def images(config: Any) -> Iterator[Form]:
    """Whole images; images among several of a text, or cut into tiles; and patches, with the grid that they come from or without."""
    size = number(config, "image_size", "img_size") or PIXELS
    channels = number(config, "num_channels", "in_channels", "in_chans") or 3
    patch = number(config, "patch_size") or 14
    frames = number(config, "temporal_patch_size")
    tiles = number(config, "max_num_tiles") or 1
    for deep in (frames,) if frames else (1, 2):
        yield from patched(channels * deep, patch, SIDE * (number(config, "spatial_merge_size", "merge_size") or 1))
    whole = torch.ones(BATCH, channels, size, size)  # one that is black may be taken for none
    sizes = torch.tensor([[size, size]] * BATCH)
    beside = {
        "image_sizes": sizes,
        "original_sizes": sizes,
        "target_sizes": sizes // patch,
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, tiles, dtype=torch.long),
        "qformer_input_ids": torch.ones(BATCH, TOKENS, dtype=torch.long),
        "image_attention_mask": torch.ones(BATCH, TOKENS, 1, dtype=torch.long),
    }
    yield Form(whole, beside)
    yield Form(whole[:, None], beside)
    yield Form(whole[:, None, None].repeat(1, 1, tiles, 1, 1, 1), beside)
    yield Form(whole[:, None].repeat(1, 2, 1, 1, 1), beside)
    side = size // patch
    yield Form(torch.zeros(1, channels, patch, BATCH * side**2 * patch), {"target_sizes": sizes // patch}, told=True)
    yield Form(torch.zeros(BATCH, side**2, channels * patch**2))


def patched(channels: int, patch: int, side: int) -> Iterator[Form]:
    """An image as its patches, with the grid that they come from: those of all images in one row, or of each in its own."""
    grid = torch.tensor([[1, side, side]] * BATCH)
    grids = {
        **dict.fromkeys(("image_grid_thw", "grid_thw", "video_grid_thw"), grid),
        **dict.fromkeys(("image_grid_hws", "grid_hw", "grid_hws", "image_grid_hw"), grid[:, 1:]),
        "merge_sizes": torch.ones(BATCH, dtype=torch.long),
        "image_merge_sizes": torch.ones(BATCH, dtype=torch.long),
    }
    patches = torch.zeros(BATCH * side * side, channels * patch * patch)
    yield Form(patches, grids, told=True)
    yield Form(patches.reshape(-1, channels, patch, patch), grids, told=True)
    steps = torch.arange(side)
    places = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1).reshape(1, -1, 2).repeat(BATCH, 1, 1)
    rows = {
        "spatial_shapes": grid[:, 1:],
        "pixel_attention_mask": torch.ones(BATCH, side * side, dtype=torch.long),
        **dict.fromkeys(("image_position_ids", "pixel_position_ids"), places),
    }
    yield Form(patches.reshape(BATCH, side * side, -1), rows, told=True)


def flattened(config: Any) -> Iterator[Form]:
    """Each patch after its row and column."""
    width = number(config, "patch_embed_hidden_size")
    width = width or (number(config, "num_channels") or 3) * (number(config, "patch_size") or 16) ** 2
    yield Form(torch.ones(BATCH, SIDE * SIDE, 2 + width), {"attention_mask": torch.ones(BATCH, SIDE * SIDE)})


def boxes(config: Any) -> Iterator[Form]:
    """Where on a page each token stands."""
    yield Form(torch.zeros(BATCH, TOKENS, 4))


def sounds(config: Any) -> Iterator[Form]:
    """Spectrograms, bands before frames and after them, and waves."""
    bands = number(config, "num_mel_bins", "input_feat_size", "feature_size", "n_mels", "input_dim") or 80
    frames = 2 * (number(config, "max_source_positions") or FRAMES)
    mask = torch.ones(BATCH, frames, dtype=torch.long)
    masks: dict[str, Any] = dict.fromkeys(("input_features_mask", "feature_attention_mask", "audio_mel_mask"), mask)
    lengths = {"feature_lens": torch.tensor([frames] * BATCH), "aftercnn_lens": torch.tensor([frames // 2] * BATCH)}
    yield Form(torch.zeros(BATCH, bands, frames), {**masks, **lengths})
    yield Form(torch.zeros(bands, BATCH * frames), lengths, told=True)
    yield Form(torch.zeros(BATCH, frames, bands), masks)
    yield Form(torch.zeros(BATCH, SAMPLES))
    yield Form(torch.zeros(BATCH, 1, SAMPLES))


def number(config: Any, *names: str) -> int | None:
    """The first of these fields that is a number, or a pair of one number."""
    for name in names:
        value = getattr(config, name, None)
        value = value[-1] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


IMAGE = ("image_size", "patch_size")
SOUND = ("num_mel_bins", "n_mels", "input_feat_size")
MEDIA = (
    Medium("vision", "image", ("pixel_values", "images"), images, IMAGE),
    Medium("vision", "image", ("flattened_patches",), flattened, (*IMAGE, "patch_embed_hidden_size")),
    Medium("vision", "video", ("pixel_values_videos",), images, IMAGE),
    Medium("audio", "audio", ("input_features", "input_values", "audio_values"), sounds, SOUND),
    Medium("text", "layout", ("bbox",), boxes, ()),
)
