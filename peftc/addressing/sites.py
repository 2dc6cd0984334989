"""The sites of a model, and the states at each site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from typing import Any

from peftc.forms.shapes import Shape

Steps = tuple[tuple[str, int | None], ...]  # of a site's path: (("layer", 3), ("attn", None))
INPUT, OUTPUT, TABLE_IDS = "<input>", "<output>", "<ids>"


@dataclass(frozen=True)
class Slice:
    """The output features of a module that belong to one site.

    `count` blocks of features, `stride` features apart; the first block is [start, stop). Several
    blocks occur where the heads of q, k and v are interleaved.
    """

    start: int
    stop: int
    stride: int = 0
    count: int = 1

    @property
    def width(self) -> int:
        return (self.stop - self.start) * self.count

    def base(self, width: int) -> int:
        """The first feature of the interleaved region, in an output of `width` features."""
        return min(self.start, width - self.stride * self.count)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Each block as [start, stop)."""
        for i in range(self.count):
            yield self.start + i * self.stride, self.stop + i * self.stride

    def overlaps(self, other: Slice) -> bool:
        return any(a < d and c < b for a, b in self.blocks() for c, d in other.blocks())


@dataclass(frozen=True)
class StackedSlice:
    """One of `count` matrices (or vectors) stacked along the first dimension of one parameter."""

    index: int
    count: int
    reader: str  # dotted name of the module whose code reads the parameter: its own module, or one above


@dataclass(frozen=True)
class MatrixLayout:
    """How a parameter of any shape is a matrix (out, in): its dimensions in this order, of which
    the first `rows` are (out) and the rest (in). A vector (out) has no others.
    """

    order: tuple[int, ...]
    rows: int

    @property
    def is_plain(self) -> bool:
        """Whether a matrix, or a vector, is stored as it is."""
        return self.order in ((0,), (0, 1)) and self.rows == 1

    @property
    def is_transposed(self) -> bool:
        """Whether a matrix is stored (in, out)."""
        return self.order == (1, 0) and self.rows == 1


@dataclass(frozen=True)
class FeatureDims:
    """Which dimensions of a value are those of batch and tokens, and which of features, each in
    their order; any others have the size 1.
    """

    tokens: tuple[int, ...]
    features: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the last dimension has the features, and there are no dimensions of size 1."""
        return (*self.tokens, *self.features) == tuple(range(len(self.tokens) + 1))

    def width(self, sizes: tuple[int, ...]) -> int:
        """The number of features in a value of these sizes."""
        return prod(sizes[dim] for dim in self.features)


@dataclass(frozen=True)
class Kernel:
    """What a convolution reads for each position of its result. A value for each dimension.

    Attributes:
        padding: entries before and after, in the mode `mode` of `torch.nn.functional.pad`.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    mode: str


@dataclass(frozen=True)
class WeightRef:
    """A parameter, or part of one, as `nn.Linear` stores it: (out, in).

    Attributes:
        rows: rows of the stacked slice where there is one, else of the parameter, as a matrix.
        stacked_slice: which of several stacked matrices it is.
    """

    module: str  # dotted name in the model
    attribute: str  # "weight", "bias"
    rows: Slice | None = None
    transposed: bool = False  # stored (in, out), as transformers' Conv1D does
    stacked_slice: StackedSlice | None = None
    layout: MatrixLayout | None = None  # of a parameter that is no matrix, or one stored (in, out)

    @property
    def is_partial(self) -> bool:
        return self.rows is not None or self.stacked_slice is not None


