"""The undo log of a transaction on a model: what reverts each step, with the old values."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile, gettempdir
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.concurrency.interrupts import Deferral
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.direct_io import PAGE, DirectWriter
from peftc.runtime.parameters import is_quantised

IN_MEMORY = 2**24  # bytes of old values; if there are more, they go to a file


class Journal:
    """Writes new values into parameters and buffers. `undo` puts everything back, bit for bit.

    The old values are in a temporary file, which the system deletes however the process ends.
    """

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []  # each undoes one change
        self.file: Any = SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115  # `__exit__` closes it
        self.direct = DirectWriter()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.direct.close()
        self.file.close()

    def write(self, model: nn.Module, name: str, value: Tensor) -> None:
        """Sets a value of equal dtype and shape. A quantised or missing parameter becomes plain."""
        module, _, attribute = name.rpartition(".")
        owner = model.get_submodule(module)
        old: nn.Parameter | None = vars(owner)["_parameters"].get(attribute)
        if old is not None and not is_quantised(old):
            self.copy(old, value)
            return
        self.steps.append(partial(owner.register_parameter, attribute, old))
        value = value.clone()  # whose memory may be that of the next value
        owner.register_parameter(attribute, nn.Parameter(value, old is not None and old.requires_grad))

    @torch.no_grad()
    def copy(self, tensor: Tensor, value: Tensor) -> None:
        """`tensor.copy_(value)`. Raises: P546 where there is no room for the old values."""
        if type(tensor.data) is Tensor:
            self.steps.append(partial(self.restore, self.save(tensor), tensor))
        else:  # a tensor subclass, such as a sharded tensor
            self.steps.append(partial(tensor.copy_, tensor.detach().clone()))
        tensor.copy_(value)

    def keep(self, module: nn.Module) -> None:
        """Restores the class and the attributes of a module, its tables of parameters included."""
        cls, state = type(module), dict(vars(module))
        tables = [(table, dict(table)) for table in state.values() if isinstance(table, dict)]

        def restore() -> None:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(state)
            for table, entries in tables:  # whose identity others hold
                table.clear()
                table.update(entries)

        self.steps.append(restore)

    def save(self, tensor: Tensor) -> int:
        """Appends the bytes of a tensor to the file. Returns their offset. Raises: P546."""
        end: int = self.file.seek(0, 2)
        start = end + -end % PAGE
        data = buffer(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
        try:
            done = self.save_directly(data, start)
            self.file.seek(start + done)
            self.file.write(data[done:])
            self.file.flush()
        except OSError as error:
            try:
                folder = gettempdir()
            except OSError:
                folder = "a temporary folder, since there is none"
            message = f"the weights as they are now cannot be kept in {folder}: {error.strerror}"
            help_ = "name another folder in TMPDIR: they are kept there until all new ones are written"
            raise PeftcError(Diagnostic("P546", message, help=help_)) from error
        return start

    def save_directly(self, data: memoryview, start: int) -> int:
        """How many bytes were written past the page cache, as nobody reads most of them."""
        if start + len(data) <= IN_MEMORY:
            return 0

        def read(piece: memoryview, at: int) -> None:
            piece[:] = data[at : at + len(piece)]

        path = Path(f"/proc/self/fd/{self.file.fileno()}")  # it has no name
        return self.direct.write(path, start, len(data), read)[1]

    def restore(self, start: int, tensor: Tensor) -> None:
        old = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        self.file.seek(start)
        self.file.readinto(buffer(old))
        tensor.copy_(old.view(tensor.dtype).view(tensor.shape))

    def undo(self, start: int = 0) -> None:
        """Undoes all steps after the first `start`, from the last one back."""
        with torch.no_grad():
            while len(self.steps) > start:
                self.steps[-1]()
                self.steps.pop()


@contextmanager
def transaction(journal: Journal | None = None) -> Generator[tuple[Journal, Deferral]]:
    """A block that changes a model: all or nothing. `journal`: an open one to append to."""
    own = Journal() if journal is None else journal
    with own if journal is None else nullcontext(), Deferral() as deferral:
        start = len(own.steps)
        try:
            yield own, deferral
        except BaseException:
            with Deferral():
                own.undo(start)
            raise


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]], finish: Callable[[], object]) -> None:
    """Copies the second tensor of each pair into the first, then calls `finish`: all or nothing."""
    with transaction() as (journal, _):
        for tensor, value in pairs:
            journal.copy(tensor, value)
        finish()


def buffer(data: Tensor) -> memoryview:
    return memoryview(cast(Any, data.numpy()))
