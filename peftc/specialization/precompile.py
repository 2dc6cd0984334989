"""Makes the variants of ordinary calls ahead of the first call, by running a copy without data."""

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
from peftc.fakes.python_globals import unchanged_globals
from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.models.media import run_on_sample, tower_calls
from peftc.models.samples import copy_sample, further_samples
from peftc.observation.sample_forward import skip_repeated
from peftc.recognition.layer_candidates import repeated_blocks
from peftc.specialization.generated_class import specializing_both_modes

STATIC_LENGTH = 32  # of static caches: more tokens than the sample has


def precompile(model: nn.Module, sample: Mapping[str, Any] | None = None) -> None:
    """Runs ordinary calls: with and without mask and cache, and the next token.

    Of layers with the same code only one runs, so the time does not depend on depth.
    Raises: P409 for an edited model whose plain call fails.
    """
    fake = fake_copy(model, whole=True).eval()
    reached: set[str] = set()
    try:
        inputs, out = run_on_sample(fake, sample, lambda inputs: run(fake, lambda: fake(**inputs), reached))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return  # the model's own code branches on values: variants are made when calls come up
    except PeftcError:
        raise
    except Exception as error:  # whatever the model's own code raises
        message = f"the edited {type(model).__name__} does not run: {type(error).__name__}"
        raise PeftcError(Diagnostic("P409", message, notes=(str(error).partition("\n")[0],))) from error
    for other in map(copy_sample, further_samples(sample)):
        with contextlib.suppress(Exception):  # its variants are made when such a call comes up
            run(fake, lambda other=other: fake(**other), reached)
    for calls, training in ((ordinary_calls, True), (static_cache_calls, False)):
        for call in calls(fake, dict(inputs), out):
            with contextlib.suppress(Exception):  # not every model takes each of these calls
                run(fake, lambda call=call: fake(**call), reached, training)
    run_towers(fake, inputs, reached)


def run_towers(fake: nn.Module, inputs: Mapping[str, Any], reached: set[str]) -> None:
    """Runs parts of the model, for other layers. Raises: errors of edits that no call reaches."""
    layers, errors = set(repeated_blocks(fake)), list[PeftcError]()
    for call in tower_calls(fake, inputs, lambda name: any(n.startswith(name + ".") for n in layers - reached)):
        if layers <= reached:
            return
        try:
            run(fake, call, reached)
        except PeftcError as error:
            errors.append(error)
        except Exception:  # the part does not take these inputs
            continue
    if errors and not layers <= reached:
        raise errors[0]


def run(fake: nn.Module, call: Callable[[], Any], reached: set[str], training: bool = True) -> Any:
    """Runs one call without data, of one layer of each kind. Adds layers to `reached`."""
    names = {id(m): n for n, m in fake.named_modules()}
    layers = [fake.get_submodule(n) for n in repeated_blocks(fake)]
    modes = specializing_both_modes() if training else contextlib.nullcontext()
    skipped = skip_repeated(fake, layers)
    with (
        unchanged_globals(fake),
        contextlib.ExitStack() as hooks,
        fake_mode(fake),
        fake_data_answers(),
        torch.no_grad(),
        modes,
        skipped,
    ):
        for layer in layers:
            hooks.callback(layer.register_forward_hook(lambda m, a, o: reached.add(names[id(m)])).remove)
        return call()


def ordinary_calls(fake: nn.Module, inputs: dict[str, Any], out: Any) -> Iterator[dict[str, Any]]:
    """Calls that make other variants than the plain one."""
    accepted = inspect.signature(type(fake).forward).parameters
    main = inputs.get("input_ids")
    mask: dict[str, Any] = {}
    if isinstance(main, torch.Tensor) and "attention_mask" in accepted and "attention_mask" not in inputs:
        mask = {"attention_mask": torch.ones_like(main)}
        yield {**inputs, **mask}
    cache = getattr(out, "past_key_values", None)
    if cache is not None:
        yield {**next_token(inputs, out, accepted), "past_key_values": cache, "use_cache": True}
        yield {**inputs, **mask, "use_cache": False}


def static_cache_calls(fake: nn.Module, inputs: dict[str, Any], out: Any) -> Iterator[dict[str, Any]]:
    """A call with a static cache, whose length is a tensor, and the next token."""
    if getattr(out, "past_key_values", None) is None:
        return
    try:
        config: Any = fake.config
        decoder = config.get_text_config(decoder=True)
        cache: Any = StaticCache(config=decoder, max_cache_len=STATIC_LENGTH)
        if config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, StaticCache(config=decoder, max_cache_len=STATIC_LENGTH))
    except Exception:  # not every model has such a cache
        return
    yield {**inputs, "past_key_values": cache, "use_cache": True}
    accepted = inspect.signature(type(fake).forward).parameters
    yield {**next_token(inputs, out, accepted), "past_key_values": cache, "use_cache": True}


def next_token(inputs: dict[str, Any], out: Any, accepted: Mapping[str, Any]) -> dict[str, Any]:
    encoded = getattr(out, "encoder_last_hidden_state", None)
    if encoded is None or "decoder_input_ids" not in inputs:
        return {n: v[:, :1] if n == "input_ids" else v for n, v in inputs.items()}
    outputs = {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded)} if "encoder_outputs" in accepted else {}
    return {**outputs, "decoder_input_ids": inputs["decoder_input_ids"][:, :1]}
