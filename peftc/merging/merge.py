"""`peftc.merge`: adapters into a checkpoint, tensor by tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path

from torch import Tensor

from peftc.adapters.files import path_of
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.module_folds import CannotFold
from peftc.folding.weights import Folding
from peftc.merging.base_model import BaseModel, load_adapters, open_base
from peftc.merging.checkpoint import INDEX
from peftc.merging.destination import check_destination, destination, unwritable
from peftc.merging.layout import Changes, Copy, Layout, layout_of
from peftc.merging.other_files import REPORT, copy_files, other_files
from peftc.merging.report import MergedTensor, MergeReport
from peftc.merging.tasks import Task, run, tasks_of
from peftc.merging.writer import MOST, Progress, Writer, background


def merge(
    base: str | PathLike[str],
    adapters: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str] | None = None,
    *,
    partial: bool = False,
    other_weights: bool = False,
    trust_remote_code: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> MergeReport:
    """Merges saved adapters into a safetensors checkpoint, and writes the result as a new folder.

    W' = W + (α/r) B A for LoRA, and so on for every equation that folds, as `peftc.fold` computes
    it: sums in float32 (float64 for float64), rounded once to the dtype of the tensor. The base is
    read tensor by tensor, and what no edit changes is copied as bytes: memory is that of the
    largest tensors, whatever the size. The new folder has the files, keys, dtypes and order of the
    base, its tokenizer and configuration. It appears complete and on disk, or not at all.

    Args:
        base: a folder, or a hub id, with safetensors: one file, or several with an index.
        adapters: folders that `save` wrote; of several, the edits act in this order.
        output: a new or empty folder.
        partial: edits that do not fold stay, as an adapter for the new checkpoint in its folder
            `adapter`. Without it they are an error.
        other_weights: expects a base of the same architecture with other weights.
        trust_remote_code: as in `plan`.
        dry_run: computes and writes nothing.
        progress: is called with the bytes written so far, and those in all.

    Returns:
        What became of each tensor.

    Raises:
        PeftcError: P501-P506 (the base), P520-P525 (an adapter, or another base), P530 (NaN or
            infinite entries), P531 (edits that do not fold), P701 (damaged files), P702 (files that
            do not fit the configuration), P703 and P704 (the new folder).
    """
    paths = [path_of(path) for path in ([adapters] if isinstance(adapters, str | PathLike) else adapters)]
    target = None if output is None or dry_run else path_of(output)
    if output is None and not dry_run:
        raise PeftcError(Diagnostic("P545", "`merge` writes a checkpoint", help="name its folder as `output`"))
    if target is not None:
        check_destination(target)
    opened = open_base(base, trust_remote_code)
    try:
        load_adapters(opened, paths, other_weights)
        return Merge(opened, paths, partial, progress).run(target)
    finally:
        opened.checkpoint.close()


class Merge:
    """One merge of the edits on a base. `partial`: some may stay."""

    def __init__(
        self,
        base: BaseModel,
        adapters: Sequence[Path],
        partial: bool,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self.base, self.adapters, self.partial = base, adapters, partial
        self.tell = progress or (lambda done, of: None)
        self.folding = Folding(base.model, None, None, None)
        base.keep(self.folding.trained)
        self.others = dict[str, str]()  # edits that stay, with reasons

    def run(self, target: Path | None) -> MergeReport:
        while True:  # an edit for which there turns out to be no place stays, too
            try:
                folded, tasks = self.plan()
                return self.report(folded, tasks, None, []) if target is None else self.write(target, folded, tasks)
            except CannotFold as error:
                self.others[error.edit] = error.reason

    def plan(self) -> tuple[list[str], list[Task]]:
        """The edits that fold, and what is computed. Raises: P531, CannotFold."""
        refused = self.others | self.folding.refusals(self.others)
        if refused and not self.partial:
            edit, reason = next(iter(refused.items()))
            notes = tuple(f"`{other}` does not, either: {why}" for other, why in list(refused.items())[1:])
            help_ = "`partial=True`, or `--partial`, merges the others, and keeps these as an adapter"
            raise PeftcError(Diagnostic("P531", f"`{edit}` does not fold: {reason}", notes=notes, help=help_))
        self.others = refused
        folded = [name for name in self.folding.names if name not in refused]
        return folded, tasks_of(self.base, self.folding, folded)

    def write(self, target: Path, folded: Sequence[str], tasks: Sequence[Task]) -> MergeReport:
        source = self.base.checkpoint.folder
        layout = layout_of(self.base.checkpoint, Changes())
        with destination(target) as work:
            try:
                tensors = self.write_tensors(work, layout, tasks)
                files, _ = other_files(source, self.base.checkpoint.shards)
                copy_files(source, work, files)
                if layout.index is not None:
                    copy_files(source, work, [Path(INDEX)])
                report = self.report(folded, tasks, target, tensors)
                (work / REPORT).write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
            except OSError as error:
                raise unwritable(target, error) from error
        return report

    def write_tensors(self, work: Path, layout: Layout, tasks: Sequence[Task]) -> list[MergedTensor]:
        writer, tensors = Writer(work, layout), list[MergedTensor]()
        keys = [key for task in tasks for key in task.keys]
        copies = layout.copies(self.base.checkpoint, keys, MOST)
        total = sum(layout.entries[key].size for key in keys) + sum(copy.size for copy in copies)
        try:
            with background(self.counter(total)) as pool:
                for step in in_order(tasks, copies, self.position):
                    if isinstance(step, Copy):
                        pool.submit(functools.partial(writer.copy, self.base.checkpoint, step))
                    else:
                        tensors += run(self.base, step, functools.partial(write_later, pool.submit, writer))
            writer.flush()
        finally:
            writer.close()
        return tensors

    def counter(self, total: int) -> Progress:
        done = [0]

        def count(size: int) -> None:
            done[0] += size
            self.tell(done[0], total)

        return count

    def position(self, task: Task) -> tuple[str, int]:
        return min((e.file, e.start) for e in (self.base.checkpoint.entries[key] for key in task.keys))

    def report(
        self, folded: Iterable[str], tasks: Iterable[Task], target: Path | None, tensors: Iterable[MergedTensor]
    ) -> MergeReport:
        entries, keys = self.base.checkpoint.entries, [key for task in tasks for key in task.keys]
        written = sum(entries[key].size for key in keys)
        files, left = other_files(self.base.checkpoint.folder, self.base.checkpoint.shards)
        return MergeReport(
            base=str(self.base.checkpoint.folder),
            output="" if target is None else str(target),
            adapters=tuple(map(str, self.adapters)),
            folded=tuple(folded),
            refused=self.others,
            tensors=tuple(tensors),
            touched=tuple(keys),
            written=written,
            copied=sum(entry.size for entry in entries.values()) - written,
            files=tuple(map(str, files)),
            left=tuple(map(str, left)),
        )


def write_later(submit: Callable[[Callable[[], int]], object], writer: Writer, key: str, tensor: Tensor) -> None:
    submit(functools.partial(writer.write, key, tensor))


def in_order(
    tasks: Iterable[Task], copies: Iterable[Copy], position: Callable[[Task], tuple[str, int]]
) -> list[Task | Copy]:
    """All steps in the order of the base's files."""
    steps: list[tuple[tuple[str, int], Task | Copy]] = [(position(task), task) for task in tasks]
    steps += [((copy.file, copy.start), copy) for copy in copies]
    return [step for _, step in sorted(steps, key=lambda pair: pair[0])]
