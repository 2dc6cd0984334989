"""Layers that no list holds, layers that take a state and return it, a model that returns early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.hand_written.various import Attention, attn_roles
from benchmarks.foreign_models.tables import hand_written


def Mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(16), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(16), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def block_roles(at: str) -> dict[str, str]:
    return attn_roles(f"{at}.attn") | {
        "attn.norm": f"{at}.ln_1.weight",
        "ffn.up": f"{at}.mlp.0.weight",
        "ffn.down": f"{at}.mlp.2.weight",
        "ffn.norm": f"{at}.ln_2.weight",
    }


# Blocks under names of their own.
class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.local_block, self.global_block = Block(), Block()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.global_block(self.local_block(self.embed(x))))


# Each level holds the next one.
class Level(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.block = Block()
        self.inner = Level(depth - 1) if depth > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x if self.inner is None else self.inner(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.levels, self.head = nn.Linear(4, 16), Level(3), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.levels(self.embed(x)))


# One block alone, which refines its result three times (deep equilibrium, ALBERT).
class Refined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(4, 16), Block(), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.cell(x)
        return self.head(x)


# A pipeline: each stage takes a record and returns another.
@dataclass
class State:
    tokens: Tensor
    depth: int = 0


class Stage(Block):
    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(super().forward(state.tokens), state.depth + 1)


# The same with a dictionary, in which other values pass through.
class Update(Block):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {**batch, "hidden": super().forward(batch["hidden"])}


class Pipeline(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.stages, self.head = nn.Linear(4, 16), nn.ModuleList([block(), block()]), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = State(self.embed(x))
        for stage in self.stages:
            state = stage(state)
        return self.head(state.tokens)


class Batches(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        batch = {"input": x, "hidden": self.embed(x)}
        for stage in self.stages:
            batch = stage(batch)
        return self.head(batch["hidden"]) + batch["input"].mean()


# Layers after the first run only while the tokens still change.
class Leaving(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for stage in self.stages:
            before, x = x, stage(x)
            if (x - before).abs().mean() < 1e-9:
                break
        return self.head(x)


# Attentions and feed-forward parts are attributes of the model itself.
class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.attn_1, self.attn_2, self.ff_1, self.ff_2 = Attention(), Attention(), Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attn_1(x)
        x = x + self.ff_1(x)
        x = x + self.attn_2(x)
        return x + self.ff_2(x)


PARTS = attn_roles("attn_{i}") | {"ffn.up": "ff_{i}.0.weight", "ffn.down": "ff_{i}.2.weight"}


def tokens() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 4)}


def case(name: str, build: Any, stack: Stack) -> Case:
    return hand_written(name, build, tokens, stack)


STAGES = Stack((0, 1), block_roles("stages.{i}"))
CASES = (
    case("named_blocks", Named, Stack(("local", "global"), block_roles("{i}_block"))),
    case("nested_blocks", Nested, Stack(("", ".inner", ".inner.inner"), block_roles("levels{i}.block"))),
    case("refined", Refined, Stack(("cell",), block_roles("{i}"))),
    case("record_state", lambda: Pipeline(Stage), STAGES),
    case("dict_state", lambda: Batches(Update), STAGES),
    case("early_exit", lambda: Leaving(Block), STAGES),
    case("unlisted_parts", Parts, Stack((1, 2), PARTS)),
)
