"""Builds skeletons, models of fake tensors without memory for weights, and the smallest inputs that
make them run.
"""

import inspect
import threading
from collections.abc import Callable, Generator, Mapping
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, UnsupportedOperatorException
from torch.utils._pytree import tree_map_only

from peftc.concurrency.garbage_collection import paused_gc
from peftc.concurrency.interrupts import shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.model_line import definition_line, model_line
from peftc.diagnostics.suggestions import join_names
from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.lazy_layers import lazy_copy
from peftc.fakes.tensors import fake_copy, fake_mode, make_fake
from peftc.models.names import error_summary
from peftc.models.samples import copy_sample, further_samples, joint_sample
from peftc.models.sources import ModelSource

BATCH, TOKENS, DECODER_TOKENS = 2, 5, 4
_building = threading.RLock()  # one model at a time has its functions of `nn.init` patched


def sample_inputs(model: nn.Module) -> dict[str, Any]:
    """Fake inputs for a skeleton's forward. Raises: P507 if its main input is of unknown kind."""
    # There is no mask: transformers reads a mask's data, and a fake tensor has none.
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", None)
    make = _MAKERS.get(name) if config is not None and isinstance(name, str) else None
    if make is None or not isinstance(name, str):
        reason = f"its main input is `{name}`" if isinstance(name, str) else "it has no `main_input_name`"
        notes = (reason, f"known inputs: {', '.join(_MAKERS)}", forward_arguments(model))
        message = f"no sample input can be made for {type(model).__name__}"
        help_ = known_part(model) or "give a sample: `sample={name: tensor}`"
        raise PeftcError(Diagnostic("P507", message, notes=notes, help=help_))
    parameters = inspect.signature(model.forward).parameters
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with fake_mode(model), torch.device(device):
        inputs: dict[str, Any] = {name: make(config)}
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
            inputs["decoder_input_ids"] = token_ids(DECODER_TOKENS)
    dtype = floating_dtype(model)
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def known_part(model: nn.Module) -> str | None:
    """What to do where an outermost part of a model has an input that can be made; None without."""
    # Seen in: the models of sentence-transformers
    for name, part in model.named_modules():
        if getattr(part, "main_input_name", None) in _MAKERS and getattr(part, "config", None) is not None:
            return f'its `{name}` is a {type(part).__name__}: compile `model.get_submodule("{name}")`, or give a sample'
    return None


def forward_arguments(model: nn.Module) -> str:
    """The names of the arguments of a model's forward, and where it is defined."""
    names, line = list(inspect.signature(model.forward).parameters), definition_line(model.forward)
    text = f"its forward takes {join_names(names)}" if names else "its forward takes nothing"
    return text if line is None else f"{text}, at {line}"


def token_ids(tokens: int = TOKENS) -> torch.Tensor:
    return torch.ones(BATCH, tokens, dtype=torch.long)


def floating_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _pixels(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = vision.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.zeros(BATCH, getattr(vision, "num_channels", 3), height, width)


_MAKERS: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": lambda config: token_ids(),
    "pixel_values": _pixels,
    "input_features": lambda config: torch.zeros(BATCH, config.num_mel_bins, 2 * config.max_source_positions),
    "input_values": lambda config: torch.zeros(BATCH, 16_000),
}


def stop_notes(error: BaseException) -> tuple[str, ...]:
    """What an error of a model's own code says, and the line of that code."""
    line = model_line(error)
    return (error_summary(error), *(() if line is None else (f"at {line}",)))


def skeleton(source: ModelSource) -> nn.Module:
    """The model of `source` with fake tensors, in eval mode; call it inside `fake_mode(skeleton)`.

    A module is copied in at least float32: code that guards half precision reads values.
    Raises: P506 if the configuration's values do not fit together.
    """
    if source.module is not None:
        return lazy_copy(source.module, True, source.rows) or fake_copy(source.module, widen=True, whole=True)
    return make_fake(meta_model(source))


