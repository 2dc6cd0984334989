"""`peftc.merge`: adapters into a checkpoint, tensor by tensor."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from peftc.adapters.files import path_of
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.ffn_width import HiddenUnits
from peftc.folding.memory import reused
from peftc.folding.threads import cores, threads
from peftc.folding.unrounded_parameters import CannotFold
from peftc.folding.weights import Folding
from peftc.installation.record import installation_of, is_installed
from peftc.merging.base_model import BaseModel, load_adapters, open_base
from peftc.merging.checkpoint import INDEX
from peftc.merging.dequantization import DenseCheckpoint
from peftc.merging.destination import check_destination, destination, unwritable
from peftc.merging.layout import Changes, Copy, Layout, layout_of
from peftc.merging.other_files import CONFIGURATION, REPORT, change_configuration, copy_files, other_files
from peftc.merging.processes import Counter, Ranks, check_jobs, device_of, in_processes, ranks, work_folder
from peftc.merging.report import MergedTensor, MergeReport
from peftc.merging.rest import save_rest
from peftc.merging.tasks import Task, lacking_biases, run, tasks_of
from peftc.merging.untie import untie as untie_all
from peftc.merging.verification import verify as verify_files
from peftc.merging.widening import plan_widening
from peftc.merging.writer import MOST, Progress, Writer, background

WAITING = 2  # writes; each task has one at least, so what was computed WAITING + 1 tasks ago is written
ROUNDS = WAITING + 3  # of memory: tensors are read while the task before theirs is computed


def merge(
    base: str | PathLike[str],
    adapters: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str] | None = None,
    *,
    partial: bool = False,
    other_weights: bool = False,
    trust_remote_code: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    jobs: int = 1,
    widen: bool = False,
    untie: bool = False,
    dequantize: bool = False,
    device: str = "auto",
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
        verify: reads all files again before the new folder appears, and compares them with what was
            written and with the base; and looks up the parameters of the model in them.
        jobs: processes on this machine. Under `torchrun` each rank writes files of its own.
        widen: a bottleneck beside an ffn without a gate becomes hidden units of it, as in `fold`;
            the configuration follows.
        untie: embedding and head that are one matrix become two, so that edits of one fold; the
            configuration follows.
        dequantize: the weights of a quantised base are written out in full, by the functions of the
            library that quantised them (bitsandbytes, torchao, compressed-tensors, fp8 of
            transformers), and folded into; the configuration says so. They have the dtype that the
            configuration names, or that the library gives.
        device: where sums are computed: "cpu", "cuda", or "auto", a GPU if there is one and `jobs`
            is 1. One weight at a time is on it.
        progress: is called with the bytes written so far, and those in all.

    Returns:
        What became of each tensor.

    Raises:
        PeftcError: P501-P506 (the base), P520-P525 (an adapter, or another base), P530 (NaN or
            infinite entries), P531 (edits that do not fold), P701 (damaged files), P702 (files that
            do not fit the configuration), P703 and P704 (the new folder), P705 (a process ended),
            P706 (`verify`), P707 (a quantised base), P708 (`dequantize`).
    """
    paths = [path_of(path) for path in ([adapters] if isinstance(adapters, str | PathLike) else adapters)]
    target = None if output is None or dry_run else path_of(output)
    if output is None and not dry_run:
        raise PeftcError(Diagnostic("P545", "`merge` writes a checkpoint", help="name its folder as `output`"))
    if target is not None:
        check_destination(target)
    place = device_of(device, check_jobs(jobs))
    with ranks() as rank:
        opened = open_base(base, trust_remote_code, dequantize)
        try:
            load_adapters(opened, paths, other_weights)
            options = Options(partial, widen, verify, jobs, rank, progress or (lambda done, total: None), place)
            checkpoint = opened.checkpoint
            changes = checkpoint.changes() if isinstance(checkpoint, DenseCheckpoint) else Changes()
            if untie:
                untie_all(opened, trained_names(opened.model), changes)
            return Merge(opened, paths, options, changes).run(target)
        finally:
            opened.checkpoint.close()


