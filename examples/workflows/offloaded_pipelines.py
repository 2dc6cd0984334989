"""diffusers: pipelines whose edited models are offloaded, before or after they are compiled.

python examples/workflows/offloaded_pipelines.py
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.hooks import apply_group_offloading
from diffusers.utils import logging as diffusers_logging
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

import peftc

SPEC = 'peft 2  edit q at "**.to_q" { h += lora(x, r=2) }'
CPU = torch.device("cpu")
EMBEDS = {"prompt_embeds": torch.randn(1, 5, 32), "pooled_prompt_embeds": torch.randn(1, 32)}
NEGATIVE = {f"negative_{name}": torch.zeros_like(value) for name, value in EMBEDS.items()}
TEXT = {f"{part}{number}": None for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")}


def autoencoder(**options: Any) -> AutoencoderKL:
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [32, 64], "latent_channels": 4, "norm_num_groups": 8}
    return AutoencoderKL(**blocks, **sizes, **options).eval()


def stable_diffusion() -> Any:
    down, up = ["DownBlock2D", "CrossAttnDownBlock2D"], ["CrossAttnUpBlock2D", "UpBlock2D"]
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8, "attention_head_dim": 8}
    unet = UNet2DConditionModel(
        **sizes, down_block_types=down, up_block_types=up, cross_attention_dim=32, norm_num_groups=8
    )
    text = CLIPTextModel(CLIPTextConfig(hidden_size=32, intermediate_size=37, num_hidden_layers=1, vocab_size=50))
    none = dict.fromkeys(["tokenizer", "safety_checker", "feature_extractor"])
    parts = {"unet": unet.eval(), "vae": autoencoder(), "text_encoder": text, "scheduler": DDIMScheduler()}
    return StableDiffusionPipeline(**parts, **none, requires_safety_checker=False)


def dit() -> Any:
    sizes = {"sample_size": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "out_channels": 8}
    transformer = DiTTransformer2DModel(**sizes, patch_size=4)
    for parameter in transformer.parameters():  # which are zero where a layer is the identity at first
        nn.init.normal_(parameter, std=0.1)
    return DiTPipeline(transformer=transformer.eval(), vae=autoencoder(), scheduler=DDIMScheduler())


def flux() -> Any:
    sizes = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    widths = {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    transformer = FluxTransformer2DModel(**sizes, **widths, axes_dims_rope=[4, 4, 8]).eval()
    vae = autoencoder(shift_factor=0.06, scaling_factor=1.5)
    text = {name: value for name, value in TEXT.items() if "3" not in name}
    return FluxPipeline(transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(), **text)


def stable_diffusion_3() -> Any:
    sizes = {"sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8}
    widths = {"num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32}
    transformer = SD3Transformer2DModel(**sizes, **widths, pooled_projection_dim=32, out_channels=4).eval()
    vae = autoencoder(shift_factor=0.06, scaling_factor=1.5)
    scheduler = FlowMatchEulerDiscreteScheduler()
    return StableDiffusion3Pipeline(transformer=transformer, vae=vae, scheduler=scheduler, **TEXT)


IMAGE = {"height": 16, "width": 16}
PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "Stable Diffusion": (stable_diffusion, IMAGE | {k: v for k, v in (EMBEDS | NEGATIVE).items() if "pooled" not in k}),
    "DiT": (dit, {"class_labels": [1]}),
    "Flux": (flux, IMAGE | EMBEDS),
    "Stable Diffusion 3": (stable_diffusion_3, IMAGE | EMBEDS | NEGATIVE),
}
# Each takes a pipeline and the model that is edited.
OFFLOADING: dict[str, Callable[[Any, nn.Module], object]] = {
    "enable_model_cpu_offload": lambda pipeline, model: pipeline.enable_model_cpu_offload(device="cpu"),
    "group offloading by leaves": lambda pipeline, model: apply_group_offloading(model, CPU, offload_type="leaf_level"),
    "group offloading by blocks": lambda pipeline, model: apply_group_offloading(
        model, CPU, offload_type="block_level", num_blocks_per_group=1
    ),
}


def model_of(pipeline: Any) -> nn.Module:
    return pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer


def image(pipeline: Any, arguments: dict[str, Any]) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    return torch.tensor(
        pipeline(**arguments, num_inference_steps=2, generator=generator, output_type="np", return_dict=False)[0]
    )


def sample_of(pipeline: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model in a call of its pipeline, which `compile` and `load` need."""
    model, sample = model_of(pipeline), dict[str, Any]()

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        sample.update(inspect.signature(module.forward).bind(*args, **kwargs).arguments)

    with model.register_forward_pre_hook(record, with_kwargs=True):
        image(pipeline, arguments)
    return sample


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def randomise(model: nn.Module) -> None:
    for number, parameter in enumerate(peftc.parameters(model).values()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))


def without_offloading(make: Callable[[], Any], arguments: dict[str, Any]) -> torch.Tensor:
    pipeline = seeded(make)
    model, base, sample = model_of(pipeline), image(pipeline, arguments), sample_of(pipeline, arguments)
    peftc.compile(SPEC, model, sample=sample, seed=0)
    assert torch.equal(image(pipeline, arguments), base)
    randomise(model)
    edited = image(pipeline, arguments)
    assert (edited - base).abs().max() > 1e-4
    return edited


def offload(make: Callable[[], Any], arguments: dict[str, Any], edited: torch.Tensor) -> Iterator[str]:
    """Before and after compilation."""
    for name, enable in OFFLOADING.items():
        for first in (True, False):
            pipeline = seeded(make)
            model, base, sample = model_of(pipeline), image(pipeline, arguments), sample_of(pipeline, arguments)
            if first:
                enable(pipeline, model)
            peftc.compile(SPEC, model, sample=sample, seed=0)
            randomise(model)
            if not first:
                enable(pipeline, model)
            assert torch.equal(image(pipeline, arguments), edited), (name, first)
            peftc.remove(model)
            assert torch.equal(image(pipeline, arguments), base), (name, first)
        yield name


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    for title, (build, call) in PIPELINES.items():
        names = offload(build, call, without_offloading(build, call))
        print(f"{title}: without offloading and with {', '.join(names)} agree")