@dataclass(frozen=True)
class ActivationRef:
    """Where a hidden state is in the traced graph of the layer (or module) `root`.

    Attributes:
        node: the name of a node of the inlined graph; or INPUT or OUTPUT for a tensor among the
            arguments or in the result of the site's own module; or TABLE_IDS for the ids at which
            its code reads the table of an embedding.
        key_path: leads to that tensor: (parameter, *keys) for INPUT, the keys for OUTPUT. An empty
            path means the first tensor.
        kernel: of a convolution whose input is read as patches, one for each position.
        by_reader: whether what reads the value tells where its features are, and not what
            computes it.
        before_padding: whether a function pads the value for the convolution that reads it.
    """

    node: str
    rows: Slice | None = None  # of the last dimension
    feature_map: bool = False  # features are dimension 1, as in convolutions: (batch, d, height, width)
    dims: FeatureDims | None = None  # where features are several dimensions, or not the last one
    other_nodes: tuple[str, ...] = ()  # further nodes that receive a value written here
    key_path: tuple[Any, ...] = ()
    kernel: Kernel | None = None
    by_reader: bool = False
    before_padding: bool = False


@dataclass(frozen=True)
class State:
    """A hidden state, or a weight, at a site.

    Attributes:
        name: h, x, c, q, k, v, kv, z, res, w or b.
        shape: of the state; `str` of it is what plans print.
        activation: its place in the traced graph, for an activation.
        weight: its place among the parameters, for w and b.
        linear: the path of the site whose Linear computes it, possibly followed by dropout.
    """

    name: str  # h x c q k v kv z res w b
    shape: Shape
    activation: ActivationRef | None = None  # activations
    weight: WeightRef | None = None  # w and b
    linear: str = ""  # path of the site whose Linear computes it, possibly followed by dropout


@dataclass(frozen=True)
class Site:
    """A place in the model that an edit can name, e.g. `decoder.layer[3].attn.cross.q`.

    Attributes:
        path: the canonical name of the site.
        kind: sites of one kind have the same graph.
        states: the hidden states and weights at the site, by name.
    """

    path: str
    steps: Steps  # the parts of the path as (name, index or None)
    module: str  # dotted name of the module that computes it, or of the smallest one that contains it
    root: str  # the module whose graph holds its states: the layer, or outside layers the module itself
    kind: str
    states: Mapping[str, State]
    frozen_modules: Mapping[str, str] = field(default_factory=dict[str, str])  # name -> dotted name
    group: str = ""  # the attention group ("encoder.self") or the stack
    layer_input: State | None = None  # set where a state here has batch and tokens flattened into one dimension
    runs: int = 1  # how often one forward runs its layer (layers may share one set of weights)
    calls: int = 1  # how often the layer computes with the weight; see `is_of_every_call`
    by_example: bool = True  # whether all these calls read values of shape (examples, …, d)
    bare: bool = False  # code multiplies by the parameter itself: no call of a module computes `h`
    read_besides: bool = False  # such code computes with the parameter in other ways, too
    computed_bias: bool = False  # what code adds to a product with a parameter, and no parameter of one role
    constant_bias: str = ""  # the buffer that code adds to such a product: a fold relies on its zeros
    shared_with: tuple[Site, ...] = ()  # other sites of the same module, on which an edit acts, too
    parts: tuple[str, ...] = ()  # of a layer that is the body of a loop: the modules that it calls

    @property
    def steps_in_layer(self) -> Steps:
        """The steps below the layer; all of them outside of layers."""
        start = next((i + 1 for i, (name, _) in enumerate(self.steps) if name == "layer"), 0)
        return self.steps[start:]

    @property
    def is_of_every_call(self) -> bool:
        """Whether a layer calls the module several times: `x` and `h` are those of each call."""
        return self.calls > 1 and self.root == self.module and not self.bare

    @property
    def uses(self) -> tuple[Site, ...]:
        """This site and the other sites of its module."""
        return self, *self.shared_with


