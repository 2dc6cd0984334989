"""Malformed and malicious input: a diagnostic with a code, and no change."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import peftc
from peftc.cli.main import main
from peftc.diagnostics import Diagnostic, PeftcError, Source, Span
from peftc.diagnostics.formats.github import render_github
from peftc.diagnostics.render import render_text
from peftc.semantics import check_file, read_spec
from peftc.semantics.expand import check_file as check
from peftc.syntax import parse_text, print_spec
from tests.layers import Layers

EDIT = "peft 1\nedit a at layer[*].attn.q { h += lora(x, r=2) }\n"
TASKED = EDIT.replace(" {", " per task {")


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=16)).eval()


def codes(call: Callable[[], object]) -> list[str]:
    with pytest.raises(PeftcError) as excinfo:
        call()
    assert str(excinfo.value).isprintable() or "\n" in str(excinfo.value)
    assert all(line.isprintable() for line in str(excinfo.value).split("\n"))
    return [diagnostic.code for diagnostic in excinfo.value.diagnostics]


# Texts
# --------------------------------------------------------------------------------------------------


def test_files_within_files_without_end(tmp_path: Path) -> None:
    for i in range(2_000):
        (tmp_path / f"{i}.peft").write_text(f'peft 1\nuse m from "{i + 1}.peft"\nmethod m{i}() {{ apply m() }}\n')
    (tmp_path / "main.peft").write_text('peft 1\nuse m0 from "0.peft"\napply m0()\n')
    assert "P126" in {diagnostic.code for diagnostic in check_file(read_spec(tmp_path / "main.peft"))}


def test_many_files_side_by_side(tmp_path: Path) -> None:
    names = range(300)
    for i in names:
        (tmp_path / f"{i}.peft").write_text(EDIT.replace("edit", f"method m{i}() {{ edit") + "}\n")
    uses = "".join(f'use m{i} from "{i}.peft"\napply m{i}() as a{i}\n' for i in names)
    (tmp_path / "main.peft").write_text(f"peft 1\n{uses}")
    assert check_file(read_spec(tmp_path / "main.peft")) == []


@pytest.mark.parametrize(
    "text",
    [
        "let a = " + "(" * 10_000 + "1" + ")" * 10_000,
        "let a = " + "-" * 100_000 + "1",
        "let a = " + "f(" * 10_000,
        "edit a at " + "(" * 10_000,
        "method a() { " * 10_000,
        "let a = 1e400",
        "let a = " + "9" * 400,
        "let a = 1" + "+ 1" * 10_000,
        "edit a at " + "layer - " * 10_000 + "layer { h += x }",
        "edit " + "a" * 100_000,
        "edit a\0b at layer[*].ffn { h += x }",
        'use m from "a\0b"',
        'use m from "' + "../" * 10_000 + '"',
        f"edit a at layer[{'9' * 400}].ffn {{ h += x }}",
        "edit a at layer[*].ffn { h += x" + " | x" * 10_000,
        "\ufeff\ufeffpeft 1",
        "edit a at layer[*].ffn { h += \u202eadapter(x) }",
    ],
    ids=range(17),
)
def test_texts(text: str) -> None:
    assert codes(
        lambda: [parse_text(f"peft 1\n{text}"), (_ for _ in ()).throw(PeftcError(check(parse_text(f"peft 1\n{text}"))))]
    )


@pytest.mark.parametrize("head", ["m", "m()", "m( )", "m(r = 4)", "m(r = 4,)", "m(r = 4, s = 2)"])
def test_methods_with_and_without_parameters(head: str) -> None:
    spec = parse_text(f"peft 1\nmethod {head} {{ {EDIT[7:-1]} }}")
    assert parse_text(print_spec(spec)) == spec


def test_messages_stay_on_their_lines() -> None:
    """Untrusted text in a message cannot control a terminal or forge lines of a log."""
    nasty = "a\x1b[2J\r\n::error::no\u202e\x00\ud800"
    at = Span(0, 1, 1, 1, 1, 2)
    diagnostic = Diagnostic("P900", nasty, at, Source(nasty, f"{nasty}\n"), nasty, (nasty,), nasty)
    for text in (render_text([diagnostic]), str(diagnostic)):
        assert all(line.isprintable() for line in text.rstrip("\n").split("\n"))
        assert not any(line.lstrip().startswith("::") for line in text.split("\n"))
    assert len(render_github([diagnostic]).splitlines()) == 1


# Arguments
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [10**400, 10**5000, 2**64, -(2**63) - 1, 1.5, float("nan"), "1", True, None.__class__], ids=range(9)
)
def test_seeds(seed: Any) -> None:
    base = model()
    before = {name: id(p) for name, p in base.named_parameters()}
    assert codes(lambda: peftc.compile(EDIT, base, seed=seed)) == ["P560"]
    assert {name: id(p) for name, p in base.named_parameters()} == before


def test_seeds_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.peft").write_text(EDIT)
    base = model()
    base.config.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    arguments = ["compile", str(tmp_path / "a.peft"), "--model", str(tmp_path), "-o", str(tmp_path / "out")]
    assert main([*arguments, "--seed", "9" * 400]) == 1
    assert "P560" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for seed in ("9" * 5000, "1.5", "x"):
        with pytest.raises(SystemExit):
            main([*arguments, "--seed", seed])


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "a" * 5_000, "a/" * 3_000, "\n", "\x1b[2J"], ids=range(6))
def test_names_and_paths(name: str) -> None:
    compiled = peftc.compile(EDIT, model(), seed=0)
    fusing = peftc.compile("peft 1\nedit f at layer[*].ffn { h += fusion(h, n=1, r=2) }", model(), seed=0)
    calls: list[Callable[[], object]] = [
        lambda: peftc.load(name, model()),
        lambda: peftc.warm_start(compiled, name),
        lambda: peftc.fuse(fusing, [name]),
        lambda: peftc.plan(EDIT, name),
        lambda: peftc.sites(name),
        lambda: peftc.plan(EDIT, model(), settings={name: 1}),
        lambda: peftc.plan(EDIT, model(), settings={"r": name}),
        lambda: peftc.plan(EDIT, model(), include=[name]),
        lambda: peftc.remove(compiled, name),
    ]
    for call in calls:
        assert all(code.startswith("P") and code < "P9" for code in codes(call))
    if name not in ("\n", "\x1b[2J"):  # these are names of files
        assert set(codes(lambda: peftc.save(compiled, name))) <= {"P026", "P526"}


# Adapters
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    done = {"edit": peftc.save(peftc.compile(EDIT, model(), seed=0), folder / "edit")}
    tasked = peftc.compile(TASKED, model(), seed=0, tasks=["one", "two"])
    return done | {"tasked": peftc.save(tasked, folder / "tasked")}


def rewritten(
    original: Path, folder: Path, change: Callable[[Tensor], Tensor] = Tensor.clone, /, **entries: object
) -> Path:
    """An adapter with other tensors and other entries in its description, consistent with each
    other.
    """
    values: dict[str, Any] = json.loads((original / "adapter.json").read_text())
    [tensor_file] = original.glob("*.safetensors")
    new_tensors = {name: change(tensor) for name, tensor in load_file(tensor_file).items()}
    folder.mkdir()
    save_file(new_tensors, folder / "tensors")
    digest = hashlib.sha256((folder / "tensors").read_bytes()).hexdigest()
    name = tensor_file.name if "file" not in values else str(values["file"]).replace(values["sha256"][:16], digest[:16])
    os.rename(folder / "tensors", folder / name)
    shapes = {n: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for n, t in new_tensors.items()}
    described = values | {"sha256": digest, "tensors": shapes} | ({"file": name} if "file" in values else {})
    (folder / "adapter.json").write_text(json.dumps(described | entries))
    return folder


def state(base: nn.Module) -> Mapping[str, Any]:
    return {**{n: p.clone() for n, p in base.state_dict().items()}, "modules": [type(m) for m in base.modules()]}


def unchanged(call: Callable[[nn.Module], object]) -> list[str]:
    """The codes of an error; the model is unchanged."""
    base = model()
    before = state(base)
    result = codes(lambda: call(base))
    after = state(base)
    assert after.keys() == before.keys()
    assert all(torch.equal(v, before[n]) if isinstance(v, Tensor) else v == before[n] for n, v in after.items())
    return result


KINDS = ("int8", "uint8", "int64", "bool", "complex64", "uint16")


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_another_kind(saved: dict[str, Path], tmp_path: Path, kind: str) -> None:
    adapter = rewritten(saved["edit"], tmp_path / "a", lambda t: torch.ones(t.shape).to(getattr(torch, kind)))
    assert unchanged(lambda base: peftc.load(adapter, base)) == ["P525"]
    assert codes(lambda: peftc.warm_start(peftc.compile(EDIT, model(), seed=0), adapter)) == ["P525"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers(saved: dict[str, Path], tmp_path: Path, value: float) -> None:
    adapter = rewritten(saved["edit"], tmp_path / "a", lambda t: torch.full_like(t, value))
    assert unchanged(lambda base: peftc.load(adapter, base)) == ["P561"]
    assert codes(lambda: peftc.warm_start(peftc.compile(EDIT, model(), seed=0), adapter)) == ["P561"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_whose_sum_is_none(saved: dict[str, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    adapter = rewritten(saved["edit"], tmp_path / "a", lambda t: torch.full_like(t, most, dtype=dtype))
    assert {p.max().item() for p in peftc.parameters(peftc.load(adapter, model())).values()} == {most}


def test_one_value_among_many_that_is_no_number(saved: dict[str, Path], tmp_path: Path) -> None:
    def change(tensor: Tensor) -> Tensor:
        tensor.flatten()[0], tensor.flatten()[-1] = float("inf"), -float("inf")
        return tensor

    adapter = rewritten(saved["edit"], tmp_path / "a", change)
    assert unchanged(lambda base: peftc.load(adapter, base)) == ["P561"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_dtypes_are_taken_over(saved: dict[str, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = peftc.load(rewritten(saved["edit"], tmp_path / "a", lambda t: t.to(dtype)), model())
    assert all(p.dtype == torch.float32 for p in peftc.parameters(loaded).values())


def test_tasks_by_the_hundred_thousand(saved: dict[str, Path], tmp_path: Path) -> None:
    many = [f"t{i}" for i in range(300_000)]
    peftc.load(rewritten(saved["edit"], tmp_path / "unused", tasks=many), model())  # no edit is `per task`
    adapter = rewritten(saved["tasked"], tmp_path / "used", tasks=many)
    assert unchanged(lambda base: peftc.load(adapter, base)) == ["P525"]
    other = rewritten(saved["tasked"], tmp_path / "other", tasks=["one", "a\0b"])
    assert unchanged(lambda base: peftc.load(other, base)) == ["P537"]


@pytest.mark.parametrize("seed", [10**400, -(10**30), 1.5, "x", None, [1]], ids=range(6))
def test_seeds_in_adapters(saved: dict[str, Path], tmp_path: Path, seed: object) -> None:
    adapter = rewritten(saved["edit"], tmp_path / "a", seed=seed)
    assert unchanged(lambda base: peftc.load(adapter, base)) == ["P521"]


def test_sizes_are_checked_before_tensors_are_read(saved: dict[str, Path], tmp_path: Path) -> None:
    """A sparse file of four terabytes with a matching description."""
    adapter = rewritten(saved["edit"], tmp_path / "a")
    [check_file] = adapter.glob("*.safetensors")
    os.truncate(check_file, 2**42)
    values = json.loads((adapter / "adapter.json").read_text())
    for shape in ([2**40], [2**62, 2**62], [2**63]):
        shapes = {name: {"shape": shape, "dtype": "float32"} for name in values["tensors"]}
        (adapter / "adapter.json").write_text(json.dumps(values | {"tensors": shapes}))
        assert unchanged(lambda base: peftc.load(adapter, base))[0] in ("P521", "P525")


DESCRIPTIONS = {
    "deep": "[" * 100_000,
    "deep and whole": '{"format_version": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "a number": "1" * 100_000,
    "infinite": '{"format_version": 1e400}',
    "keys twice": '{"format_version": "1.0", "format_version": "9.0"}',
    "surrogates": '{"format_version": "\\ud800"}',
    "nothing": "",
    "NUL": "\0" * 1_000,
    "a mark": "\ufeff{}",
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_descriptions(saved: dict[str, Path], tmp_path: Path, name: str) -> None:
    adapter = rewritten(saved["edit"], tmp_path / "a")
    (adapter / "adapter.json").write_text(DESCRIPTIONS[name], encoding="utf-8")
    assert unchanged(lambda base: peftc.load(adapter, base))[0] in ("P521", "P522")
    (adapter / "adapter.json").write_bytes(b"\xff\xfe\x00")
    assert unchanged(lambda base: peftc.load(adapter, base)) == ["P521"]


def test_descriptions_with_values_of_every_type(saved: dict[str, Path], tmp_path: Path) -> None:
    """Every entry is replaced by values of every type: a diagnostic, or a valid adapter."""
    values, base = json.loads((saved["edit"] / "adapter.json").read_text()), model()
    things: list[object] = [None, -1, 10**400, 1e308, "", "../../etc/passwd", "a\0b", [], {}, [[]], {"a": {}}, True]
    codes_seen: set[str] = set()
    for number, (key, thing) in enumerate((key, thing) for key in values for thing in things):
        adapter = rewritten(saved["edit"], tmp_path / str(number), **{key: thing})
        try:
            peftc.load(adapter, base)
            peftc.remove(base)
        except PeftcError as error:
            codes_seen |= {diagnostic.code for diagnostic in error.diagnostics}
    assert "P521" in codes_seen
    assert max(codes_seen) < "P9"


# Names of modules
# --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(4, 4)})
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner[self.name](x)


@pytest.mark.parametrize(
    "name", ['x"""\nimport os\nabort()\n"""', "x\\", 'a"b', "class", "a b", "é", "a'); print(1", "x\n"]
)
def test_names_of_modules_never_become_code(name: str) -> None:
    base, x = Layers(Block(name), Block(name)).eval(), torch.randn(1, 3, 4)
    before = base(x)
    spec = 'peft 1\nedit a at "layers.*.inner.*" { h += lora(x, r=1) }\n'
    peftc.compile(spec, base, sample={"x": x}, seed=0)
    assert torch.equal(base(x), before)
    for region in peftc.graphs(base).values():
        assert "\nimport os" not in region.code
        compile(region.code, "<generated>", "exec")


def test_a_name_that_ends_in_a_new_line_is_no_identifier() -> None:
    """It is no identifier, and two names that differ only in it stay distinct."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("x", "x\n", "x_")}), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = (self.inner[n](self.norm(x)) for n in ("x", "x\n", "x_"))
            return x + torch.relu(a - 2 * b + 3 * c)

    base, x = nn.Sequential(Both(), Both()).eval(), torch.randn(1, 3, 4)
    before = base(x)
    peftc.compile("peft 1\nedit a at layer[*] { h *= vector(init=1) }\n", base, sample={"input": x}, seed=0)
    assert torch.equal(base(x), before)


@pytest.mark.parametrize("name", ["forward", "_modules", "parameters"])
def test_names_that_every_module_has_are_refused(name: str) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self._modules[name] = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self._modules[name](self.norm(x))  # type: ignore[operator]

    spec = "peft 1\nedit a at layer[*] { h *= vector(init=1) }\n"
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.compile(spec, nn.Sequential(Hidden(), Hidden()), sample={"input": torch.randn(1, 3, 4)})
    assert [d.code for d in excinfo.value.diagnostics] == ["P511"]


@pytest.mark.parametrize("name", ["x\ud800", "\udfff"], ids=["high", "low"])
def test_names_that_are_no_text_are_refused(name: str) -> None:
    spec = 'peft 1\nedit a at "layers.*.inner.*" { h += lora(x, r=1) }\n'
    with pytest.raises(peftc.PeftcError) as excinfo:
        peftc.compile(spec, Layers(Block(name), Block(name)).eval(), sample={"x": torch.randn(1, 3, 4)})
    assert [d.code for d in excinfo.value.diagnostics] == ["P511"]
    assert str(excinfo.value).encode()
