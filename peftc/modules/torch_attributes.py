"""The attributes that PyTorch gives to every module."""

from __future__ import annotations

from typing import Any

from torch import nn

ATTRIBUTES = frozenset(vars(nn.Module()))
# Those that hold parameters, buffers, children and hooks, with the class of each table.
TABLES: dict[str, Any] = {
    name: type(value) for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)
}