def trained_names(model: nn.Module) -> set[str]:
    """The parameters that `train` statements of the adapters have changed."""
    return set(installation_of(model).trained.values()) if is_installed(model) else set()


@dataclass(frozen=True)
class Options:
    """`partial`: some edits may stay. `widen`: or widen an ffn. `tell`: is told of bytes. `device`:
    of the sums.
    """

    partial: bool
    widen: bool
    verify: bool
    jobs: int
    ranks: Ranks
    tell: Callable[[int, int], object]
    device: torch.device


class Merge:
    """One merge of the edits on a base."""

    def __init__(self, base: BaseModel, adapters: Sequence[Path], options: Options, changes: Changes) -> None:
        self.base, self.adapters, self.options, self.first, self.changes = base, adapters, options, changes, changes
        self.folding = Folding(base.model, None, None, None)
        base.keep(self.folding.trained)
        self.others = lacking_biases(self.folding)  # edits that stay, with reasons

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
        folded = [name for name in self.folding.names if name not in refused]
        units, wide = dict[str, list[HiddenUnits]](), set[str]()
        self.changes = replace(self.first, tensors={}, configuration=dict(self.first.configuration))
        if self.options.widen and refused:
            units, reasons = plan_widening(self.base, folded, self.others, self.changes)
            wide = {one.edit for own in units.values() for one in own}
            refused = {
                n: f"{why}; {reasons[n]}" if n in reasons else why for n, why in refused.items() if n not in wide
            }
            folded = [name for name in self.folding.names if name not in refused]
        if refused and not self.options.partial:
            edit, reason = next(iter(refused.items()))
            notes = tuple(f"`{other}` does not, either: {why}" for other, why in list(refused.items())[1:])
            help_ = "`partial=True`, or `--partial`, merges the others, and keeps these as an adapter"
            raise PeftcError(Diagnostic("P531", f"`{edit}` does not fold: {reason}", notes=notes, help=help_))
        self.others = refused
        return folded, tasks_of(self.base, self.folding, [name for name in folded if name not in wide], units)

    def write(self, target: Path, folded: Sequence[str], tasks: Sequence[Task]) -> MergeReport:
        base, ranks = self.base.checkpoint, self.options.ranks
        layout = layout_of(base, self.changes)
        with destination(target) if ranks.rank == 0 else nullcontext() as own:
            work = work_folder(ranks, own)
            with self.on_device():
                parts = ranks.all(lambda: self.write_tensors(target, work, layout, tasks))
            tensors = {one.parameter: one for part in parts for one in part.tensors}
            report = self.report(folded, tasks, target, tensors.values())
            digests = {key: text for part in parts for key, text in part.digests.items()}
            ranks.all(lambda: own is not None and self.finish(target, work, layout, report, digests))
        ranks.first(True)  # all wait until the folder is there
        return report

    @contextmanager
    def on_device(self) -> Generator[None]:
        """Inside of the block sums are computed on the device, where parameters of edits are."""
        own = [form for edit in self.folding.record.site_edits for form in self.folding.modules(edit).values()]
        forms = [form for one in own for form in (one, one.owner_module) if form is not None]
        before = self.base.device
        try:
            self.base.device = self.options.device
            for form in forms:
                form.to(self.base.device)
            yield
        finally:
            self.base.device = before
            for form in forms:
                form.to(before)

    def finish(self, target: Path, work: Path, layout: Layout, report: MergeReport, digests: Mapping[str, str]) -> None:
        """Writes what is no weight, and verifies all."""
        with refused_writes(target):
            self.write_other_files(work, layout, report)
        if self.options.verify:
            verify_files(self.base.checkpoint, work, layout, digests)
        if self.others:
            save_rest(self.base, self.folding, report.folded, work, target)

    def write_other_files(self, work: Path, layout: Layout, report: MergeReport) -> None:
        base = self.base.checkpoint
        copy_files(base.folder, work, [*map(Path, report.files), *([Path(INDEX)] if layout.index else [])])
        if layout.index is not None and layout.index != base.index:
            (work / INDEX).write_text(json.dumps(layout.index, indent=2) + "\n", encoding="utf-8")
        change_configuration(work / CONFIGURATION, self.changes.configuration, self.changes.dropped)
        (work / REPORT).write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def write_tensors(self, target: Path, work: Path, layout: Layout, tasks: Sequence[Task]) -> Part:
        """What this rank writes, by its processes."""
        files = self.options.ranks.own(list(layout.shards))
        with refused_writes(target):
            writer = Writer(work, layout, files, self.options.verify)
        keys = [key for task in tasks for key in task.keys]
        copies = [copy for copy in layout.copies(self.base.checkpoint, keys, MOST) if copy.file in writer.files]
        own = [task for task in tasks if any(layout.entries[key].file in writer.files for key in task.keys)]
        steps = in_order(own, copies, self.position)
        counter = Counter(sum(layout.shards[file].size for file in files), self.options.tell)
        jobs = min(self.options.jobs, max(1, len(steps)))
        try:
            with refused_writes(target):
                parts = in_processes(jobs, lambda i: self.run_steps(steps[i::jobs], writer, counter.add), counter.tell)
                writer.flush()
        finally:
            writer.close()
        digests = {key: text for part in parts for key, text in part.digests.items()}
        return Part([one for part in parts for one in part.tensors], digests)

    def run_steps(self, steps: Sequence[Task | Copy], writer: Writer, count: Progress) -> Part:
        tensors, base = list[MergedTensor](), self.base.checkpoint
        writing, reading = background(count, WAITING), base.reading_ahead()
        with (
            writing as pool,
            reading as read_ahead,
            one_thread(),
            reused(ROUNDS),
            threads(cores() // self.options.jobs),
        ):
            for step, following in zip(steps, [*steps[1:], None], strict=True):
                if isinstance(following, Task) and not following.experts:  # whose slices are read
                    read_ahead(following.keys)
                if isinstance(step, Copy):
                    pool.submit(functools.partial(writer.copy, base, step))
                else:
                    tensors += run(self.base, step, functools.partial(write_later, pool.submit, writer))
        return Part(tensors, writer.digests)

    def position(self, task: Task) -> tuple[str, int]:
        return min((e.file, e.start) for e in (self.base.checkpoint.entries[key] for key in task.keys))

    def report(
        self, folded: Iterable[str], tasks: Iterable[Task], target: Path | None, tensors: Iterable[MergedTensor]
    ) -> MergeReport:
        base, keys = self.base.checkpoint, [key for task in tasks for key in task.keys]
        written = sum(base.entries[key].size for key in keys)
        dequantized = tuple(base.computed())
        files, left = other_files(base.folder, base.shards, bool(dequantized))
        return MergeReport(
            base=str(base.folder),
            output="" if target is None else str(target),
            adapters=tuple(map(str, self.adapters)),
            folded=tuple(folded),
            refused=self.others,
            tensors=tuple(tensors),
            touched=tuple(keys),
            dequantized=dequantized,
            written=written,
            copied=sum(entry.size for entry in base.entries.values()) - written,
            files=tuple(map(str, files)),
            left=tuple(map(str, left)),
        )


@dataclass(frozen=True)
class Part:
    """What one process has written. `digests`: sha256 by key, if they were asked for."""

    tensors: list[MergedTensor]
    digests: dict[str, str]


@contextmanager
def refused_writes(target: Path) -> Generator[None]:
    """Raises: P704 where the file system refuses."""
    try:
        yield
    except OSError as error:
        raise unwritable(target, error) from error


@contextmanager
def one_thread() -> Generator[None]:
    """On pieces that stay in a cache, threads would wait for each other; `jobs` are processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write_later(
    submit: Callable[[Callable[[], int]], object], writer: Writer, key: str, tensor: Tensor, at: int = 0
) -> None:
    submit(functools.partial(writer.write, key, tensor, at))


def in_order(
    tasks: Iterable[Task], copies: Iterable[Copy], position: Callable[[Task], tuple[str, int]]
) -> list[Task | Copy]:
    """All steps in the order of the base's files."""
    steps: list[tuple[tuple[str, int], Task | Copy]] = [(position(task), task) for task in tasks]
    steps += [((copy.file, copy.start), copy) for copy in copies]
    return [step for _, step in sorted(steps, key=lambda pair: pair[0])]
