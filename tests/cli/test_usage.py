"""Wrong usage: exit code 2, and the nearest name."""

from __future__ import annotations

import pytest

from peftc.cli.main import main
from peftc.cli.parser.commands import COMMANDS
from peftc.cli.parser.parser import parse_arguments, parser

Out = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plna"], "peftc: there is no command `plna`; did you mean `plan`?"),
        (["zzz"], "peftc: there is no command `zzz`; `peftc --help` lists all"),
        (["plan", "--modle", "x"], "peftc plan: there is no option `--modle`; did you mean `--model`?"),
        (["plan", "--modle=x", "s.peft"], "peftc plan: there is no option `--modle`; did you mean `--model`?"),
        (["check", "--outputformat", "json", "s"], "did you mean `--output-format`?"),
        (["fmt", "--zzz", "s"], "peftc fmt: there is no option `--zzz`; `peftc fmt --help` lists all"),
        (["fmt", "-z", "s"], "peftc fmt: there is no option `-z`"),
        (["--verison"], "there is no option `--verison` before a command; did you mean `--version`?"),
        (["--model", "x", "plan"], "there is no option `--model` before a command; options stand behind the command"),
        (["check", "s", "--output-format", "jsno"], "there is no value `jsno`; did you mean `json`?"),
        (["verify", "--seed", "-1", "--modle"], "did you mean `--model`?"),
        (["check", "s", "-q", "-v"], "not allowed with argument"),
    ],
)
def test_did_you_mean(words: list[str], message: str, capsys: Out) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert message in captured.err


def test_what_is_no_option_is_no_misspelled_one(capsys: Out) -> None:
    assert main(["check", "--", "--modle"]) == 2
    assert "there is no file --modle" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["check", "--he"])  # abbreviations are known
    assert "usage: peftc check" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_and_a_function(name: str, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 60 for line in lines if "{" not in line)


def test_each_command_has_its_arguments_alone() -> None:
    """The parser of one command takes what the parser of all does."""
    for name in COMMANDS:
        positional = (one for one in COMMANDS[name].arguments if not one.is_option)
        required = [next(iter(one.options.get("choices", ["x"]))) for one in positional]
        for one in COMMANDS[name].arguments:
            required += [one.names[0], "1"] if one.options.get("required") else []
        alone, together = (vars(parser(own).parse_args([name, *required])) for own in (name, None))
        assert alone.pop("run").name == together.pop("run").name == name
        assert alone == together


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_an_option_wherever_there_is_json(name: str) -> None:
    options = {option: one for one in COMMANDS[name].every_argument if one.is_option for option in one.names}
    choices = [own for one in options.values() for own in one.options.get("choices") or ()]
    assert ("--json" in options) >= ("json" in choices)


@pytest.mark.parametrize(
    ("words", "result", "diagnostics"),
    [
        (["check", "a.peft", "--json"], None, "json"),
        (["check", "a.peft"], None, "text"),
        (["diff", "a.peft", "b.peft", "--json"], "json", "text"),
        (["diff", "a.peft", "b.peft", "--format", "markdown"], "markdown", "text"),
        (["plan", "a.peft", "--model", "m", "--json"], None, "text"),
    ],
)
def test_json_is_the_format_of_the_result(words: list[str], result: str | None, diagnostics: str) -> None:
    args = parse_arguments(words)
    assert (getattr(args, "format", None), args.output_format) == (result, diagnostics)
