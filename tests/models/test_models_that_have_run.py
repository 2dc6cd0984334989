"""Analysis of a model that has run: what a forward leaves behind in a model changes nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import peftc
from tests import zoo

LORA = "peft 1  edit q at layer[*].attn.q { h += lora(x, r=2) }"


def llava() -> tuple[Any, dict[str, torch.Tensor]]:
    """Its vision tower hands over a hidden state, which transformers records by hooks."""
    small: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**small, image_size=8, patch_size=4)
    text: Any = LlamaConfig(**small, vocab_size=zoo.VOCAB)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)
    torch.manual_seed(0)
    ids = torch.tensor([[7, 5, 5, 5, 5, 9]])
    return LlavaForConditionalGeneration(config).eval(), {"input_ids": ids, "pixel_values": torch.rand(1, 3, 8, 8)}


def of(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    if name == "llava":
        return llava()
    model = zoo.build(name)
    return model, zoo.inputs(name, model)


def uses(model: Any, inputs: dict[str, torch.Tensor]) -> Iterator[Callable[[], Any]]:
    """Ways in which a model is used before it is analysed, one after the other."""
    yield lambda: model(**inputs)
    yield lambda: model(**inputs, output_hidden_states=True)
    yield lambda: model(**inputs, output_attentions=True)
    if model.can_generate():
        prompt = {name: value for name, value in inputs.items() if name != "labels"}
        yield lambda: model.generate(**prompt, max_new_tokens=2)
    yield lambda: model.train()(**inputs)
    yield lambda: model.eval()


@pytest.mark.parametrize("name", [*zoo.SPECIES, "llava"])
def test_the_table_is_the_same_after_every_use(name: str) -> None:
    model, inputs = of(name)
    table = peftc.sites(model)
    assert len(table.sites) > 20
    assert peftc.sites(model) == table
    for use in uses(model, inputs):
        use()
        assert peftc.sites(model) == table


@pytest.mark.parametrize("name", ["bart", "llama", "llava"])
def test_plan_and_compilation_are_those_of_a_new_model(name: str) -> None:
    (new, inputs), (old, _) = of(name), of(name)
    for use in uses(old, inputs):
        use()
    assert peftc.plan(LORA, old) == peftc.plan(LORA, new)
    for model in (new, old):
        peftc.compile(LORA, model, seed=0)
        with torch.no_grad():
            for parameter in peftc.parameters(model).values():
                parameter.fill_(0.1)
    assert torch.equal(old(**inputs).logits, new(**inputs).logits)
    peftc.remove(old)
    assert peftc.sites(old) == peftc.sites(new)


def test_hooks_of_users_do_not_run() -> None:
    """The model's class is a library's; the hook is not."""
    model, _ = llava()
    calls: list[nn.Module] = []
    model.model.register_forward_hook(lambda module, *_: calls.append(module))
    peftc.sites(model)
    assert not calls
