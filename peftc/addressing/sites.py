"""What the trace finds: sites, the hidden states at each, and where in the model they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from peftc.forms.shapes import Shape


@dataclass(frozen=True)
class Slice:
    """The part of a module's output features that belongs to a site: [start, stop), and again every `stride` features,
    `count` times (heads interleaved with those of other roles). The whole output where there is none.
    """

    start: int
    stop: int
    stride: int = 0
    count: int = 1

    @property
    def width(self) -> int:
        """The number of features."""
        return (self.stop - self.start) * self.count

    def base(self, width: int) -> int:
        """Where, of `width` features, `count` pieces of `stride` features begin that hold one block each."""
        return min(self.start, width - self.stride * self.count)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The blocks of features, each [start, stop)."""
        for i in range(self.count):
            yield self.start + i * self.stride, self.stop + i * self.stride

    def overlaps(self, other: Slice) -> bool:
        """Whether the two have features in common."""
        return any(a < d and c < b for a, b in self.blocks() for c, d in other.blocks())


@dataclass(frozen=True)
class StackedSlice:
    """One of `count` matrices (or vectors) that are one parameter, as those of experts are: the parameter, cut into `count`
    equal pieces along its first dimension, at `index`.

    `reader` is the module whose code reads the parameter (dotted name in the model): its own module, or one above.
    """

    index: int
    count: int
    reader: str


@dataclass(frozen=True)
class WeightRef:
    """A parameter seen as `nn.Linear` stores it: (out, in), whatever the storage. `rows` are those of `slab`, if it is one."""

    module: str  # dotted name in the model
    attribute: str  # "weight", "bias"
    rows: Slice | None = None
    transposed: bool = False  # stored (in, out), as transformers' Conv1D does
    stacked_slice: StackedSlice | None = None

    @property
    def is_partial(self) -> bool:
        """Whether the parameter has entries that are not the site's."""
        return self.rows is not None or self.stacked_slice is not None


INPUT, OUTPUT = "<input>", "<output>"


@dataclass(frozen=True)
class ActivationRef:
    """Where a hidden state lives in the traced graph of the layer (or module) `root`.

    `node` names a node of the kind's fully inlined graph, or is INPUT or OUTPUT: the first tensor among the arguments or in the
    result of the site's own module, at `path`: (parameter, *keys), of the first parameter where it is empty, or the keys. `rows` is a slice of its last dimension. `map`: its features are its second dimension, as
    convolutions have them: (batch, d, height, width).
    """

    node: str
    rows: Slice | None = None
    feature_map: bool = False
    other_nodes: tuple[str, ...] = ()  # other nodes that take what is written there
    key_path: tuple[Any, ...] = ()


@dataclass(frozen=True)
class State:
    name: str  # h x c q k v kv z res w b
    shape: Shape
    activation: ActivationRef | None = None  # activations
    weight: WeightRef | None = None  # w and b
    linear: str = ""  # path of the site whose Linear computes it, where nothing but dropout stands between


@dataclass(frozen=True)
class Site:
    """A place of the model that an edit can name, e.g. `decoder.layer[3].attn.cross.q`.

    `steps` are the path's parts as (name, index or None). `module` is the dotted name of the module that computes it (of the
    smallest module containing it, where no one module does). `root` is the module whose graph holds its states (the layer,
    or the module itself outside layers). `group` names the attention group ("encoder.self") or the stack. `functions`: frozen sub-modules,
    from their name to the dotted name of the module. `stream`: the layer's input, where a state of this site has batch and
    tokens flattened into one dimension. `runs`: how often one forward runs the layer it is in: layers may share one set of
    weights, and then what an edit does there it does each time. `calls`: how often the code of the layer calls the module of
    a Linear; the site's `x` and `h` are those of one of these calls. `also`: other sites of the same module, whose edits are
    this one's: one set of parameters acts at each.
    """

    path: str
    steps: tuple[tuple[str, int | None], ...]
    module: str
    root: str
    kind: str
    states: Mapping[str, State]
    frozen_modules: Mapping[str, str] = field(default_factory=dict[str, str])
    group: str = ""
    layer_input: State | None = None
    runs: int = 1
    calls: int = 1
    shared_with: tuple[Site, ...] = ()


@dataclass(frozen=True)
class ModuleInfo:
    """Any module of the model, for globs, `**` and `train`.

    `input` and `output` are the widths (features) of the first tensor among its arguments and in its result, which are at `entry` and
    `result` (as the path of a `Place`); None where it is not called just once in a forward, or not on features. `called`: whether a
    forward calls it.
    """

    name: str  # dotted
    type: str
    parameters: Mapping[str, tuple[int, ...]]  # its own parameters (not its children's): attribute -> stored shape
    input: int | None = None
    output: int | None = None
    called: bool = True
    input_path: tuple[Any, ...] = ()
    output_path: tuple[Any, ...] = ()


@dataclass(frozen=True)
class UntracedModule:
    """A module whose code could not be followed: there are no sites in it.

    `steps` lead to its layer; they end before `layer` where a whole layer could not be read. `hides`: what may be in it by
    the words of a path after `layer` (`attn`, `ffn`, `mixer`, `norm`), or `layer`; nothing, where none of its results
    becomes part of a hidden state.
    """

    module: str  # dotted name in the model
    type: str
    reason: str
    steps: tuple[tuple[str, int | None], ...] = ()
    roles: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SiteTable:
    """All that the planner needs to know of a model. Plain data: no tensors, no modules, no torch."""

    model_id: str
    model_type: str
    parameters: int  # total of the base, tied weights once
    d_model: int
    fingerprint: str
    sites: tuple[Site, ...]  # in model order
    modules: tuple[ModuleInfo, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()  # groups of dotted parameter names that are one tensor
    overlaps: tuple[tuple[str, ...], ...] = ()  # those of tensors that are objects of their own and share memory
    shared_modules: tuple[tuple[str, ...], ...] = ()  # groups of dotted module names that are one module
    cross_layer_calls: tuple[
        tuple[str, str], ...
    ] = ()  # a module of a layer, and another layer whose code calls it, too
    external_reads: tuple[tuple[str, ...], ...] = ()  # a parameter, and the modules that compute with it beside its own
    warnings: tuple[str, ...] = ()
    untraced: tuple[UntracedModule, ...] = ()
    fingerprint_version: int = 2
    positions: int | None = None  # how many tokens the model takes at most, where its configuration says so
