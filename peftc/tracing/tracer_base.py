"""The part of the tracer that proxies and patches use: nodes, guards, the recording state."""

import contextlib
import inspect
import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from peftc.diagnostics.model_line import running_line
from peftc.tracing.bytecode import Occurrence, Origin, position_of, running_stack
from peftc.tracing.in_place import OUT_OF_PLACE_NAMES, MutationTracker
from peftc.tracing.operations import branch
from peftc.tracing.ragged_loops import Loops
from peftc.tracing.region_trace import Guard, ModuleCall, NoneAccess, TraceError
from peftc.tracing.tensor_provenance import TensorProvenance

MOST_OUTCOMES = 1 << 10  # of branches on tensor values: more experts than a model has
_active = threading.local()
_transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore


def reject_transform(*_: Any, **__: Any) -> Any:
    """Raises: TraceError for `torch.vmap`, `torch.func.grad`, `torch.autograd.functional`."""
    # Seen in: no transformers model, but layers that train a part of themselves on each input
    raise TraceError("a graph cannot hold a transform of a function, such as `torch.vmap`")


def check_transforms() -> None:
    """Raises: TraceError inside a transform, whose C code takes proxies for tensors."""
    if _transform() is not None:
        reject_transform()


class TracerBase(fx.Tracer):
    """The methods that proxies call. Subclasses implement `create_proxy` and `create_arg`.

    `path_prefix`: outcomes of the first branches on tensor values. Others take the likely outcome.
    """

    def __init__(self, path_prefix: tuple[bool, ...] = ()) -> None:
        super().__init__()
        self.path_prefix = path_prefix
        self.recording = False
        self.handled: BaseException | None = None  # by code around the trace
        self.number_keys = set[fx.Node]()  # numbers that code has used as keys
        self.guards: list[Guard] = []
        self.attribute_guards: dict[tuple[str, str], Any] = {}
        self.global_state: dict[tuple[str, tuple[Any, ...]], Any] = {}  # what queries of torch returned
        self.depends_on_dtype = False
        self.outcomes: list[bool] = []
        self.calls: list[ModuleCall] = []
        self.call_stack: list[str] = []  # names of the children whose code is running
        self.open_contexts: list[tuple[Any, fx.Node]] = []  # each with the node that enters it
        self.module_names: dict[int, str] = {}
        self.tensor_names: dict[int, str] = {}  # of parameters and buffers
        self.mutations = MutationTracker(self)
        self.provenance = TensorProvenance(self, self.tensor_names)
        self.loops = Loops(self, self.provenance, self.mutations, (self.calls, self.guards))
        self._counts: Counter[tuple[str, str, str]] = Counter()

    @property
    def caller(self) -> str:
        """The name of the module whose code is running; "" for the region itself."""
        return self.call_stack[-1] if self.call_stack else ""

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], direct: bool = False
    ) -> Any:
        """What Python gets for a call of `m`. `direct`: of its `forward`, past its hooks."""
        return forward(m, *args, **kwargs)

    def is_running(self, module: nn.Module) -> bool:
        """Whether the code that is running is the module's own."""
        return self.module_names.get(id(module)) == self.caller

    def guard(self, node: fx.Node, kind: str, value: Any) -> Any:
        """While recording, adds the guard that `kind` of `node` is `value`. Returns `value`."""
        if self.recording:
            self.guards.append(Guard(node, kind, value, running_line()))
        return value

    def guard_type(self, node: fx.Node, cls: type) -> None:
        """Guards the type of an attribute or method result. A cache's length may be a tensor."""
        is_member = node.op == "call_method" or node.target is getattr
        source = node.args[0] if is_member and node.args else None
        if isinstance(source, fx.Node) and not isinstance(source.meta.get("example"), torch.Tensor):
            self.guard(node, "type", torch.Tensor if issubclass(cls, torch.Tensor) else cls)

    def guard_attribute(self, path: str, value: Any) -> None:
        if self.recording:
            module, _, name = path.rpartition(".")
            self.attribute_guards[module, name] = value

    def reject_none(self, node: fx.Node, value: Any) -> None:
        """Raises: NoneAccess if `value`, whose attribute or item the code uses, is None."""
        if value is None and self.recording:
            raise NoneAccess(node.meta["origin"])

    def outcome_of(self, condition: fx.Node, likely: bool = True) -> bool:
        """The outcome that the trace assumes for a branch on tensor values: only a run tells."""
        if self.open_contexts or self.loops.iterations:  # the other path would have to leave the block, too
            raise TraceError("a branch on tensor values is inside of a `with` block or a loop")
        self.check_outcomes()
        index = len(self.outcomes)
        outcome = self.path_prefix[index] if index < len(self.path_prefix) else likely
        self.outcomes.append(outcome)
        self.create_node("call_function", branch, (condition, outcome), {})
        return outcome

    def check_outcomes(self) -> None:
        """Raises: TraceError for code that asks without end, since it waits for another outcome."""
        if len(self.outcomes) >= MOST_OUTCOMES:
            raise TraceError("a loop goes on until the values of a tensor end it")

    def format_value(self, value: Any, spec: str) -> str:
        """`format(value, spec)`: code may build the name of a module from a traced value."""
        if isinstance(value, torch.Tensor):
            raise TraceError("a string is formatted from the values of a tensor")
        return format(value, spec)

    def read_attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        """What Python gets for `module.name`: `value`. Subclasses may return a proxy of it."""
        return value

    def note_absence(self, module: nn.Module, name: str) -> None:
        """Called when Python asks `module` for an attribute that it does not have."""

    def write_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Called before Python sets an attribute of `module`."""

    def note_left(self, owner: Any, name: str, value: Any) -> None:
        """Called at the end for each member of a module, an object, a class, or a global collection
        in which the code has left proxies.
        """

    def read_object(self, value: object, name: str, member: Any) -> Any:
        """What Python gets for `value.name`, of an object in a module: `member`, or a proxy."""
        return member

    def write_object(self, written: object, name: str, value: Any) -> None:
        """Called when Python sets a member of an object that a module holds."""

    def read_tensor(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """Called when Python reads a parameter or buffer of `module`."""

    def read_dtype(self, tensor: torch.Tensor) -> None:
        """Called when Python reads the dtype of a parameter or buffer."""

    def write_member(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        """Called before Python sets a member of a parameter or buffer, such as `data`."""

    def patches(self) -> Iterable[tuple[Any, str, Callable[[Any], Any]]]:
        """What a kind of tracer patches beside the rest: owner, attribute, and its replacement."""
        return ()

    def record(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return self.create_proxy(op, target, args, dict(kwargs or {}))

    def record_node(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """Records a call as a node without a proxy: the traced code does not see its result."""
        arguments: Any = tuple(map(self.create_arg, args)), self.create_arg(dict(kwargs or {}))
        node = self.create_node("call_function", target, *arguments)
        node.meta["example"] = None
        return node

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:  # pyright: ignore[reportIncompatibleMethodOverride]
        node = super().create_node(kind, target, *args, **kwargs)
        stack = running_stack()
        key = (self.caller, f"{kind} {self._operation_name(kind, target, args[0])}", position_of(stack))
        caller, operation, position = key
        node.meta |= {"stack": stack, "origin": Origin(caller, operation, Occurrence(position, self._counts[key]))}
        self._counts[key] += 1
        self.loops.add(node)
        return node

    def _operation_name(self, kind: str, target: Any, args: tuple[Any, ...]) -> str:
        if target is operator.getitem:  # names what is indexed, too: cache updates do not shift the count
            source, index = args
            return f"getitem {index} of {source.meta['origin'].operation if isinstance(source, fx.Node) else source}"
        if kind == "call_module" and self.caller:
            return str(target).removeprefix(f"{self.caller}.")
        return str(OUT_OF_PLACE_NAMES.get(target) or getattr(target, "__name__", target))

    @contextlib.contextmanager
    def activate(self) -> Generator[None]:
        """Inside, this is the current tracer of the thread."""
        outer = getattr(_active, "tracer", None)
        _active.tracer, self.recording, self.handled = self, True, sys.exc_info()[1]
        try:
            yield
        finally:
            _active.tracer, self.recording = outer, False

    def handles_error(self) -> bool:
        """Whether the code that runs is an `except` block."""
        return sys.exc_info()[1] is not self.handled

    @contextlib.contextmanager
    def pause(self) -> Generator[None]:
        """Inside, nothing is recorded: examples are computed, or torch's own code runs."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before


