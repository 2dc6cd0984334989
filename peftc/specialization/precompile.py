"""Makes the variants of ordinary calls before the first call, by running a copy of the model that has no data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.models.tower_samples import run_on_sample, tower_calls
from peftc.observation.layer_candidates import repeated_blocks
from peftc.observation.layer_keys import structure_key
from peftc.observation.repeated_layers import skip_repeated
from peftc.specialization.generated_class import preparing

SIZE = 32  # of static caches: more tokens than the sample has


def prepare(model: nn.Module, sample: Mapping[str, Any] | None = None) -> None:
    """Runs what a model is ordinarily asked: with and without mask and cache, and the next token. Each layer that is like
    one that has run is left out, so the time does not depend on depth; what is learnt in evaluation is learnt for training.

    A model whose own code looks at values cannot be run so: then variants are made when they first come up.
    Raises: P409 for an edited model whose plain call fails.
    """
    fake = fake_copy(model, whole=True).eval()
    ran: set[str] = set()
    try:
        inputs, out = run_on_sample(fake, sample, lambda given: run(fake, lambda: fake(**given), ran))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return
    except PeftcError:
        raise
    except Exception as error:  # whatever the model's own code raises
        message = f"the edited {type(model).__name__} does not run: {type(error).__name__}"
        raise PeftcError(Diagnostic("P409", message, notes=(str(error).partition("\n")[0],))) from error
    for more in patterns(fake, dict(inputs), out):
        attempt(fake, more, ran)
    for more in of_fixed_size(fake, dict(inputs), out):
        attempt(fake, more, ran, training=False)
    run_parts(fake, inputs, ran)


def attempt(fake: nn.Module, inputs: Mapping[str, Any], ran: set[str], training: bool = True) -> None:
    with contextlib.suppress(Exception):  # not every model takes each of these calls
        run(fake, lambda: fake(**inputs), ran, training)


def run_parts(fake: nn.Module, inputs: Mapping[str, Any], ran: set[str]) -> None:
    """Calls that reach the layers which these inputs do not reach, where there are such calls.

    Raises: what an edit there is refused for.
    """
    layers, refused = set(repeated_blocks(fake)), list[PeftcError]()
    for call in tower_calls(fake, inputs, lambda name: any(n.startswith(name + ".") for n in layers - ran)):
        if layers <= ran:
            return
        try:
            run(fake, call, ran)
        except PeftcError as error:
            refused.append(error)
        except Exception:  # what was tried is not what this part takes
            continue
    if refused and not layers <= ran:
        raise refused[0]


def run(fake: nn.Module, call: Callable[[], Any], ran: set[str], training: bool = True) -> Any:
    """One call without data, of one layer of each kind. `ran`: the names of the layers that have run, added to.

    `training`: what is learnt is learnt for training, too.
    """
    names = {id(m): n for n, m in fake.named_modules()}
    layers = [fake.get_submodule(n) for n in repeated_blocks(fake)]
    done = [layer.register_forward_hook(lambda m, a, o: ran.add(names[id(m)])) for layer in layers]
    with (
        contextlib.ExitStack() as removing,
        fake_mode(fake),
        fake_data_answers(),
        torch.no_grad(),
        preparing() if training else contextlib.nullcontext(),
        skip_repeated(fake, layers, alike),
    ):
        for handle in done:
            removing.callback(handle.remove)
        return call()


def alike(layer: nn.Module) -> str:
    """What two layers share whose generated forwards are the same: more than their structure, edits included."""
    classes = ",".join(str(id(type(m))) for m in layer.modules())
    words = [(n, v) for m in layer.modules() for n, v in vars(m).items() if v is None or isinstance(v, str | bool)]
    return f"{structure_key(layer)} {classes} {words}"


def patterns(fake: nn.Module, inputs: dict[str, Any], out: Any) -> Iterator[dict[str, Any]]:
    """Calls that differ from the plain one in what Python sees of them."""
    accepted = inspect.signature(type(fake).forward).parameters
    main = inputs.get("input_ids")
    masked = isinstance(main, torch.Tensor) and "attention_mask" in accepted and "attention_mask" not in inputs
    mask = {"attention_mask": torch.ones_like(main)} if masked and main is not None else {}
    if mask:
        yield {**inputs, **mask}
    cache = getattr(out, "past_key_values", None)
    if cache is not None:
        yield {**following(inputs, out, accepted), "past_key_values": cache, "use_cache": True}
        yield {**inputs, **mask, "use_cache": False}


def of_fixed_size(fake: nn.Module, inputs: dict[str, Any], out: Any) -> Iterator[dict[str, Any]]:
    """A call with a static cache, whose length is a tensor, and the next token."""
    own: Any = fake
    accepted = inspect.signature(type(fake).forward).parameters
    if getattr(out, "past_key_values", None) is None:
        return
    try:
        config = own.config.get_text_config(decoder=True)
        cache: Any = StaticCache(config=config, max_cache_len=SIZE)
        if own.config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, StaticCache(config=config, max_cache_len=SIZE))
    except Exception:  # not every model has such a cache
        return
    yield {**inputs, "past_key_values": cache, "use_cache": True}
    yield {**following(inputs, out, accepted), "past_key_values": cache, "use_cache": True}


def following(inputs: dict[str, Any], out: Any, accepted: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the call for the next token."""
    encoded = getattr(out, "encoder_last_hidden_state", None)
    if encoded is None or "decoder_input_ids" not in inputs:
        return {n: v[:, :1] if n == "input_ids" else v for n, v in inputs.items()}
    given = {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded)} if "encoder_outputs" in accepted else {}
    return {**given, "decoder_input_ids": inputs["decoder_input_ids"][:, :1]}
