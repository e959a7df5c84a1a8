"""The output in tiles is the output of the steps, and is used where it is all that is wanted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attncli.attention import stages as stages_module
from attncli.attention.options import AttentionOptions, Stage
from attncli.attention.problem import make_problem
from attncli.attention.qkv import RandomShape, draw
from attncli.attention.stages import blocks_of, output_blocks, select, stage_blocks, suits_tiles

OPTIONS = {
    "plain": AttentionOptions(),
    "causal": AttentionOptions(causal=True),
    "padded queries": AttentionOptions(query_lengths=(5, 9), key_lengths=(7, 3)),
    "empty rows": AttentionOptions(causal=True, query_offset=-4),
    "soft cap, ALiBi and sinks": AttentionOptions(
        softcap=2.0, alibi=True, sinks=np.array([0.5, -1.0, 2.0, 0.0])
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("heads", [None, [3, 1]])
def test_tiles_give_the_output_of_the_steps(name: str, heads: list[int] | None) -> None:
    q, k, v = draw(RandomShape(batch=2, heads=4, kv_heads=2, q_len=9, k_len=9, dk=8, dv=5), 3)
    problem = make_problem(q, k, v, OPTIONS[name])
    selection = select(problem, heads=heads)
    plain = list(stage_blocks(problem, [Stage.OUTPUT], selection))
    tiled = list(output_blocks(problem, selection))
    assert [(b.batch, b.head) for b in tiled] == [(b.batch, b.head) for b in plain]
    for one, other in zip(tiled, plain, strict=True):
        assert torch.equal(one.real, other.real)
        assert tuple(one.rows) == tuple(other.rows)
        torch.testing.assert_close(one.values, other.values, rtol=1e-12, atol=1e-13)


def test_tiles_are_for_all_rows_of_large_outputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(*draw(RandomShape(q_len=40, k_len=40, dk=4), 0), AttentionOptions())
    everything, some = select(problem), select(problem, rows=[1, 2])
    assert not suits_tiles(problem, [Stage.OUTPUT], everything)
    monkeypatch.setattr(stages_module, "BLOCK_CELLS", 100)
    assert suits_tiles(problem, [Stage.OUTPUT], everything)
    assert not suits_tiles(problem, [Stage.OUTPUT], some)
    assert not suits_tiles(problem, [Stage.WEIGHTS, Stage.OUTPUT], everything)
    monkeypatch.setattr(stages_module.steps, "logits", None)  # the tiles do without
    assert len(list(blocks_of(problem, [Stage.OUTPUT], everything))) == 1
