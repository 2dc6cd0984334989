"""The checks of the coverage benchmark on a fixed sample of model types, at least one of every
layout.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest

from benchmarks.families import build
from benchmarks.families.checks import checked
from tests.matrix import some


@dataclass(frozen=True)
class Family:
    """`refused`: edits whose sub-layer the model does not have, by its source; `fails`: edits that
    do not work yet.
    """

    key: str
    layout: str
    refused: str = ""
    fails: str = ""


FAMILIES = (
    Family("causal-lm/gpt2", "fused qkv, split in three; Conv1D"),
    Family("causal-lm/phi3", "fused qkv and gate-up, in slices"),
    # Its position bias counts from the end of the keys: beside unbiased rows, a key's weight
    # depends on how many follow.
    Family("causal-lm/mpt", "fused qkv, chunk; written-out softmax; ALiBi, counted from the last key", fails="d"),
    Family("causal-lm/gpt_neox", "fused qkv, interleaved heads; attention and ffn in parallel"),
    Family("causal-lm/bloom", "fused qkv, interleaved heads; written-out softmax; the ffn adds its residual itself"),
    Family("causal-lm/gpt_neox_japanese", "a bias that the last layer alone has, added by the layer", fails="d"),
    Family("causal-lm/xglm", "written-out softmax over heads merged with the batch"),
    Family("causal-lm/granitemoehybrid", "layers of one class, with other children"),
    Family("causal-lm/falcon", "fused qkv with few key heads; parallel block"),
    Family("causal-lm/codegen", "fused qkv in blocks; parallel block; written-out softmax"),
    Family("causal-lm/gpt_bigcode", "fused qkv, one key head"),
    Family("causal-lm/dbrx", "fused qkv; experts"),
    Family("causal-lm/deepseek_v3", "latent attention (MLA); dense and sparse layers in one stack"),
    Family("causal-lm/gptj", "parallel block, one norm"),
    Family("causal-lm/cohere", "parallel block"),
    Family("causal-lm/gemma2", "norms before and after each sub-layer; soft caps"),
    Family("causal-lm/gemma3_text", "sandwich norms, q and k norms; sliding and full attention in one stack"),
    Family("causal-lm/olmo2", "norms after the sub-layers"),
    Family("masked-lm/deberta-v2", "relative attention, disentangled"),
    Family("masked-lm/deberta", "relative attention; fused projection"),
    Family("masked-lm/funnel", "relative positions reshaped by sizes; layers that pool their queries"),
    Family("masked-lm/mobilebert", "a bottleneck with a stream of its own in every layer"),
    Family("causal-lm/xlnet", "q, k, v are bare parameters; relative positions in sums of einsums", refused="a"),
    Family("causal-lm/xmod", "an adapter for each language, chosen by a mask"),
    Family("causal-lm/hy_v4", "several streams, mixed with coefficients of each token; chosen keys"),
    Family("causal-lm/inkling2_text", "an attention that takes the stream's place; mixtures with learnt queries"),
    Family("causal-lm/rwkv", "a recurrence over tokens and a shift", refused="ad"),
    Family("causal-lm/gemma3n_text", "four streams that predict one another; shared keys"),
    Family("seq2seq/t5", "relative bias; encoder-decoder"),
    Family("seq2seq/bart", "encoder-decoder, norms after the sum"),
    Family("seq2seq/prophetnet", "encoder-decoder with two streams of queries, each with a softmax"),
    Family("causal-lm/bart", "a decoder without its encoder"),
    Family("causal-lm/bert", "an encoder that decodes"),
    Family("masked-lm/albert", "one set of weights for all layers"),
    Family("masked-lm/modernbert", "local and global layers; fused qkv"),
    Family("image-classification/vit", "vision"),
    Family("image-classification/swin", "a pyramid of windows"),
    Family("image-classification/swinv2", "a pyramid whose stages are marked, and not their layers"),
    Family("image-classification/convnext", "images; convolutions and an ffn in one branch", refused="ad"),
    Family("image-classification/mobilevit", "transformers between convolutions"),
    Family("image-classification/resnet", "convolutions only", refused="abcd"),
    Family("audio-classification/wav2vec2", "sound; a convolutional front"),
    Family("audio-classification/whisper", "a spectrogram"),
    Family("audio-classification/sew-d", "disentangled attention whose softmax is an autograd function with a mask"),
    Family("image-classification/perceiver", "latents; a norm that is an identity, called on nothing"),
    Family("image-text-to-text/qwen2_vl", "towers: patches in one row, and text"),
    Family("image-text-to-text/paligemma", "towers: an image, and text"),
    Family("causal-lm/mamba2", "state space only", refused="abcd"),
    Family("causal-lm/jamba", "state space, attention, dense and sparse layers"),
    Family("causal-lm/falcon_h1", "state space and attention side by side"),
    Family("causal-lm/qwen3_next", "linear and full attention; experts"),
    Family("causal-lm/recurrent_gemma", "recurrences and attention"),
    Family("causal-lm/mixtral", "experts"),
    Family("causal-lm/gpt_oss", "experts with biases; sinks in the softmax"),
    Family("causal-lm/zamba", "a block shared by several layers"),
    Family("causal-lm/zaya", "residuals scaled and shifted in a module of their own; experts"),
    Family("causal-lm/doge", "residuals times a parameter; a mask made of the values"),
    Family("masked-lm/fnet", "Fourier transforms for attention", refused="ad"),
)


# The first ones detected mutants that no other type detected (`make mutants`).
MUTANT_KILLERS = ("causal-lm/bert", "causal-lm/bloom", "masked-lm/funnel", "image-classification/perceiver")
SAMPLE = [f for f in FAMILIES if f.key in MUTANT_KILLERS] + some(
    [f for f in FAMILIES if f.key not in MUTANT_KILLERS], 12
)


@pytest.mark.parametrize("family", SAMPLE, ids=lambda family: family.key)
def test_five_edits(family: Family) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the models' own code
        result = checked(*build(*family.key.split("/")))
    verdicts = {name: edit["verdict"] for name, edit in result["edits"].items()}
    reasons = {name: edit["reason"] for name, edit in result["edits"].items() if edit["verdict"] == "fail"}
    assert not {name: reason for name, reason in reasons.items() if name not in family.fails}
    expected = {name: "refused" if name in family.refused else "pass" for name in "abcde"}
    assert verdicts == expected | dict.fromkeys(family.fails, "fail")


def test_every_layout_is_another_type() -> None:
    assert len({f.key for f in FAMILIES}) == len(FAMILIES) >= 30
