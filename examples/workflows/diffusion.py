"""diffusers: LoRA on models of pipelines, saved and loaded beside these.

python examples/workflows/diffusion.py
"""

import tempfile
import warnings
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from models import SIZES, refusal, tokenizer
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

import peftc

SPEC = 'peft 2  edit qv at "**.to_[qv]" { h += lora(x, r=2) }'
TEXT = "peft 2  edit qv at layer[*].attn.{q, v} { h += lora(x, r=2) }"
UNET = {
    "sample": torch.zeros(1, 4, 8, 8),
    "timestep": torch.tensor([1]),
    "encoder_hidden_states": torch.zeros(1, 5, 32),
}
DIT = {"hidden_states": torch.zeros(1, 4, 8, 8), "timestep": torch.tensor([1]), "class_labels": torch.tensor([1])}
SMALL = {"block_out_channels": (32, 64), "layers_per_block": 1}


def write_pipelines(folder: Path) -> None:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **SMALL,
    )
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(latent_channels=4, **SMALL, **kinds)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = CLIPTextModel(CLIPTextConfig(max_position_embeddings=16, **sizes, **SIZES))
    words = tokenizer()
    words.model_max_length = 16
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    parts = (vae, text, words, unet, scheduler, None, None)
    StableDiffusionPipeline(*parts, requires_safety_checker=False).save_pretrained(folder / "sd")
    dit = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=100000,
    )
    DiTPipeline(dit, vae, scheduler).save_pretrained(folder / "dit")


def train(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Steps of the loss of diffusion: the noise is the target."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(peftc.parameters(model).values(), lr=0.01)
    first = next(iter(inputs))
    losses = []
    for _ in range(8):
        noise = torch.randn(inputs[first].shape, generator=torch.Generator().manual_seed(2))
        prediction = model(**{**inputs, first: noise})[0][:, :4]
        losses.append(nn.functional.mse_loss(prediction, noise))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.eval()


def picture(pipe, prompt) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    options = {"height": 16, "width": 16} if isinstance(pipe, StableDiffusionPipeline) else {}
    generator = torch.Generator().manual_seed(0)
    return torch.tensor(pipe(prompt, num_inference_steps=2, generator=generator, output_type="np", **options).images)


def unet(folder: Path) -> None:
    pipe = StableDiffusionPipeline.from_pretrained(folder / "sd")
    base = picture(pipe, "the cat sat")
    peftc.compile(SPEC, pipe.unet, seed=0, sample=UNET)
    train(pipe.unet, UNET)
    peftc.compile(TEXT, pipe.text_encoder, seed=0)
    for parameter in peftc.parameters(pipe.text_encoder).values():
        nn.init.normal_(parameter, std=0.1)
    edited = picture(pipe, "the cat sat")
    assert not torch.equal(edited, base)

    # Each part that is edited is saved as an adapter; the others as ever.
    pipe.save_pretrained(folder / "saved")
    assert (folder / "saved" / "unet" / "adapter.json").is_file()
    assert "no file" in refusal(lambda: UNet2DConditionModel.from_pretrained(folder / "saved" / "unet"))
    refusal(lambda: StableDiffusionPipeline.from_pretrained(folder / "saved"))
    parts = {
        "unet": peftc.from_pretrained(folder / "saved" / "unet", sample=UNET),
        "text_encoder": peftc.from_pretrained(folder / "saved" / "text_encoder"),
    }
    loaded = StableDiffusionPipeline.from_pretrained(folder / "saved", **parts)
    assert torch.equal(picture(loaded, "the cat sat"), edited)

    other = StableDiffusionPipeline.from_pretrained(folder / "sd")
    peftc.load(folder / "saved" / "unet", other.unet, sample=UNET)
    peftc.load(folder / "saved" / "text_encoder", other.text_encoder)
    assert torch.equal(picture(other, "the cat sat"), edited)
    peftc.fold(other.unet)
    peftc.fold(other.text_encoder)
    other.save_pretrained(folder / "folded")
    torch.testing.assert_close(
        picture(StableDiffusionPipeline.from_pretrained(folder / "folded"), "the cat sat"), edited, rtol=0, atol=1e-4
    )
    print("unet: pipelines that are saved, loaded and folded agree")


def transformer(folder: Path) -> None:
    pipe = DiTPipeline.from_pretrained(folder / "dit", torch_dtype=torch.bfloat16)
    half = {name: value.bfloat16() if value.is_floating_point() else value for name, value in DIT.items()}
    peftc.compile(SPEC, pipe.transformer, seed=0, sample=half)
    pipe = DiTPipeline.from_pretrained(folder / "dit")
    peftc.compile(SPEC, pipe.transformer, seed=0, sample=DIT)
    train(pipe.transformer, DIT)
    pipe.transformer.save_pretrained(folder / "adapter")
    loaded = peftc.from_pretrained(folder / "adapter", sample=DIT)
    other = DiTPipeline.from_pretrained(folder / "dit", transformer=loaded)
    assert torch.equal(picture(other, [1]), picture(pipe, [1]))
    print("transformer: an adapter beside its pipeline agrees")


def pattern(folder: Path) -> None:
    model = UNet2DConditionModel.from_pretrained(folder / "sd" / "unet")
    spec = 'peft 2  edit q at "*.to_q" { h += lora(x, r=2) }'
    assert '"**.to_q"' in refusal(lambda: peftc.compile(spec, model, sample=UNET))
    print("pattern: the message and the names of the modules agree")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as work:
        write_pipelines(Path(work))
        unet(Path(work))
        transformer(Path(work))
        pattern(Path(work))
