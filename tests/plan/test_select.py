"""Selectors on the site tables of several architectures."""

from dataclasses import replace

import pytest

from peftc.diagnostics import PeftcError
from peftc.planning.selection.selectors import coverage_warnings, resolve
from peftc.syntax import ast
from tests.plan import tables

BART, BERT, T5, LLAMA, GPT2 = tables.bart(), tables.bert(), tables.t5(), tables.llama(), tables.gpt2()


def path(text: str) -> ast.Path:
    """`layer[0..5, 7].attn` without the parser."""
    steps = []
    for part in text.replace("..", "~").split("."):
        name, _, rest = part.partition("[")
        indices = tuple(index(item.strip()) for item in rest.rstrip("]").split(",")) if rest else None
        steps.append(ast.Step(name, indices))
    return ast.Path(tuple(steps))


def index(text: str) -> ast.Index:
    if text == "*":
        return ast.Index(None, None)
    if "~" not in text:
        return ast.Index(int(text), int(text))
    start, _, stop = text.partition("~")
    return ast.Index(int(start) if start else None, int(stop) if stop else None)


def paths(text: str, table) -> list[str]:
    return [site.path for site in resolve(path(text), table)]


@pytest.mark.parametrize(
    ("text", "table", "count"),
    [
        ("layer[*].attn", BART, 36),
        ("layer.attn", BART, 36),
        ("layer[*].attn.self", BART, 24),
        ("layer[*].attn.cross", BART, 12),
        ("encoder.layer[*].attn", BART, 12),
        ("decoder.layer[*].attn", BART, 24),
        ("layer[*].attn.q", BART, 36),
        ("layer[*].attn.cross.q", BART, 12),
        ("layer[*].attn.norm", BART, 36),
        ("layer[*].ffn.norm", BART, 24),
        ("layer[*].norm", BART, 60),
        ("encoder.layer[*].norm", BART, 24),
        ("layer[*].ffn", BART, 24),
        ("layer[*].ffn.hidden", BART, 24),
        ("layer", BART, 24),
        ("embed", BART, 2),
        ("encoder.embed", BART, 1),
        ("input.embed", BART, 1),
        ("decoder.input.embed", BART, 1),
        ("input.embed", BERT, 1),
        ("input.embed", T5, 1),
        ("input.embed", LLAMA, 1),
        ("output.layer[*]", BART, 12),
        ("output.layer[*].attn", BART, 24),
        ("output.layer[0..1].ffn", BERT, 2),
        ("encoder.output.layer[*]", BART, 12),
        ("output.layer[*].**", BERT, sum(".layer." in m.name and bool(m.parameters) for m in BERT.modules)),
        ("head", BART, 1),
        ("norm", T5, 2),
        ("decoder.norm", T5, 1),
        ("layer[*].norm", T5, 120),
        ("layer[*].ffn.gate", LLAMA, 4),
        ("layer[0, 2..3].attn.q", LLAMA, 3),
        ("layer[6..].attn.q", BART, 18),
        ("layer[..5].attn.self.q", BERT, 6),
        ("layer[-2..].ffn", BART, 4),
        ("layer[-1].ffn", BERT, 1),
        ("layer[0..5, 3].ffn", BERT, 6),
    ],
)
def test_counts(text, table, count):
    assert len(paths(text, table)) == count


def test_a_norm_is_not_the_final_norm_of_a_layer():
    assert paths("norm", LLAMA) == ["decoder.norm"]
    assert "decoder.norm" not in paths("layer[*].norm", LLAMA)


def test_input_and_output_name_the_first_and_last_stack():
    assert paths("input.embed", BART) == paths("input.embed", BERT) == ["encoder.embed"]
    assert paths("input.embed", LLAMA) == ["decoder.embed"]
    assert {site.split(".")[0] for site in paths("output.layer[*].attn", BART)} == {"decoder"}
    assert paths("output.layer[0].ffn", BERT) == ["encoder.layer[0].ffn"]
    assert [site.path for site in resolve(ast.Difference(path("embed"), path("input.embed")), T5)] == ["decoder.embed"]


def test_indices_count_in_each_stack():
    uneven = tables.bart(layers=(6, 3))
    assert paths("layer[-1].ffn", uneven) == ["encoder.layer[5].ffn", "decoder.layer[2].ffn"]
    assert paths("layer[4].ffn", uneven) == ["encoder.layer[4].ffn"]


def test_model_order_whatever_the_order_of_arms():
    both = ast.Union((path("decoder.layer[1].ffn"), path("encoder.layer[3].attn"), path("encoder.layer[0].ffn")))
    site_paths = [site.path for site in resolve(both, BART)]
    assert site_paths == ["encoder.layer[0].ffn", "encoder.layer[3].attn.self", "decoder.layer[1].ffn"]