def is_called_by_library(frames: int) -> bool:
    """Whether code of PyTorch's or peftc's called the function so many frames above this one."""
    frame = inspect.currentframe()
    for _ in range(frames + 1):
        frame = frame and frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(("torch.", "peftc."))


def current_tracer() -> TracerBase | None:
    """The tracer that records what this thread runs."""
    tracer: TracerBase | None = getattr(_active, "tracer", None)
    return tracer if tracer is not None and tracer.recording else None


def is_tracing() -> bool:
    """Whether this thread traces a region, even while its tracer is paused."""
    return getattr(_active, "tracer", None) is not None


@contextlib.contextmanager
def patch_attribute(owner: object, name: str, wrap: Callable[[Any], Any]) -> Generator[None]:
    """Inside, `owner.name` is `wrap(owner.name)`."""
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is not None:
            setattr(owner, name, own)
        else:
            delattr(owner, name)


def intercept(record: Callable[..., Any], when: Callable[[Any], bool] = lambda _: True) -> Callable[[Any], Any]:
    """A patch: `record(tracer, original, …)` runs where a tracer records and `when` holds."""

    def wrap(original: Any) -> Any:
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            tracer = current_tracer()
            if tracer is None or not when((args, kwargs)):
                return original(*args, **kwargs)
            return record(tracer, original, *args, **kwargs)

        return intercepted

    return wrap
