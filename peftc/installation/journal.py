"""What a transaction has done to a model, step by step, with what it takes to undo it: values of before among it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from tempfile import SpooledTemporaryFile, gettempdir
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.concurrency.interrupts import Deferral
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.runtime.parameters import is_quantised

IN_MEMORY = 2**24  # bytes; more is kept in a file


class Journal:
    """Writes new values into parameters and buffers. `undo` puts everything back, bit for bit.

    The old values go to a temporary file (in memory up to `IN_MEMORY` bytes), so that memory holds one of them at a time. The system
    deletes the file when the process ends, however it ends.
    """

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []  # that undo what was done
        self.file: Any = SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115  # `__exit__` closes it

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, model: nn.Module, name: str, value: Tensor) -> None:
        """Gives a parameter a value of its dtype and shape. One that is quantised, or missing, becomes a plain one. Raises: as `copy`."""
        module, _, attribute = name.rpartition(".")
        owner = model.get_submodule(module)
        old: nn.Parameter | None = vars(owner)["_parameters"].get(attribute)
        if old is not None and not is_quantised(old):
            self.copy(old, value)
            return
        self.steps.append(partial(owner.register_parameter, attribute, old))
        owner.register_parameter(attribute, nn.Parameter(value, old is not None and old.requires_grad))

    @torch.no_grad()
    def copy(self, tensor: Tensor, value: Tensor) -> None:
        """`tensor.copy_(value)`. Raises: P546 where there is no room for the old values."""
        if type(tensor.data) is Tensor:
            self.steps.append(partial(self.read, self.keep(tensor), tensor))
        else:  # sharded
            self.steps.append(partial(tensor.copy_, tensor.detach().clone()))
        tensor.copy_(value)

    def keep(self, tensor: Tensor) -> int:
        start: int = self.file.seek(0, 2)
        try:
            self.file.write(buffer(as_bytes(tensor)))
            self.file.flush()
        except OSError as error:
            message = f"the weights as they are now cannot be kept in {temporary_folder()}: {error.strerror}"
            help_ = "name another folder in TMPDIR: they are kept there until all new ones are written"
            raise PeftcError(Diagnostic("P546", message, help=help_)) from error
        return start

    def undo(self, start: int = 0) -> None:
        """Undoes all steps but the first `start`, the last one first."""
        with torch.no_grad():
            while len(self.steps) > start:
                self.steps[-1]()
                self.steps.pop()

    def read(self, start: int, tensor: Tensor) -> None:
        old = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        self.file.seek(start)
        self.file.readinto(buffer(old))
        tensor.copy_(old.view(tensor.dtype).view(tensor.shape))


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]], then: Callable[[], object]) -> None:
    """Copies second tensors into first ones and calls `then`: all of it or, after an error or an interrupt, nothing."""
    with Journal() as journal, Deferral():
        try:
            for tensor, value in pairs:
                journal.copy(tensor, value)
        except BaseException:
            journal.undo()
            raise
        then()


def as_bytes(tensor: Tensor) -> Tensor:
    """The values of a tensor (any shape, dtype and device) as bytes, in the order of its indices."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def temporary_folder() -> str:
    try:
        return gettempdir()
    except OSError:
        return "a temporary folder, since there is none"


def buffer(data: Tensor) -> memoryview:
    """The memory of a tensor of bytes."""
    return memoryview(cast(Any, data.numpy()))
