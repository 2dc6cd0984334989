"""Skeletons: models with fake tensors that have the same structure, no data, and leave the original
untouched.
"""

import copy
import threading
import time
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from peftc.fakes.data_answers import fake_tensor_patches
from peftc.fakes.tensors import as_fake, fake_copy, fake_mode, make_fake, new_mode
from peftc.models.identity import fingerprint, parameter_count, tied_groups
from peftc.models.skeleton import initialization_skipped, sample_inputs, skeleton
from peftc.models.sources import resolve
from tests import zoo


@pytest.mark.parametrize("name", zoo.ALL)
def test_a_copy_has_the_same_structure_and_no_data(name: str) -> None:
    model = zoo.build(name, torch.float64)
    fake = fake_copy(model)
    tensors = {**dict(fake.named_parameters(remove_duplicate=False)), **dict(fake.named_buffers())}
    originals = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert list(tensors) == list(originals)
    for key, tensor in tensors.items():
        assert isinstance(tensor, FakeTensor), key
        assert (tensor.shape, tensor.dtype, tensor.stride()) == (
            originals[key].shape,
            originals[key].dtype,
            originals[key].stride(),
        )
    assert [type(m) for m in fake.modules()] == [type(m) for m in model.modules()]
    assert tied_groups(fake) == tied_groups(model)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_the_copy_gives_the_shapes_that_the_model_gives(name: str) -> None:
    model = zoo.build(name)
    fake = fake_copy(model)
    with fake_mode(fake), torch.no_grad():
        shape = fake(**sample_inputs(fake))[0].shape
    inputs = zoo.inputs(name, model, batch=2, tokens=5, decoder_tokens=4)
    assert shape == model(**inputs)[0].shape


def test_flags_are_kept_and_hooks_stay_behind() -> None:
    model = zoo.build("bart").train()
    model.model.encoder.eval()
    model.model.shared.weight.requires_grad_(False)
    calls: list[str] = []
    model.model.encoder.register_forward_hook(lambda *_: calls.append("hook"))
    fake = fake_copy(model)
    assert [m.training for m in fake.modules()] == [m.training for m in model.modules()]
    assert [p.requires_grad for p in fake.parameters()] == [p.requires_grad for p in model.parameters()]
    with fake_mode(fake), torch.no_grad():
        fake(**sample_inputs(fake))
    assert calls == []
    model(**zoo.inputs("bart", model))
    assert calls == ["hook"]


def test_the_original_is_untouched() -> None:
    model = zoo.build("qwen3")
    before, identities = copy.deepcopy(model.state_dict()), [id(p) for p in model.parameters()]
    fake = fake_copy(model)
    next(iter(fake.modules())).marker = True
    fake.config.hidden_size = 1
    assert [id(p) for p in model.parameters()] == identities
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not hasattr(model, "marker")
    assert model.config.hidden_size == 32


def test_tensors_outside_parameters_and_buffers_are_faked_too() -> None:
    model = nn.Linear(2, 2)
    model.table = [torch.ones(3), {"scale": torch.ones(())}]
    fake = fake_copy(model)
    assert isinstance(fake.table[0], FakeTensor)
    assert isinstance(fake.table[1]["scale"], FakeTensor)


def test_functions_that_cannot_be_copied_are_shared() -> None:
    model = nn.Linear(2, 2)
    model.apply_f, model.table = staticmethod(torch.sin), {"library": copy}
    for fake in (fake_copy(model), make_fake(nn.Sequential(model))[0]):
        assert fake.apply_f is model.apply_f
        assert fake.table["library"] is copy


def test_the_memory_does_not_depend_on_the_size() -> None:
    shared = torch.empty(1).expand(1 << 20, 1 << 15)  # a copy would take 128 GB
    big = nn.Linear(1, 1, bias=False)
    big.weight = nn.Parameter(shared)
    start = time.process_time()
    fake = fake_copy(big)
    assert time.process_time() - start < 1
    assert parameter_count(fake) == 1 << 35


