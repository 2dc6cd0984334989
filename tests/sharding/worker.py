"""One of the processes of `test_processes.py`: edits of sharded weights."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

import peftc
from tests import zoo

STEPS, BATCH = 3, 4
LINEARS = "layer[*].attn.{q, k, v, o} | layer[*].ffn.{gate, up, down}"
SPECS = {
    "all": f"""peft 1
        edit a at {LINEARS} {{ h += lora(x, r=2, alpha=4) }}
        edit f at layer[*].ffn {{ h += adapter(x, r=4, init=bert) }}
        edit p at layer[*].attn {{ kv = concat(prefix(len=3), kv) }}""",
    "prefix": "peft 1  edit p at layer[*].attn { kv = concat(prefix(len=3), kv) }",
    "adapters": f"peft 1  edit a at {LINEARS} {{ h += adapter(x, r=4, act=gelu, init=bert) }}",
    "factors": """peft 1
        edit kv at layer[*].attn.{k, v} { h *= vector(init=1) }
        edit f at layer[*].ffn.hidden { h *= vector(init=1) }""",
    "whole": """peft 1
        edit w at layer[*].attn.{q, o} { w = magnitude(w + lowrank(r=2)) }
        edit n at layer[*].ffn.{up, down} { h += adapter(x, r=4, norm_in=true, norm_out=true, init=bert) }""",
    "shared": f"peft 1  edit v at {LINEARS} {{ h += vera(x, r=4) }}",
    "side": "peft 2  edit s at layer[*] { h = ladder(h, x, r=4, replace=true) }",
    "below": """peft 2
        edit l at layer[*].attn.{q, v} { h += lora(x, r=2) }
        edit s at layer[*] { h += ladder(h, r=4) }""",
    "heads": "peft 1  edit s at layer[*].attn.heads { h += bottleneck(q, r=3) }",
    "inner": "peft 1  edit z at layer[*].ffn { h += adapter(z, r=3) + adapter(x, r=3) }",
}
# How the model is sharded (tp, fsdp, both), when it is compiled, and the spec.
CASES = [
    ("tp", "first", "all"),
    ("tp", "last", "all"),
    ("tp", "first", "prefix"),
    ("tp", "last", "adapters"),
    ("tp", "first", "factors"),
    ("tp", "last", "whole"),
    ("tp", "last", "shared"),
    ("plan", "last", "all"),
    ("plan", "last", "whole"),
    ("fsdp", "first", "all"),
    ("fsdp", "last", "all"),
    ("fsdp", "first", "side"),
    ("fsdp", "first", "below"),
    ("both", "first", "all"),
    ("both", "last", "all"),
]
LOADED = [("tp", "first"), ("plan", "last"), ("fsdp", "last"), ("both", "between")]
REFUSED = [("tp", "last", "heads"), ("tp", "last", "inner"), ("fsdp", "last", "shared")]
ATTACHED = {  # adapters that are on one model together, by their folders
    "attached-a": f"peft 2  edit a at {LINEARS} {{ h += lora(x, r=2) }}",
    "attached-b": f"peft 2  edit a at {LINEARS} {{ h += lora(x, r=2) }}",
    "attached-c": "peft 2  train n = [w] at layer[*].norm  train h = [w] at head",
}
ATTACHMENTS = [("tp", "first"), ("tp", "last"), ("fsdp", "first")]
EDITS = StateDictOptions(ignore_frozen_params=True, strict=False)
STYLES = {
    **{f"layers.*.self_attn.{name}_proj": ColwiseParallel for name in "qkv"},
    "layers.*.self_attn.o_proj": RowwiseParallel,
    **{f"layers.*.mlp.{name}_proj": ColwiseParallel for name in ("gate", "up")},
    "layers.*.mlp.down_proj": RowwiseParallel,
}


def build() -> Any:
    return zoo.build("llama", torch.float64, num_hidden_layers=2, num_key_value_heads=4).train()


def batches(part: int = 0, parts: int = 1) -> list[Tensor]:
    """The rows of one of the parts that batches are split into."""
    generator, rows = torch.Generator().manual_seed(0), BATCH // parts
    return [torch.randint(5, 30, (BATCH, 8), generator=generator)[part * rows :][:rows] for _ in range(STEPS)]


def losses(model: Any, data: Iterable[Tensor], parts: int = 1) -> list[float]:
    """Of a few steps, the mean over processes."""
    optimizer = torch.optim.AdamW(peftc.parameters(model).values(), lr=0.01)
    result: list[float] = []
    for ids in data:
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if parts > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        result.append(mean.item())
    return result


def parallelize(model: Any, mesh: Any) -> None:
    parallelize_module(model.model, mesh, {name: style() for name, style in STYLES.items()})


def fully(model: Any, mesh: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sharded(way: str, order: str, edit: Callable[[Any], object], folder: Path) -> Any:
    """A model that is sharded and edited, in this order."""
    world = dist.get_world_size()
    if way == "plan":
        config = DistributedConfig(tp_size=world)
        model: Any = LlamaForCausalLM.from_pretrained(folder / "base", distributed_config=config, dtype=torch.float64)
        zoo._exact_norms(model.train())  # pyright: ignore[reportPrivateUsage]
        edit(model)
        return model
    model = build()
    sizes = {"tp": (1, world), "fsdp": (world, 1), "both": (2, world // 2)}[way]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "parallel"))
    if order == "first":
        edit(model)
    if way != "fsdp":
        parallelize(model, mesh["parallel"])
    if order == "between" or (order == "last" and way == "tp"):
        edit(model)
    if way != "tp":
        fully(model, mesh["data"])
    if order == "last" and way != "tp":
        edit(model)
    return model


def part_of(way: str) -> tuple[int, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return {"fsdp": (rank, world), "both": (rank // (world // 2), 2)}.get(way, (0, 1))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in peftc.parameters(model).items()
    }


def placements(model: nn.Module) -> dict[str, list[str]]:
    """Of the parameters of the first layer, and of their gradients."""
    first = {name: p for name, p in peftc.parameters(model).items() if "layer[0]" in name and isinstance(p, DTensor)}
    return {name: [str(p.placements), str(p.grad.placements)] for name, p in first.items()}


def work(rank: int, world: int, directory: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", peftc.PeftcWarning)
    folder = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=world)
    torch.manual_seed(rank)  # of the processes' own
    report = {"-".join(case): train(*case, folder) for case in CASES}
    report |= {"-".join(case): refusal(*case, folder) for case in REFUSED}
    report["loading"] = loading(folder, ("one",))
    report["calls"] = calls(folder)
    report["attached"] = {"-".join(one): attachment(*one, folder) for one in ATTACHMENTS}
    report["split"] = refused_values(folder)
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    dist.barrier()
    os._exit(0)  # on a busy machine, shutting gloo's threads down sometimes aborts the process


def train(way: str, order: str, spec: str, folder: Path) -> dict[str, Any]:
    model = sharded(way, order, lambda model: peftc.compile(SPECS[spec], model, seed=0), folder)
    part, parts = part_of(way)
    result: dict[str, Any] = {"losses": losses(model, batches(part, parts), parts), "placements": placements(model)}
    if spec == "all":
        name, gathered = f"{way}-{order}", list[int]()
        result["values"] = sum(p.numel() for p in peftc.parameters(model).values())
        full_tensor = DTensor.full_tensor
        DTensor.full_tensor = lambda self, **kwargs: (gathered.append(self.numel()), full_tensor(self, **kwargs))[1]
        peftc.save(model, folder / f"adapter-{name}")
        DTensor.full_tensor = full_tensor
        result["gathered"] = sum(gathered)
        dcp.save(get_model_state_dict(model, options=EDITS), checkpoint_id=folder / f"checkpoint-{name}")
        trained = values(model)
        if dist.get_rank() == 0:
            torch.save(trained, folder / f"values-{name}.pt")
    return result


def refusal(way: str, order: str, spec: str, folder: Path) -> list[str]:
    try:
        sharded(way, order, lambda model: peftc.compile(SPECS[spec], model, seed=0), folder)
    except peftc.PeftcError as error:
        return [f"{one.code} {one.message}" for one in error.diagnostics]
    return []


def loading(folder: Path, names: Iterable[str]) -> dict[str, bool]:
    """Whether adapters and distributed checkpoints have the same bits in sharded models."""
    result: dict[str, bool] = {}
    for name in names:
        wanted = torch.load(folder / f"values-{name}.pt")
        for way, order in (
            ("tp", "first"),
            ("tp", "last"),
            ("plan", "last"),
            ("fsdp", "first"),
            ("fsdp", "last"),
            ("both", "between"),
        ):
            model = sharded(way, order, lambda model, name=name: peftc.load(folder / f"adapter-{name}", model), folder)
            actual = values(model)
            result[f"{name} {way} {order}"] = all(torch.equal(actual[n], wanted[n]) for n in wanted)
        model = sharded("both", "first", lambda model: peftc.compile(SPECS["all"], model, seed=1), folder)
        state = get_model_state_dict(model, options=EDITS)
        dcp.load(state, checkpoint_id=folder / f"checkpoint-{name}")
        set_model_state_dict(model, state, options=EDITS)
        actual = values(model)
        result[f"{name} checkpoint"] = all(torch.equal(actual[n], wanted[n]) for n in wanted)
    return result


def attach_all(model: nn.Module, folder: Path) -> nn.Module:
    for name in ATTACHED:
        peftc.attach(folder / name, model)
    return model.eval()


def attachment(way: str, order: str, folder: Path) -> dict[str, float]:
    """How far a sharded model with attached adapters is from that of one process: the outputs of
    each adapter and of the base, in this order, and the gradients of one.
    """
    one: Any = attach_all(build(), folder)
    model = sharded(way, order, lambda model: attach_all(model, folder), folder)
    ids, result = batches()[0], dict[str, float]()
    part, parts = part_of(way)
    own = batches(part, parts)[0]
    for number, name in enumerate(["attached-c", "attached-a", None, "attached-b", "attached-c"]):
        outputs: list[Tensor] = []
        for own_model in (model, one):
            peftc.activate(own_model, name)
            with torch.no_grad():
                outputs.append(own_model(input_ids=ids).logits)
        result[f"{number} {name}"] = float((outputs[0] - outputs[1]).abs().max())
    for own_model, tokens in ((model, own), (one, ids)):
        logits = own_model(input_ids=tokens).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = peftc.parameters(one, "attached-c")
    for name, parameter in peftc.parameters(model, "attached-c").items():
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        result[name] = float((whole - cast(Tensor, gradients[name].grad)).abs().max())
    peftc.activate(model, "attached-a")
    peftc.activate(one, "attached-b")
    peftc.swap(model, "attached-a", folder / "attached-b")
    with torch.no_grad():
        result["swap"] = float((model(input_ids=ids).logits - one(input_ids=ids).logits).abs().max())
    return result


def refused_values(folder: Path) -> list[str]:
    """The codes of an adapter that trains weights that are split, attached before and after."""
    codes: list[str] = []
    for order in ("first", "last"):
        try:
            model = sharded("tp", order, lambda model: peftc.attach(folder / "split", model), folder)
            model(input_ids=batches()[0])
        except peftc.PeftcError as error:
            codes += [one.code for one in error.diagnostics]
    return codes


@torch.no_grad()
def calls(folder: Path) -> dict[str, Any]:
    """Of a model that transformers' plan shards: outputs without gradients, off, and after all."""
    base, one = build().eval(), peftc.load(folder / "adapter-one", build().eval())
    model = sharded("plan", "last", lambda model: peftc.load(folder / "adapter-one", model.eval()), folder)
    ids = batches()[0]

    def difference(own: Any, other: Any) -> float:
        return float((own(ids).logits - other(ids).logits).abs().max())

    new = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    result = {"edited": difference(model, one), "moved": difference(one, base)}
    result["generated"] = torch.equal(model.generate(ids[:1], **new), one.generate(ids[:1], **new))
    try:
        peftc.verify(model)
    except peftc.PeftcError as error:
        result["verified"] = error.diagnostics[0].code
    with peftc.disabled(model):
        result["off"] = difference(model, base)
    peftc.remove(model)
    return {**result, "removed": difference(model, base)}
