"""The configuration of a PEFT adapter: each key is read, is of no consequence, or is refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from peftc.diagnostics import Diagnostic, PeftcError

# Of no consequence for what an adapter computes: where it comes from, how it was trained, and which
# modules it is for, which its tensors tell.
OF_NO_CONSEQUENCE = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        *("fan_in_fan_out", "megatron_core", "runtime_config", "init_weights", "init_ia3_weights", "bias"),
        "ensure_weight_tying",
    )
)
_NEUTRAL: tuple[Any, ...] = (None, False, {}, [], "", 0)
_MOST_QUANTIFIERS = 4  # of a pattern: more may take long to match
_LONGEST = 1_000  # characters of a pattern
_UNSAFE = re.compile(r"\)\s*[*+{?]|\(\?")


class PeftConfig:
    """The values of adapter_config.json. What is read is noted, so that the rest can be refused."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.seen = values, {"peft_type"}

    @property
    def type(self) -> str:
        value = self.values.get("peft_type")
        return value if isinstance(value, str) else ""

    @property
    def base(self) -> str | None:
        value = self.values.get("base_model_name_or_path")
        return value if isinstance(value, str) and value else None

    @property
    def saved(self) -> list[str]:
        """`modules_to_save`. Raises: P802."""
        value = self.read("modules_to_save", [])
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in cast(list[Any], value)):
            raise refusal("modules_to_save", value, "it is an array of names")
        return cast(list[str], value)

    def read(self, key: str, default: Any) -> Any:
        self.seen.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def flag(self, key: str) -> bool:
        value = self.read(key, False)
        if not isinstance(value, bool):
            raise refusal(key, value, "it is true or false")
        return value

    def number(self, key: str, default: float | None, module: str = "", pattern: str | None = None) -> float:
        """A number; that of a module, where `pattern` is a key with such numbers."""
        value = self.read(key, default)
        patterns = self.read(pattern, {}) if pattern is not None else {}
        if not isinstance(patterns, dict):
            raise refusal(str(pattern), patterns, "it is an object of names and numbers")
        for name, own in cast(dict[str, Any], patterns).items():
            if matches(str(pattern), name, module):
                value = own
                break
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise refusal(key, value, "it is a number")
        return value

    def rank(self, module: str) -> int:
        return self.whole("r", 8, module, "rank_pattern")

    def whole(self, key: str, default: int, module: str = "", pattern: str | None = None) -> int:
        """A number as `number`, from 1 on."""
        value = self.number(key, default, module, pattern)
        if value < 1 or value != int(value):
            raise refusal(key, value, "it is a number from 1 on")
        return int(value)

    def one_of(self, key: str, allowed: Collection[Any], reason: str) -> Any:
        """Raises: P802 for another value than the first, which is the default, and the others."""
        value = self.read(key, next(iter(allowed)))
        if value not in allowed:
            raise refusal(key, value, reason)
        return value

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raises: P802 for a key that has not been read and has a value."""
        for key, value in self.values.items():
            if key not in self.seen and key not in OF_NO_CONSEQUENCE and key not in ignored and value not in _NEUTRAL:
                raise refusal(key, value, "peftc has no equation for it, or does not know the key")


def matches(key: str, pattern: str, module: str) -> bool:
    """Whether PEFT takes a key of `rank_pattern` or `alpha_pattern` for a module. Raises: P802."""
    quantifiers = len(re.findall(r"(?<!\\)[*+{]", pattern))
    if len(pattern) > _LONGEST or quantifiers > _MOST_QUANTIFIERS or _UNSAFE.search(pattern):
        raise refusal(key, pattern, "this regular expression may take very long to match")
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise refusal(key, pattern, f"it is no regular expression: {error}") from error


def refusal(key: str, value: Any, reason: str) -> PeftcError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}…"
    return PeftcError(Diagnostic("P802", f"the configuration has `{key}: {shown}`: {reason}"))