def test_difference():
    without = ast.Difference(path("layer[*].attn"), path("decoder.layer[*].attn.cross"))
    assert [site.path for site in resolve(without, BART)] == paths("layer[*].attn.self", BART)


def test_everything_below():
    every = resolve(path("**"), BART)
    assert len(every) == len({site.module for site in every}) == sum(1 for module in BART.modules if module.parameters)
    below = resolve(path("layer[0].**"), BERT)
    assert {site.module for site in below} == {
        m.name for m in BERT.modules if m.name.startswith("encoder.layer.0.") and m.parameters
    }
    stack = resolve(path("decoder.**"), BART)
    assert {site.module for site in stack} == {
        m.name for m in BART.modules if m.name.startswith("model.decoder.") and m.parameters
    }
    assert {site.module.partition(".")[0] for site in resolve(path("decoder.**"), GPT2)} == {"transformer"}


def test_a_sub_layer_that_is_no_module_of_its_own():
    """BART's ffn is two Linears of the layer: `ffn.**` is them and the norm, not the whole
    layer.
    """
    modules = {site.module.rpartition(".")[2] for site in resolve(path("encoder.layer[0].ffn.**"), BART)}
    assert modules == {"fc1", "fc2", "final_layer_norm"}


def test_globs():
    sites = resolve(ast.Glob("model.layers.*.mlp.*_proj"), LLAMA)
    assert len(sites) == 12
    assert sites[0].path == "decoder.layer[0].ffn.gate"
    assert not {"model.layers.0"} & {site.module for site in resolve(ast.Glob("model.layers.*.mlp"), LLAMA)}
    everything = resolve(ast.Glob("model.layers.0.**"), LLAMA)
    assert {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp"} <= {site.module for site in everything}


def test_a_module_without_a_role():
    (site, *_) = resolve(ast.Glob("model.*.layernorm_embedding"), BART)
    assert site.path == '"model.encoder.layernorm_embedding"'
    assert set(site.states) == {"w", "b"}


def test_a_fused_module_is_selected_whole_with_the_layout_of_nn_linear():
    (site,) = resolve(ast.Glob("transformer.h.0.attn.c_attn"), GPT2)
    assert str(site.states["w"].shape) == "weight [192, 64]"
    assert site.states["w"].weight.transposed
    assert site.states["w"].weight.rows is None


def error(selector, table):
    with pytest.raises(PeftcError) as excinfo:
        resolve(selector, table)
    return excinfo.value.diagnostics


def test_a_dead_step():
    (diagnostic,) = error(path("layer[*].attn.croos"), BART)
    assert diagnostic.code == "P201"
    assert diagnostic.message == "`layer[*].attn.croos` matches nothing in facebook/bart-large"
    assert diagnostic.label == "no such site under `layer[*].attn`"
    assert diagnostic.notes == ("`layer[*].attn` has `self` (24 sites) and `cross` (12 sites)",)
    assert diagnostic.help == "did you mean `cross`?"


@pytest.mark.parametrize(
    ("text", "table", "help_text"),
    [
        ("layer[*].attn.q_proj", BART, "did you mean `q`?"),
        ("layer[*].mlp", LLAMA, "did you mean `ffn`?"),
        ("layer[*].mlp.up", LLAMA, "did you mean `ffn`?"),
        ("layers[*].ffn", LLAMA, "did you mean `layer`?"),
        ("layer[*].q", BART, "did you mean `layer[*].attn.q`?"),
        ("attn.q", BART, "did you mean `layer[*].attn`?"),
        ("layer[*].ffn.fc2", BART, "did you mean `down`?"),
        ("decodr.layer[*].ffn", BART, "did you mean `decoder`?"),
        ("encoder", BART, "to reach every module below, write `encoder.**`"),
        (
            "output",
            BART,
            "write `output.layer[*]`: the stack that computes the output, in an encoder-decoder the decoder",
        ),
        ("input", BART, "write `input.embed`: the embedding of the input, in an encoder-decoder that of the encoder"),
    ],
)
def test_nearest_names(text, table, help_text):
    (diagnostic,) = error(path(text), table)
    assert (diagnostic.code, diagnostic.help) == ("P201", help_text)


def test_cross_attention_in_a_model_without_it():
    (diagnostic,) = error(path("layer[*].attn.cross"), BERT)
    assert diagnostic.notes == ("`layer[*].attn` has `self` (12 sites)",)


def test_every_dead_arm_is_reported():
    errors = error(ast.Union((path("layer[*].ffn"), path("layer[*].fnn"), path("layer[*].atn"))), BART)
    assert [diagnostic.help for diagnostic in errors] == ["did you mean `ffn`?", "did you mean `attn`?"]


@pytest.mark.parametrize(
    "text", ["layer[99].ffn", "layer[0, 99].ffn", "layer[0..12].ffn", "layer[-13..].ffn", "layer[5..3].ffn"]
)
def test_indices_out_of_range(text):
    (diagnostic,) = error(path(text), BART)
    assert diagnostic.code == "P202"
    assert "`encoder.layer` has 0..11" in diagnostic.notes


def test_a_model_without_a_token_embedding():
    blind = replace(BERT, sites=tuple(site for site in BERT.sites if site.steps[-1][0] != "embed"))
    selector = path("input.embed")
    (diagnostic,) = error(selector, blind)
    assert (diagnostic.code, diagnostic.label, diagnostic.span) == ("P201", "no such site", selector.steps[1].span)


def test_an_index_on_a_step_without_numbers():
    (diagnostic,) = error(path("input[0].embed"), BART)
    assert (diagnostic.code, diagnostic.help) == ("P202", "write `input`")
    (diagnostic,) = error(path("layer[*].attn[0].q"), BART)
    assert (diagnostic.code, diagnostic.help) == ("P202", "write `attn`")


def test_a_dead_right_side():
    (diagnostic,) = error(ast.Difference(path("layer[*].attn.self"), path("layer[*].attn.cross")), BART)
    assert diagnostic.code == "P203"
    (diagnostic,) = error(ast.Difference(path("layer[*].attn"), path("layer[*].attn.croos")), BART)
    assert diagnostic.code == "P201"
    (diagnostic,) = error(ast.Difference(path("layer[*].attn"), path("layer[*].attn")), BART)
    assert (diagnostic.code, diagnostic.label) == ("P203", "takes all of them away")


def test_a_dead_glob():
    (diagnostic,) = error(ast.Glob("model.layers.*.mlp.gate_prj"), LLAMA)
    assert diagnostic.help == 'did you mean `"model.layers.*.mlp.gate_proj"`?'
    assert diagnostic.label == 'no such module under `"model.layers.*.mlp"`'


def test_uneven_coverage_is_a_warning():
    table = tables.llama(layers=6, v_missing=(1, 4, 5))
    assert len(resolve(path("layer[*].attn.v"), table)) == 3
    (diagnostic,) = coverage_warnings(path("layer[*].attn.v"), table)
    assert (diagnostic.code, diagnostic.severity) == ("P204", "warning")
    assert diagnostic.notes == ("without it: decoder.layer[1, 4..5]",)
    assert coverage_warnings(path("layer[*].attn.q"), table) == []
    assert coverage_warnings(path("layer[*].attn"), BART) == []


def test_a_range_past_the_end_of_one_stack_is_a_warning():
    (diagnostic,) = coverage_warnings(path("layer[0..4].ffn"), tables.bart(layers=(6, 3)))
    assert diagnostic.message == "`0..4` goes past the end of `decoder.layer`"


def test_a_role_in_one_attention_of_a_layer_only_is_a_warning():
    sites = [site for site in BART.sites if site.path != "decoder.layer[3].attn.cross.v"]
    (diagnostic,) = coverage_warnings(path("layer[*].attn.v"), replace(BART, sites=tuple(sites)))
    assert diagnostic.message == "`layer[*].attn.v` is missing on 1 of 36 attentions of these layers"
    assert diagnostic.notes == ("without it: decoder.layer[3].attn.cross",)
    assert coverage_warnings(path("layer[*].attn.v"), BART) == []


def test_an_index_from_the_end_reaches_the_first_layer_and_no_further():
    table = tables.llama(layers=3)
    assert paths("layer[-3].ffn", table) == ["decoder.layer[0].ffn"]
    assert paths("layer[-3..-2].ffn", table) == ["decoder.layer[0].ffn", "decoder.layer[1].ffn"]
    (diagnostic,) = error(path("layer[-4].ffn"), table)
    assert diagnostic.code == "P202"


@pytest.mark.parametrize("wildcard", ["?", "*"])
def test_a_wildcard_of_one_segment_does_not_span_a_dot(wildcard):
    assert resolve(ast.Glob(f"model.layers.{wildcard}.mlp.down_proj"), LLAMA)
    (diagnostic,) = error(ast.Glob(f"model.layers{wildcard}0.mlp.down_proj"), LLAMA)
    assert diagnostic.code == "P201"


def test_uneven_coverage_in_the_left_side_of_a_difference_is_a_warning():
    table = tables.llama(layers=6, v_missing=(1, 4, 5))
    (diagnostic,) = coverage_warnings(ast.Difference(path("layer[*].attn.v"), path("layer[0].attn.v")), table)
    assert diagnostic.code == "P204"
    assert coverage_warnings(ast.Difference(path("layer[*].attn.q"), path("layer[0..2].attn.v")), table) == []
