"""Names of stacks of layers: `encoder`, `decoder`, and in models of several media their tower:
`vision.layer[0]`, `text.decoder.layer[0]`, `qformer.layer[0]`.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import nn
from transformers import PretrainedConfig

from peftc.modules.walk import submodule
from peftc.recognition.layers import ModelStructure, Stack
from peftc.recognition.non_layer_sites import Steps
from peftc.recognition.sublayer import SubLayer
from peftc.syntax.vocabulary import SITES, STACKS, TOWERS

T = TypeVar("T")

ROLES = ("q", "k", "v", "o", "gate", "up", "down")

MEDIUM_WORDS: dict[str, tuple[str, ...]] = {  # in the names of sections of a configuration
    "vision": ("vision", "image", "video", "visual"),
    "audio": ("audio", "speech", "sound"),
    "text": ("text", "language"),
}
GENERIC_SECTIONS = frozenset({*SITES, "backbone"})  # name no medium, or something else


def name_stacks(structure: ModelStructure) -> None:
    """Names every stack. One stack, or an encoder that its decoder attends to, has no towers."""
    config = getattr(structure.model, "config", None)
    stacks = structure.stacks
    towers: dict[str, list[Stack]] = defaultdict(list)
    for stack in stacks:
        towers[_tower(stack, structure)].append(stack)
    pair = len(stacks) == 2 and bool(getattr(config, "is_encoder_decoder", False))
    if len(towers) < 2 or pair:
        towers = {"": stacks}
    for tower, members in towers.items():
        single = bool(tower) and len(members) == 1
        for stack, role in zip(members, _roles(members), strict=True):
            stack.name = tower if single else f"{tower}.{role}".lstrip(".")


def _roles(stacks: list[Stack]) -> list[str]:
    """`encoder` or `decoder`; of several of one kind, the part of the path that differs. A layer in
    no list has the name of its module: the others have those that they have without it.
    """
    lists = [stack for stack in stacks if stack.path not in stack.layers]
    if 0 < len(lists) < len(stacks):
        others = iter(_roles(lists))
        names = [next(others) if stack in lists else _distinct_part(stack.path, []) for stack in stacks]
        if len(set(names)) == len(names):
            return names
    roles = ["decoder" if _is_decoder(stack) else "encoder" for stack in stacks]
    if len(set(roles)) == len(roles):
        return roles
    parts = [_distinct_part(s.path, [o.path for o in stacks if o is not s]) for s in stacks]
    return parts if len(set(parts)) == len(parts) else [_joined(s.path) for s in stacks]


def _is_decoder(stack: Stack) -> bool:
    """A stack with cross-attention decodes, and one whose attention is causal."""
    for kind in stack.kinds:
        for sub in kind.subs:
            if sub.variant == "cross":
                return True
            if sub.attention is not None and sub.attention.sort == "interface":
                owner: Any = sub.attention.call.args[0]
                module = submodule(kind.root, "" if owner.target == "_self" else owner.target)
                if getattr(module, "is_causal", False):
                    return True
    return False


def _distinct_part(path: str, others: list[str]) -> str:
    """The first part of a path that the others lack and that has no meaning in the language."""
    for depth, part in enumerate(path.split(".")):
        rest = [o.split(".") for o in others]
        own = all(len(o) <= depth or o[depth] != part for o in rest)
        if own and not part.isdigit() and (part not in SITES or part in (*STACKS, *TOWERS)):
            return part
    return _joined(path)


def _joined(path: str) -> str:
    word = path.replace(".", "_")
    return f"{word}_" if word in SITES else word


def _tower(stack: Stack, structure: ModelStructure) -> str:
    """The medium of a stack: by its configuration, else by what reaches it."""
    parts = stack.layers[0].split(".")
    modules = [submodule(structure.model, ".".join(parts[:depth])) for depth in range(len(parts))]
    sections = list(sections_of(modules))
    names = ((medium, name) for name in reversed(sections) for medium in MEDIUM_WORDS)
    medium = next((medium for medium, name in names if any(word in name for word in MEDIUM_WORDS[medium])), None)
    own = next((name for name in reversed(sections) if name not in GENERIC_SECTIONS), None)
    return medium or own or structure.seen.modality.get(stack.layers[0]) or "text"


def sections_of(modules: list[nn.Module]) -> Iterator[str]:
    """The sections of the configuration that lead to the innermost of nested modules."""
    section: Any = None
    for own in (getattr(module, "config", None) for module in modules):
        if section is None:  # of a wrapper that has no configuration
            section = own if isinstance(own, PretrainedConfig) else None
        elif (name := _section_name(section, own)) is not None:
            yield "_".join(part for part in name.split("_") if part != "config")
            section = own


def _section_name(config: Any, part: Any) -> str | None:
    """The field of a configuration that holds the one of a part, or one of its class."""
    is_part = isinstance(part, PretrainedConfig) and part is not config
    fields = {name: value for name, value in vars(config).items() if is_part and type(value) is type(part)}
    return next((name for name, value in fields.items() if value is part), next(iter(fields), None))


def named_steps(name: str) -> Steps:
    """A module's name as the steps of a path: `experts.0.w1` is `experts[0].w1`."""
    steps: list[tuple[str, int | None]] = []
    for part in name.split("."):
        if part.isdigit() and steps and steps[-1][1] is None:
            steps[-1] = (steps[-1][0], int(part))
        else:
            word = "".join(c if c.isalnum() else "_" for c in part)
            steps.append((word if word[:1].isalpha() or word[:1] == "_" else f"_{word}", None))
    if steps[0][0] in (*ROLES, "heads", "hidden", "norm", "add"):
        steps[0] = (f"{steps[0][0]}_", steps[0][1])
    return tuple(steps)


def sub_layer_steps(subs: Sequence[SubLayer]) -> list[Steps]:
    """`attn.self`, `attn.cross`, `ffn`, `mixer`; numbered where a layer has several of one sort."""
    names = numbered([(sub.kind, sub.variant) for sub in subs])
    return [((kind, None), (variant, index)) if variant else ((kind, index),) for (kind, variant), index in names]


def relative_name(name: str, module: str) -> str:
    return name[len(module) + 1 :] if module and name.startswith(module + ".") else name.rpartition(".")[2]


def common(names: list[str]) -> str:
    """The deepest module that contains all the named ones."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns))


def numbered(names: list[T]) -> Iterator[tuple[T, int | None]]:
    """Each name with its number among equal ones; None for the only one."""
    many, seen = Counter(names), Counter[T]()
    for name in names:
        yield name, seen[name] if many[name] > 1 else None
        seen[name] += 1
