"""PEMA on tiny random models: the external memory, what each phase trains, and `generate` against a
loop without cache and padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import external_memory as em
import pema_method as pm
import pytest
import torch
import transformers
from torch import Tensor

from tests import zoo

ROWS = [[5, 9, 7, 30, 11], [8, 6], [12, 40, 22]]
STEPS = 6


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return zoo.build(request.param, torch.float64)


@pytest.fixture
def pema() -> pm.Pema:
    torch.manual_seed(1)
    module = pm.Pema(32, 4).double()
    torch.nn.init.normal_(module.B_pd)
    torch.nn.init.normal_(module.B_rct)
    return module


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[zoo.PAD] * (longest - len(row)) + row for row in rows])
    return ids, (ids != zoo.PAD).long()


def states(model: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """(f, logits) of the last position of one sequence, from the base alone."""
    inputs = torch.tensor([ids])
    f = model.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state[0, -1]
    return f, model(input_ids=inputs, use_cache=False).logits[0, -1]


def memory_of(tmp_path: Path, n: int = 50, d: int = 32) -> em.Memory:
    return em.Memory.write(tmp_path, [(torch.randn(n, d), torch.randint(3, zoo.VOCAB, (n,)))])


def test_a_memory_has_the_written_rows_and_keeps_its_files(tmp_path: Path) -> None:
    pieces = [(torch.randn(n, 8), torch.randint(100, (n,))) for n in (3, 1, 7)]
    memory = em.Memory.write(tmp_path / "made", iter(pieces))
    assert torch.equal(memory.f, torch.cat([f for f, _ in pieces]))
    assert torch.equal(memory.y, torch.cat([y for _, y in pieces]).int())
    memory.f.zero_()
    again = em.Memory.open(tmp_path / "made")
    assert torch.equal(again.f, torch.cat([f for f, _ in pieces]))
    rows = torch.cat([f for f, _ in again.batches(4, seed=0)])
    assert not torch.equal(rows, again.f)
    assert torch.equal(rows.sort(0).values, again.f.sort(0).values)


def test_contexts_are_those_of_each_prefix_alone(model: Any) -> None:
    inputs, mask = padded(ROWS)
    continuation = torch.randint(3, zoo.VOCAB, (len(ROWS), 4))
    with torch.no_grad():
        f = em.contexts(model, inputs, mask, continuation)
        for b, row in enumerate(ROWS):
            for i in range(4):
                torch.testing.assert_close(
                    f[b, i], states(model, row + continuation[b, :i].tolist())[0], rtol=0, atol=1e-10
                )


def test_own_contexts_are_those_of_the_bases_predictions_until_it_ends(model: Any, tmp_path: Path) -> None:
    inputs, mask = padded(ROWS)
    target = torch.randint(3, zoo.VOCAB, (len(ROWS), STEPS))
    target[1, 4:] = em.IGNORED
    free = em.greedy(model, inputs, mask, STEPS)
    model.generation_config.eos_token_id = free[0, 2].item()  # the first row ends at its third word at the latest
    f, y = [], []
    with torch.no_grad():
        for b, row in enumerate(ROWS):
            context = list(row)
            for expected in target[b][target[b] != em.IGNORED].tolist():
                state, logits = states(model, context)
                f.append(state)
                y.append(expected)
                context.append(int(logits.argmax()))
                if context[-1] == model.generation_config.eos_token_id:
                    break
    memory = em.collect(model, [em.Batch(inputs, mask, target)], tmp_path)
    assert len(y) < (target != em.IGNORED).sum()
    assert memory.y.tolist() == y
    torch.testing.assert_close(memory.f, torch.stack(f).float())
    assert len(em.collect(model, [em.Batch(inputs, mask, target)], tmp_path, own=False)) == 3 * STEPS - 2


def test_a_base_that_caps_its_logits_is_refused() -> None:
    config = transformers.Gemma2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.1,
    )
    inputs, mask = padded([[3, 4, 5]])
    with pytest.raises(ValueError, match="logits are not its head's output"):
        em.contexts(transformers.Gemma2ForCausalLM(config), inputs, mask, torch.tensor([[6, 7]]))


def test_the_head_is_a_copy_that_gives_the_same_logits(model: Any) -> None:
    head = pm.Head.copied(model)
    with torch.no_grad():
        f, logits = states(model, ROWS[0])
        torch.testing.assert_close(head(f), logits, rtol=0, atol=1e-10)
        model.get_output_embeddings().weight.zero_()
        torch.testing.assert_close(head(f), logits, rtol=0, atol=1e-10)


def test_each_phase_trains_its_own_and_nothing_else(tmp_path: Path) -> None:
    memory, pema = memory_of(tmp_path), pm.Pema(32, 4)
    head = pm.Head(torch.randn(zoo.VOCAB, 32), None)
    weight, first = head.weight.clone(), {name: p.detach().clone() for name, p in pema.named_parameters()}
    pm.reconstruct(pema, memory, epochs=2, rows=16)
    second = {name: p.detach().clone() for name, p in pema.named_parameters()}
    assert torch.equal(second["B_pd"], first["B_pd"])
    assert not torch.equal(second["B_rct"], first["B_rct"])
    assert (second["A"] - first["A"]).abs().max() > 0.05  # reinitialised: so few steps change it less than that
    pm.retrain(pema, head, memory, epochs=2, rows=16)
    assert torch.equal(pema.B_rct, second["B_rct"])
    assert not torch.equal(pema.A, second["A"])
    assert not torch.equal(pema.B_pd, second["B_pd"])
    assert torch.equal(head.weight, weight)
    assert {name for name, p in pema.named_parameters() if p.grad is not None} == {"A", "B_pd"}


def test_reconstruction_becomes_better(tmp_path: Path) -> None:
    few = torch.randn(3, 32)  # of rank 3
    memory = em.Memory.write(tmp_path, [(torch.randn(200, 3) @ few, torch.zeros(200))])
    pema = pm.Pema(32, 4)
    before = pm.reconstruction_loss(pema, memory.f).item()
    assert pm.reconstruct(pema, memory, epochs=60, rows=32, rate=1e-2) < 0.02 * before


def test_the_joint_loss_is_that_of_the_paper(pema: pm.Pema) -> None:
    bias = torch.randn(zoo.VOCAB).double()
    head = pm.Head(torch.randn(zoo.VOCAB, 32).double(), bias)
    f, y = torch.randn(5, 32).double(), torch.randint(zoo.VOCAB, (5,))
    rebuilt = sum(((f[i] - pema.B_rct @ (pema.A @ f[i])) ** 2).sum() for i in range(5)) / (5 * 32)
    logits = torch.stack([head.weight @ (pema.B_pd @ (pema.A @ f[i])) + bias for i in range(5)])
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    prediction = -sum(p[i, y[i]].log() for i in range(5)) / 5
    torch.testing.assert_close(
        pm.joint_loss(pema, head, f, y, 0.3), 0.3 * rebuilt + 0.7 * prediction, rtol=0, atol=1e-10
    )
    torch.testing.assert_close(pm.PemaTokens(pema, head)(f), p, rtol=0, atol=1e-10)


@pytest.mark.parametrize("r", [0, 32, 40])
def test_a_rank_that_is_no_bottleneck_is_refused(r: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 31"):
        pm.Pema(32, r)


def test_unrolling_falls_as_in_the_paper_by_the_length_of_the_input() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])
    lengths = pm.input_lengths(mask, instruction=2)
    assert lengths.tolist() == [5, 2]
    share = pm.Unrolling(lengths, most=0.9)
    cs = torch.tensor([[0.9, 0.72, 0.54, 0.36, 0.18, 0.0, 0.0], [0.9, 0.45, 0.0, 0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(torch.stack([share(step) for step in range(7)], dim=1), cs.square())
    assert pm.input_lengths(torch.tensor([[0, 1, 1]]), instruction=2).tolist() == [1]


def test_a_mixture_is_a_distribution_between_its_two() -> None:
    one, two = (torch.randn(4, 9).double().softmax(-1) for _ in range(2))
    share = torch.tensor([0.0, 0.25, 0.9, 1.0]).double()
    p = pm.mix(share, one, two)
    torch.testing.assert_close(p.sum(1), torch.ones(4).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(p[1], 0.25 * one[1] + 0.75 * two[1], rtol=0, atol=1e-12)
    assert torch.equal(p[0], two[0])
    assert torch.equal(p[3], one[3])


def test_neighbours_equal_explicit_sums(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, n=30, d=8)
    f = torch.randn(3, 8)
    p = em.NearestNeighbours(memory, zoo.VOCAB, k=5, temperature=4.0)(f)
    for row, got in zip(f, p, strict=True):
        distance = [sum((a - b) ** 2 for a, b in zip(row.tolist(), key, strict=True)) for key in memory.f.tolist()]
        weight = torch.zeros(zoo.VOCAB).double()
        for j in sorted(range(30), key=lambda j: distance[j])[:5]:
            weight[memory.y[j]] += torch.tensor(-distance[j] / 4.0).double().exp()
        torch.testing.assert_close(got.double(), weight / weight.sum(), rtol=1e-4, atol=1e-6)
    assert em.NearestNeighbours(memory, zoo.VOCAB, k=1000)(f).sum(1).tolist() == pytest.approx([1, 1, 1])


def by_hand(model: Any, pema: pm.Pema, row: list[int], most: float, instruction: int) -> list[int]:
    """One sentence without cache and padding: Eq. 2 and 6 and section 4, written out."""
    head, tokens, cs = model.get_output_embeddings(), [], most
    for _ in range(STEPS):
        f, logits = states(model, row + tokens)
        p = cs**2 * (head.weight @ (pema.B_pd @ (pema.A @ f))).softmax(-1) + (1 - cs**2) * logits.softmax(-1)
        tokens.append(int(p.argmax()))
        if tokens[-1] == zoo.EOS:
            break
        cs = max(cs - most / (len(row) - instruction), 0.0)
    return tokens + [zoo.EOS] * (STEPS - len(tokens))


@pytest.mark.parametrize("how", [{}, {"use_cache": False}])
def test_generating_is_a_loop_written_by_hand(model: Any, pema: pm.Pema, how: dict[str, Any]) -> None:
    inputs, mask = padded(ROWS)
    share = pm.Unrolling(pm.input_lengths(mask, instruction=1), most=0.9)
    mixed = pm.PemaTokens(pema, pm.Head.copied(model))
    got = pm.generate(model, inputs, mask, STEPS, mixed, share, **how).tolist()
    with torch.no_grad():
        assert got == [by_hand(model, pema, row, 0.9, instruction=1) for row in ROWS]
    assert got != em.greedy(model, inputs, mask, STEPS).tolist()
    assert got != pm.generate(model, inputs, mask, STEPS, mixed, pm.Constant(0.81)).tolist()  # λ does fall
    assert pm.generate(model, inputs, mask, STEPS, mixed, pm.Constant(0.0)).equal(em.greedy(model, inputs, mask, STEPS))
    assert not model.get_output_embeddings()._forward_hooks


@torch.no_grad()
def test_beams_are_scored_by_the_mixture(model: Any, pema: pm.Pema) -> None:
    inputs, mask = padded(ROWS)
    head = pm.Head.copied(model)
    pema_tokens = pm.PemaTokens(pema, head)
    share = pm.Unrolling(pm.input_lengths(mask, instruction=0), most=0.9)
    with em.HeadInputs(model) as head_inputs:
        mixing = pm.Interpolation(head_inputs, pema_tokens, share, start=inputs.shape[1])
        out = model.generate(
            input_ids=inputs,
            attention_mask=mask,
            max_new_tokens=STEPS,
            min_new_tokens=STEPS,
            num_beams=3,
            length_penalty=0.0,
            pad_token_id=zoo.PAD,
            do_sample=False,
            logits_processor=[mixing],
            return_dict_in_generate=True,
            output_scores=True,
        )
    continuation = out.sequences[:, inputs.shape[1] :]
    assert zoo.EOS not in continuation
    f = em.contexts(model, inputs, mask, continuation)
    total = torch.zeros(len(ROWS)).double()
    for i in range(STEPS):
        base = head(f[:, i]).index_fill(
            1, torch.tensor([zoo.EOS]), -torch.inf
        )  # min_new_tokens masks the end token first
        p = pm.mix(share(i).double(), pema_tokens(f[:, i]), base.softmax(-1))
        total += p.gather(1, continuation[:, i : i + 1])[:, 0].log()
    torch.testing.assert_close(out.sequences_scores.double(), total, rtol=0, atol=1e-5)
    assert not continuation.equal(em.greedy(model, inputs, mask, STEPS))


def test_suppressed_tokens_stay_suppressed(model: Any, pema: pm.Pema) -> None:
    inputs, mask = padded(ROWS)
    mixed = pm.PemaTokens(pema, pm.Head.copied(model))
    free = pm.generate(model, inputs, mask, STEPS, mixed, pm.Constant(0.9))
    word = free[0, 0].item()
    assert word not in pm.generate(model, inputs, mask, STEPS, mixed, pm.Constant(0.9), suppress_tokens=[word])


def test_assisted_decoding_is_refused(model: Any, pema: pm.Pema) -> None:
    row = [5, 6, 7, 5, 6, 7, 5, 6]
    inputs, mask = padded([row])
    mixed = pm.PemaTokens(pema, pm.Head.copied(model))
    with pytest.raises(RuntimeError, match="one pass a token"):
        pm.generate(model, inputs, mask, STEPS, mixed, pm.Constant(0.5), prompt_lookup_num_tokens=3)
    with em.HeadInputs(model) as head_inputs:
        model(input_ids=inputs)
        head_inputs.take()
        with pytest.raises(RuntimeError, match="one pass a token"):
            head_inputs.take()
