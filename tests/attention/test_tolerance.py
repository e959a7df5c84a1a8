"""What `check` allows: every right output of a kernel, and no output that is plainly another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attncli.attention.check.candidate import read_candidate
from attncli.attention.check.compare import Comparison, compare
from attncli.attention.options import AttentionOptions, Target
from attncli.attention.problem import Problem, make_problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def compared(
    problem: Problem, options: AttentionOptions, target: Target, actual: torch.Tensor
) -> Comparison:
    return compare(problem, options, [read_candidate(target, actual, problem)])[0]


def kernel_output(seed: int, dtype: torch.dtype) -> tuple[Problem, AttentionOptions, torch.Tensor]:
    """A random problem, and what one of torch's kernels, or plain steps, make of it."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape))

    batch, shared, group = (int(random.integers(1, 3)) for _ in range(3))
    q_len = int(random.choice([1, 2, 5, 16, 40, 100]))
    k_len = q_len if random.random() < 0.7 else q_len + int(random.integers(0, q_len + 2))
    width = int(random.choice([8, 32, 64, 128]))
    q = (1, 4, 20)[seed % 3] * normal(batch, shared * group, q_len, width)
    k, v = normal(batch, shared, k_len, width), normal(batch, shared, k_len, width)
    if random.random() < 0.4:  # an outlier channel
        v[..., int(random.integers(0, width))] *= 30
    if random.random() < 0.3:
        k[..., int(random.integers(0, width))] *= 4
    if random.random() < 0.2:  # an outlier key
        v[..., int(random.integers(0, k_len)), :] *= 100
    if random.random() < 0.2:
        v += 3
    options, mask = _shaping(random, q_len, k_len, dtype)
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    kind = ("eager", "math", "flash")[seed // 3 % 3]
    problem = make_problem(q, k, v, options)
    if kind == "eager":
        return problem, options, _eager(q, k, v, mask)
    backends = (
        [SDPBackend.MATH] if kind == "math" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    )
    with sdpa_kernel(backends):
        output = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return problem, options, output


def _shaping(
    random: np.random.Generator, q_len: int, k_len: int, dtype: torch.dtype
) -> tuple[AttentionOptions, torch.Tensor | None]:
    """Options, and the mask that comes to the same for a kernel."""
    kind = random.choice(["none", "causal", "window", "bool", "float"])
    distance = torch.arange(q_len)[:, None] - torch.arange(k_len)[None]
    if kind == "bool":
        kept = torch.from_numpy(random.random((q_len, k_len)) < 0.6)
        kept[:, 0] = True
        return AttentionOptions(attn_mask=kept.numpy()), kept
    if kind == "float":
        added = torch.from_numpy(random.standard_normal((q_len, k_len))).to(dtype)
        return AttentionOptions(attn_mask=added.double().numpy()), added
    if kind == "none" or q_len != k_len:
        return AttentionOptions(), None
    if kind == "causal":
        return AttentionOptions(causal=True), distance >= 0
    left = int(random.integers(0, q_len))
    return AttentionOptions(causal=True, left_window=left), (distance >= 0) & (distance <= left)


def _eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Softmax in float32, weights rounded before they meet V, as transformers does it."""
    group = q.shape[1] // k.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1).float() for tensor in (k, v))
    logits = q.float() @ keys.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        hidden = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -math.inf) if hidden else logits + mask.float()
    weights = logits.softmax(-1).to(q.dtype)
    return (weights.float() @ values).to(q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_outputs_of_every_kernel_pass(dtype: torch.dtype) -> None:
    failed = {}
    for seed in range(120):
        problem, options, output = kernel_output(seed, dtype)
        found = compared(problem, options, Target.OUTPUT, output)
        if not found.passed:
            failed[seed] = found.explanation
    assert failed == {}


def even_attention(keys: int, dtype: torch.dtype, heads: int = 1) -> tuple[Problem, torch.Tensor]:
    """q = 0, so that every key weighs the same, and the right output, rounded once."""
    random = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, heads, keys, 16, generator=random) for _ in range(2))
    v[0, 0, 5, 3] = 100
    k, v = k.to(dtype), v.to(dtype)
    problem = make_problem(torch.zeros(1, heads, 8, 16, dtype=dtype), k, v, AttentionOptions())
    right = v.double().mean(2, keepdim=True).expand(1, heads, 8, 16)
    return problem, right.to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("keys", [4096, 65_536])
def test_other_outputs_are_never_right(keys: int, dtype: torch.dtype) -> None:
    """However much the values average out, and whatever one outlier among them is."""
    problem, right = even_attention(keys, dtype, heads=2)
    assert compared(problem, AttentionOptions(), Target.OUTPUT, right).passed
    assert problem.v is not None
    half = problem.v[:, :, : keys // 2].double().mean(2, keepdim=True).expand(right.shape)
    others = {
        "zeros": torch.zeros_like(right),
        "doubled": right * 2,
        "negated": -right,
        "of the other head": right.flip(1),
        "of half of the keys": half.to(dtype),
    }
    for name, other in others.items():
        found = compared(problem, AttentionOptions(), Target.OUTPUT, other)
        assert not found.passed, name
        assert found.heads_off, name


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_of_zero_are_never_right(dtype: torch.dtype) -> None:
    problem, _ = even_attention(65_536, dtype)
    right = torch.full((1, 1, 8, 65_536), 1 / 65_536).to(dtype)
    assert compared(problem, AttentionOptions(), Target.WEIGHTS, right).passed
    for other in (torch.zeros_like(right), right * 2):
        found = compared(problem, AttentionOptions(), Target.WEIGHTS, other)
        assert found.mismatches == found.cells


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_weights_pass(dtype: torch.dtype) -> None:
    for seed in range(12):
        problem, options, _ = kernel_output(seed, dtype)
        group = problem.sizes.heads // problem.kv_heads
        logits = problem.q.float() @ problem.k.repeat_interleave(group, 1).float().mT
        every = np.arange(problem.sizes.q_len), slice(None)
        bias = problem.mask.bias(slice(None), slice(None), *every)
        visible = torch.from_numpy(problem.mask.visible(slice(None), slice(None), *every))
        logits = logits / math.sqrt(problem.dk) + (0 if bias is None else torch.from_numpy(bias))
        weights = logits.float().masked_fill(~visible, -math.inf).softmax(-1).to(dtype)
        found = compared(problem, options, Target.WEIGHTS, weights)
        assert found.passed, (seed, found.explanation)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_too_small_for_their_dtype_pass(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 24, 16, generator=random).to(dtype) for _ in range(3))
    v = v * (1e-6 if dtype == torch.float16 else 1e-37)
    output = scaled_dot_product_attention(q, k, v)
    problem = make_problem(q, k, v, AttentionOptions())
    assert compared(problem, AttentionOptions(), Target.OUTPUT, output).passed
    off = compared(problem, AttentionOptions(), Target.OUTPUT, output * 3)
    assert not off.passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_far_above_the_keys_is_rounded_too(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 1, 64, 16, generator=random).to(dtype) for _ in range(3))
    options = AttentionOptions(sinks=np.array([60.0]))
    logits = q.float() @ k.float().mT / 4
    joined = torch.cat([logits, torch.full((1, 1, 64, 1), 60.0)], -1)
    weights = joined.softmax(-1)[..., :-1]  # of some 1e-26: normal in float32 alone
    output = weights @ v.float()
    problem = make_problem(q, k, v, options)
    assert compared(problem, options, Target.OUTPUT, output.to(dtype)).passed
    assert compared(problem, options, Target.WEIGHTS, weights.to(dtype)).passed


def test_zeros_beside_one_outlier_are_off() -> None:
    """The very case in which a bound by the largest |V| of the head calls zeros right."""
    problem, right = even_attention(4096, torch.float16)
    found = compared(problem, AttentionOptions(), Target.OUTPUT, torch.zeros_like(right))
    assert not found.passed
    assert found.mismatches > found.cells / 2
    assert found.relative_error == pytest.approx(1)
    assert found.explained_error is not None
    assert found.explained_error < 0.01


def test_a_head_whose_errors_rounding_does_not_explain_is_off_whatever_its_cells() -> None:
    """Each cell alone could have been rounded so; all of them could not."""
    problem, right = even_attention(16_384, torch.bfloat16, heads=2)
    right[:, 1] *= 1.1
    found = compared(problem, AttentionOptions(), Target.OUTPUT, right)
    assert (found.mismatches, found.heads_off) == (0, 1)
    assert found.worst_head == (0, 1)
    assert not found.passed
    assert found.relative_error == pytest.approx(0.1, rel=0.1)
    assert "batch 0, head 1 errs by" in str(found.explanation)


def test_tolerances_of_the_caller_stand_for_heads_too() -> None:
    problem, right = even_attention(4096, torch.float16)
    candidate = read_candidate(Target.OUTPUT, torch.zeros_like(right), problem)
    found = compare(problem, AttentionOptions(), [candidate], atol=1.0)[0]
    assert found.passed
    assert (found.relative_error, found.heads_off) == (None, 0)


def empty_row() -> tuple[Problem, AttentionOptions, torch.Tensor]:
    """A problem whose row 2 sees no key, and its log-sum-exp."""
    random = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 1, 4, 8, generator=random) for _ in range(2))
    mask = np.ones((4, 4), bool)
    mask[2] = False
    options = AttentionOptions(attn_mask=mask)
    logits = (q @ k.mT / math.sqrt(8)).masked_fill(~torch.from_numpy(mask), -math.inf)
    return make_problem(q, k, None, options), options, logits.logsumexp(-1)


@pytest.mark.parametrize(
    ("value", "passes", "noted"),
    [
        (-math.inf, True, False),
        (math.inf, True, True),
        (0.0, False, False),
        (math.nan, False, False),
    ],
)
def test_the_logsumexp_of_an_empty_row(value: float, passes: bool, noted: bool) -> None:
    problem, options, logsumexp = empty_row()
    logsumexp[0, 0, 2] = value
    found = compared(problem, options, Target.LOGSUMEXP, logsumexp)
    assert (found.passed, bool(found.notes)) == (passes, noted)
    if noted:
        assert "+∞ in 1 row without a key is forgiven" in found.notes[0]