@dataclass(frozen=True)
class ModuleInfo:
    """Any module of the model, for globs, `**` and `train`.

    Attributes:
        type: its class.
        input: the features of the first tensor among its arguments; None where the calls of a
            forward differ in them, or the tensor has no features.
        output: the same of its result.
        output_path: as `ActivationRef.key_path`.
        input_map: whether the features of the input are its second dimension, as in images.
        output_map: the same of its result.
        kernel: of a convolution that reads patches; its input has the features of one patch.
        ids: of an embedding, where the ids are (`ActivationRef.node`); `input` is how many.
        unknown: why its input or its output has no name; of a module that no forward calls, where
            its weight is read.
        transposed: whether its weight is stored (in, out).
    """

    name: str  # dotted
    type: str
    parameters: Mapping[str, tuple[int, ...]]  # its own, not its children's: attribute -> stored shape
    input: int | None = None
    output: int | None = None
    called: bool = True  # by a forward
    input_path: tuple[Any, ...] = ()  # as `ActivationRef.key_path`
    output_path: tuple[Any, ...] = ()
    input_map: bool = False
    output_map: bool = False
    kernel: Kernel | None = None
    ids: str = ""
    unknown: str = ""
    transposed: bool = False


@dataclass(frozen=True)
class UntracedModule:
    """A module whose code cannot be traced: there are no sites in it.

    Attributes:
        type: its class.
        reason: why it cannot be traced.
    """

    module: str  # dotted name in the model
    type: str
    reason: str
    steps: Steps = ()  # of its layer; they end before `layer` where a whole layer is untraced
    roles: frozenset[str] = frozenset()  # `layer`, or which of attn, ffn, mixer, norm it may contain


@dataclass(frozen=True)
class UnplacedModule:
    """A module with weights that lack a role: an edit of the role leaves it out.

    Attributes:
        type: its class.
        reason: why it has no role.
        steps: of its layer; none outside of the layers.
        roles: what it may be: `attn`, `ffn`, or one role of these, `attn.q`.
    """

    module: str  # dotted name in the model
    type: str
    reason: str
    steps: Steps
    roles: frozenset[str]


@dataclass(frozen=True)
class SiteTable:
    """What the planner knows of a model. Plain data: no tensors, no modules, no torch.

    Attributes:
        model_id: the name of the model.
        model_type: transformers' model type, or the class of a plain module.
        d_model: the width of the residual stream, in features.
        fingerprint: of the architecture, not of the values.
        fingerprint_version: of the way in which the fingerprint is computed.
        modules: every module with its parameters.
        warnings: what could not be observed.
        untraced: the modules in which there are no sites, with the reasons.
        unplaced: the modules with weights that lack a role.
    """

    model_id: str
    model_type: str
    parameters: int  # total of the base, tied weights once
    d_model: int
    fingerprint: str
    sites: Sequence[Site]  # in model order
    modules: Sequence[ModuleInfo] = ()
    tied: tuple[tuple[str, ...], ...] = ()  # groups of dotted parameter names that are one tensor
    overlaps: tuple[tuple[str, ...], ...] = ()  # groups of distinct parameters that share memory
    shared_modules: tuple[tuple[str, ...], ...] = ()  # groups of dotted module names that are one module
    aliases: tuple[tuple[str, str], ...] = ()  # (another name of a module that is in no group, its name here)
    cross_layer_calls: tuple[tuple[str, str], ...] = ()  # (module of a layer, another layer that calls it)
    external_reads: tuple[tuple[str, ...], ...] = ()  # (parameter, modules other than its own that read it)
    warnings: tuple[str, ...] = ()
    untraced: tuple[UntracedModule, ...] = ()
    unplaced: tuple[UnplacedModule, ...] = ()
    fingerprint_version: int = 2
    positions: int | None = None  # the most tokens that the model takes, where its configuration says so

    def __str__(self) -> str:
        """The tree of sites, as `peftc sites` prints it."""
        text: str = import_module("peftc.planning.report.plan").sites_text(self)  # a later stage
        return text

    def _repr_html_(self) -> str:
        """For notebooks: the tree of sites."""
        html: str = import_module("peftc.planning.report.html").sites_html(self)  # a later stage
        return html

    def _repr_svg_(self) -> str | None:
        """For notebooks: one layer of each kind; None without pygraphviz."""
        svg: str | None = import_module("peftc.pictures.picture").sites_svg(self)
        return svg


def parameter_name(ref: WeightRef) -> str:
    return f"{ref.module}.{ref.attribute}".lstrip(".")
