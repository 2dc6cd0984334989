"""What a merge did, or would do."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel as Record
from pydantic import ConfigDict, Field

from peftc.folding.report import Change


class MergedTensor(Record):
    """One tensor of the new checkpoint that differs from the base's, by parameter.

    Attributes:
        parameter: its dotted name in the model; of an expert by itself, `name[number]`.
        keys: of the tensors of the checkpoint that hold it.
        dtype: as it is stored.
        edits: those that were folded into it.
        entries: how many entries it has.
        delta: ‖Δ‖ / ‖W‖, the size of the change relative to the base's tensor.
        rounding: ‖ε‖ / ‖Δ‖, the part of the change that rounding to the dtype adds or takes away.
        unchanged: the share of the entries with a change that rounding left as they were.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    parameter: str
    keys: tuple[str, ...]
    dtype: str
    edits: tuple[str, ...]
    entries: int
    delta: float
    rounding: float
    unchanged: float

    @classmethod
    def of(cls, change: Change, keys: tuple[str, ...], expert: int | None = None) -> MergedTensor:
        return cls(
            parameter=change.parameter if expert is None else f"{change.parameter}[{expert}]",
            keys=keys,
            dtype=change.dtype,
            edits=change.edits,
            entries=change.total,
            delta=change.delta,
            rounding=change.rounding,
            unchanged=1 - change.survived,
        )


class MergeReport(Record):
    """The outcome of `peftc.merge`; `peftc-merge.json` in the new folder has it as JSON.

    Attributes:
        base: the folder of the base.
        output: the new folder; empty for a dry run.
        adapters: the folders of the adapters, in order.
        folded: the names of the edits that are in the weights now.
        refused: the edits that are not, with the reasons; `adapter/` in the new folder has them.
        tensors: what became of each changed tensor; of a dry run, none is known.
        touched: the keys of the tensors that are written anew; all others are copied.
        dequantized: the keys of those that the base has in a quantised form.
        written: bytes that are computed.
        copied: bytes that are copied from the base.
        files: the other files that were copied.
        left: files that were not, since they hold of the base in another form.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    format_version: str = "1.0"
    base: str
    output: str = ""
    adapters: tuple[str, ...]
    folded: tuple[str, ...]
    refused: dict[str, str] = Field(default_factory=dict)
    tensors: tuple[MergedTensor, ...] = ()
    touched: tuple[str, ...] = ()
    dequantized: tuple[str, ...] = ()
    written: int
    copied: int
    files: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        verb = "would merge" if not self.output else "merged"
        lines = [f"{verb} {', '.join(self.folded) or 'nothing'} into {len(self.touched)} tensors"]
        lines.append(f"  computed {size(self.written)}, copied {size(self.copied)}")
        if self.dequantized:
            lines.append(f"  wrote out in full: {len(self.dequantized)} quantised weights")
        if self.tensors:
            lines.append(_range("size of the change ‖Δ‖ / ‖W‖", [t.delta for t in self.tensors], "{:.2g}"))
            lines.append(_range("rounding error ‖ε‖ / ‖Δ‖", [t.rounding for t in self.tensors], "{:.2g}"))
            lines.append(_range("entries that rounding left unchanged", [t.unchanged for t in self.tensors], "{:.1%}"))
        lines += [f"  stays    {edit}: {reason}" for edit, reason in self.refused.items()]
        lines += [f"  left     {file}: of the base in another form" for file in self.left]
        return "\n".join([*lines, f"wrote {Path(self.output)}" if self.output else "nothing was written"])


def _range(title: str, values: list[float], form: str) -> str:
    low, high = (form.format(value) for value in (min(values), max(values)))
    return f"  {title}: {low}" + (f" to {high}" if high != low else "")


def size(count: int) -> str:
    """Bytes as a reader takes them in: "1.3 GB"."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.1f} {units[0]}" if units[0] != "bytes" else f"{count} bytes"
