"""Adapters of a sharded model (FSDP2): in the checkpoints of torch.distributed, and in peftc's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import peftc

PROGRAM = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import peftc
from tests import zoo

dist.init_process_group("gloo")
mesh, folder = init_device_mesh("cpu", (2,)), Path(sys.argv[1])


def sharded(seed):
    model = zoo.build("llama", torch.float64).eval()
    peftc.compile("peft 1 edit a at layer[*].attn.q { h += lora(x, r=2) }", model, seed=0)
    torch.manual_seed(seed)
    for parameter in peftc.parameters(model).values():
        torch.nn.init.normal_(parameter)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def difference(model):
    return float((model(ids).logits - want).detach().abs().max())


ids = torch.arange(6)[None]
model = sharded(1)
want = model(ids).logits.detach()
assert difference(sharded(2)) > 1e-3
edits = StateDictOptions(ignore_frozen_params=True, strict=False)
for name, options in (("all", StateDictOptions()), ("edits", edits)):
    dcp.save(get_model_state_dict(model, options=options), checkpoint_id=folder / name)
    other = sharded(2)
    state = get_model_state_dict(other, options=options)
    dcp.load(state, checkpoint_id=folder / name)
    set_model_state_dict(other, state, options=options)
    assert difference(other) == 0, name
dcp.save(peftc.parameters(model), checkpoint_id=folder / "parameters")
other = sharded(2)
dcp.load(peftc.parameters(other), checkpoint_id=folder / "parameters")
assert difference(other) == 0
peftc.save(model, folder / "adapter")
dist.barrier()
other = sharded(2)
(file,) = (folder / "adapter").glob("*.safetensors")
other.load_state_dict(load_file(file))
assert difference(other) == 0
dist.barrier()
dist.destroy_process_group()
"""


def test_each_way_restores_a_sharded_model(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([str(Path(peftc.__file__).parent.parent), root, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command += [str(tmp_path / "program.py"), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