def skeleton_sample(source: ModelSource, sample: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A sample of a source's model for its skeleton, whose weights are in at least float32."""
    if sample is None or source.module is None:
        return sample
    widened = [tree_map_only(torch.Tensor, _widened, dict(one)) for one in (sample, *further_samples(sample))]
    return joint_sample(None, widened)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def meta_model(source: ModelSource) -> nn.Module:
    """The model of a configuration on the meta device, tied, in eval mode. Raises: P506."""
    assert source.model_class is not None
    assert source.config is not None
    try:
        # As in `from_pretrained`, the meta device skips initialisation, and weights are tied.
        with paused_gc(), torch.device("meta"), initialization_skipped():
            model = source.model_class(source.config).eval()
    except Exception as error:  # a model's __init__ raises whatever its own checks raise
        message = f"{source.model_class.__name__} cannot be built from the configuration of {source.id}"
        raise PeftcError(Diagnostic("P506", message, notes=(error_summary(error),))) from error
    if source.untied_head:
        # Some config classes force `tie_word_embeddings` to True. `from_pretrained` unties them if
        # the checkpoint holds two matrices; a skeleton has no checkpoint. Seen in: T5.
        head, weight = model.get_output_embeddings(), model.get_input_embeddings().weight
        if isinstance(head, nn.Module) and isinstance(weight, torch.Tensor) and head.weight is weight:
            head.weight = nn.Parameter(torch.empty_like(weight))
    return model


@shielded
def initialization_skipped() -> Generator[None]:
    """Inside the block, functions of `nn.init` leave tensors on the meta device alone: they would
    compute bounds and ask for a generator, for no values.
    """

    def skipping(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return tensor if tensor.is_meta else function(tensor, *args, **kwargs)

        return initialize

    with _building:
        members = vars(nn.init).items()
        originals = {name: function for name, function in members if name.endswith("_") and name[0] != "_"}
        try:
            for name, function in originals.items():
                setattr(nn.init, name, skipping(function))
            yield
        finally:
            for name, function in originals.items():
                setattr(nn.init, name, function)


def needs_data(error: BaseException) -> bool:
    """Whether code has stopped at an operation that fake tensors do not have."""
    texts = ("data pointer", "no fake impl registered")  # of errors of PyTorch that have no class of their own
    is_text = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return is_text or isinstance(error, UnsupportedOperatorException | DynamicOutputShapeException)


def check_runs(source: ModelSource, sample: Mapping[str, Any] | None) -> None:
    """Raises: P507 if the model does not run on inputs made for it; P509 if not on `sample`."""
    try:
        fake = skeleton(source).eval()
    except PeftcError:
        raise
    except Exception as error:  # whatever copying an attribute of a module raises
        message = f"{source.id} cannot be analysed: the analysis runs on a copy without data, and copying it fails"
        raise PeftcError(Diagnostic("P509", message, notes=stop_notes(error))) from error
    sample = skeleton_sample(source, sample)
    if next(chain(fake.parameters(), fake.buffers()), None) is None:
        message = f"{source.id} has no parameters and no buffers, so there is nothing to edit"
        raise PeftcError(Diagnostic("P509", message, help="give the model itself, not one of its functions"))
    try:
        for inputs in map(copy_sample, (sample_inputs(fake) if sample is None else sample, *further_samples(sample))):
            with fake_mode(fake), fake_data_answers(), torch.no_grad():
                fake(**inputs)
    except PeftcError:
        return
    except Exception as error:  # whatever the model's own code raises
        notes = (*stop_notes(error), forward_arguments(fake))
        help_ = "if the model itself runs on it, its code asks what is in a tensor, such as a mask: the analysis has "
        help_ += "tensors without data"
        diagnostic = Diagnostic("P509", f"{source.id} does not run on the given sample", notes=notes, help=help_)
        if needs_data(error):
            message = f"{source.id} cannot be analysed: its code asks for the data of tensors"
            help_ = "the analysis runs on tensors without data: make an operation of this code, and give it a fake "
            help_ += "implementation by `torch.library.register_fake`"
            raise PeftcError(Diagnostic("P509", message, notes=stop_notes(error), help=help_)) from error
        if sample is None:
            message = f"{source.id} does not run on the sample that was made from its configuration"
            diagnostic = Diagnostic("P507", message, notes=notes, help="give a sample: `sample={name: tensor}`")
        raise PeftcError(diagnostic) from error
