"""Many saved adapters in a folder, of which those used last are attached to a model."""

from collections import Counter, OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Any

from torch import nn

from peftc.adapters.files import path_of
from peftc.adapters.metadata import METADATA
from peftc.attachment.activation import activate, adapter, attached
from peftc.attachment.attach import attach, detach, is_attached, swap
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean
from peftc.installation.record import is_installed

SLOT = "slot"


class AdapterStore:
    """Saved adapters by name, of which at most `capacity` are attached to a model.

    One that is chosen and not attached takes the place of the one that was chosen longest ago: its
    values are read from disk and copied into the parameters of that one (`peftc.swap`), so that
    nothing is compiled again, also under `torch.compile`. Where the specs differ, `peftc.detach`
    and `peftc.attach` exchange them. Values on the model are never written back.

    Args:
        model: the base, or a model with edits.
        adapters: the folders by name; or one folder, whose sub-folders with an adapter are meant.
        capacity: how many are attached at the same time, 1 or more.
        other_weights: as in `peftc.load`.
        strict: as in `peftc.load`.

    Attributes:
        folders: those of the adapters, by name. Entries may be added and taken out.
        resident: the names of those that are attached, the one used last at the end.

    Raises:
        PeftcError: P520 (no folder), P545 (capacity).
    """

    def __init__(
        self,
        model: nn.Module,
        adapters: Mapping[str, str | PathLike[str]] | str | PathLike[str],
        *,
        capacity: int = 8,
        other_weights: bool = False,
        strict: bool = False,
    ) -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            message = f"`capacity` is a number of adapters, 1 or more; it is {capacity!r}"
            raise PeftcError(Diagnostic("P545", message))
        self.model, self.capacity = model, capacity
        self.folders = folders_of(adapters)
        self._options: dict[str, Any] = {"other_weights": other_weights, "strict": strict}
        self._slots: OrderedDict[str, str] = OrderedDict()  # by name
        self._open: Counter[str] = Counter()  # the names in open blocks
        self._active: str | None = None
        self._lock = RLock()

    @property
    def resident(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def activate(self, name: str | None) -> nn.Module:
        """As `peftc.activate`, of an adapter of the store.

        Raises:
            PeftcError: as `peftc.activate` and `peftc.attach`; P547 for a name that is not in the
                store, P548 if all that are attached are in use.
        """
        with self._lock:
            slot = None if name is None else self._slot(name, {name})
            self._active = name
            return activate(self.model, slot)

    @contextmanager
    def adapter(self, name: str | None = None, *, rows: Sequence[str | None] | None = None) -> Generator[nn.Module]:
        """As `peftc.adapter`, of adapters of the store. They stay attached while the block is open.

        Raises:
            PeftcError: as `peftc.adapter` and `activate`; P548 for more adapters than `capacity`.
        """
        names = [name] if rows is None else list(rows)
        wanted = [name for name in dict.fromkeys(names) if name is not None]
        with self._lock:
            slots = {name: self._slot(name, {*wanted}) for name in wanted}
            self._open.update(wanted)
        try:
            chosen = None if name is None else slots[name]
            in_rows = None if rows is None else [None if one is None else slots[one] for one in rows]
            with adapter(self.model, chosen, rows=in_rows) as model:
                yield model
        finally:
            with self._lock:
                self._open.subtract(wanted)

    def _slot(self, name: str, wanted: set[str]) -> str:
        """The name under which an adapter is attached, after reading it where it was not."""
        if name in self._slots:
            self._slots.move_to_end(name)
            return self._slots[name]
        if name not in self.folders:
            help_ = did_you_mean(name, self.folders)
            raise PeftcError(Diagnostic("P547", f"the store has no adapter `{name}`", help=help_))
        folder = self.folders[name]
        if len(self._slots) < self.capacity:
            slot = self._free_slot()
            attach(folder, self.model, name=slot, **self._options)
        else:
            slot = self._exchange(folder, wanted)
        self._slots[name] = slot
        return slot

    def _exchange(self, folder: Path, wanted: set[str]) -> str:
        """Gives an adapter the place of the one used longest ago, if possible of its spec."""
        busy = {*wanted, *(name for name, count in self._open.items() if count > 0), self._active}
        idle = [name for name in self._slots if name not in busy]
        if not idle:
            message = f"all {self.capacity} adapters that the store may attach are in use"
            raise PeftcError(Diagnostic("P548", message, help="give the store a larger `capacity`"))
        alike = next((name for name in idle if is_attached(self.model, self._slots[name], folder)), None)
        if alike is not None:
            swap(self.model, self._slots[alike], folder, **self._options)
            return self._slots.pop(alike)
        attach(folder, self.model, name=(slot := self._free_slot()), **self._options)
        detach(self.model, self._slots.pop(idle[0]))
        return slot

    def _free_slot(self) -> str:
        present = attached(self.model) if is_installed(self.model) else ()
        return next(name for i in range(len(present) + 1) if (name := f"{SLOT}_{i}") not in present)


def folders_of(adapters: Mapping[str, str | PathLike[str]] | str | PathLike[str]) -> dict[str, Path]:
    """The folders of adapters, by name. Raises: P520, P545."""
    if isinstance(adapters, Mapping):
        return {name: path_of(folder) for name, folder in adapters.items()}
    root = path_of(adapters)
    if not root.is_dir():
        raise PeftcError(Diagnostic("P520", f"there is no folder {root}"))
    return {folder.name: folder for folder in sorted(root.iterdir()) if (folder / METADATA).is_file()}