def test_copies_can_share_a_mode() -> None:
    mode = new_mode()
    one, two = fake_copy(nn.Linear(2, 2), mode), fake_copy(nn.Linear(2, 2), mode)
    assert fake_mode(one) is fake_mode(two) is mode
    assert fake_copy(one, mode).weight is one.weight
    assert fake_mode(fake_copy(one)) is not mode


def test_a_real_model_has_no_mode() -> None:
    with pytest.raises(ValueError, match="not a skeleton"):
        fake_mode(nn.Linear(2, 2))


def test_a_skeleton_is_on_the_cpu_in_float32() -> None:
    model = skeleton(resolve("gpt2"))
    tensors = [*model.parameters(), *model.buffers()]
    assert {t.device for t in tensors} == {torch.device("cpu")}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training


def test_a_skeleton_of_a_model_that_is_spread_over_devices_is_on_one() -> None:
    model = fake_copy(zoo.build("llama"))
    last = model.model.layers[-1]
    for linear in (m for m in last.modules() if isinstance(m, nn.Linear)):
        linear.weight = as_fake(linear.weight, new_mode(), device=torch.device("cuda:1"))
    assert {t.device.type for t in skeleton(resolve(model)).parameters()} == {"cpu", "cuda"}
    add_hook_to_module(last, AlignDevicesHook("cuda:1"))
    fake = skeleton(resolve(model))
    assert {t.device for t in (*fake.parameters(), *fake.buffers())} == {torch.device("cpu")}
    with fake_mode(fake), torch.no_grad():
        assert fake(**sample_inputs(fake)).logits.device.type == "cpu"


def test_a_skeleton_of_405_billion_is_built_at_once() -> None:
    start = time.process_time()
    model = skeleton(resolve("meta-llama/Llama-3.1-405B"))
    assert time.process_time() - start < 15
    assert len(fingerprint(model)) == 64


def test_threads_that_take_turns_leave_modules_as_they_were() -> None:
    plain, entered, done = nn.Module.to, threading.Event(), threading.Event()

    def first() -> None:
        with fake_tensor_patches():
            entered.wait(5)

    def second() -> None:
        with fake_tensor_patches():
            entered.set()
            done.wait(5)

    one, other = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    other.start()
    one.join()
    done.set()
    other.join()
    assert nn.Module.to is plain


@pytest.mark.parametrize("name", zoo.SPECIES)
def test_a_model_that_is_made_fake_is_its_copy(name: str) -> None:
    """Names, layouts, ties and attributes; no tensor of the model is left."""
    with torch.device("meta"):
        model = type(zoo.build(name))(zoo.config(name)).eval()
    copied, fake = fake_copy(model), make_fake(model)
    assert fake is model
    for one, other in ((copied.named_parameters, fake.named_parameters), (copied.named_buffers, fake.named_buffers)):
        known, tensors = dict(one(remove_duplicate=False)), dict(other(remove_duplicate=False))
        assert list(known) == list(tensors)
        assert all(isinstance(t, FakeTensor) and t.fake_mode is fake_mode(fake) for t in tensors.values())
        assert [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in known.values()] == [
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors.values()
        ]
    assert tied_groups(copied) == tied_groups(fake)
    left = [value for module in fake.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    assert all(isinstance(tensor, FakeTensor) for tensor in left)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_first_values_are_computed_where_there_is_memory_for_them() -> None:
    before = dict(vars(nn.init))
    with initialization_skipped():
        with torch.device("meta"), Operations() as operations:
            assert nn.Linear(3, 2).weight.is_meta
            assert nn.init.constant_(tensor=torch.empty(2), val=3).is_meta
        assert operations.names == {"aten.empty.memory_format"}
        assert nn.init.constant_(torch.empty(2), 3).tolist() == [3, 3]
        torch.manual_seed(0)
        inside = nn.Linear(3, 2).weight
    torch.manual_seed(0)
    assert torch.equal(inside, nn.Linear(3, 2).weight)
    assert dict(vars(nn.init)) == before
