"""What the names of tensors say: whose role they play, whose group they are, which option they fit.

`q`, `layers.3.q` and `layers.3.query` are names that attncli asks for. Dumps of models have their
own: `blocks.3.attn.hook_q`, `self_attn.q_proj`, `layer3_query_states`, `xq`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

ROLES = {
    **dict.fromkeys(("q", "query", "queries"), "q"),
    **dict.fromkeys(("k", "key", "keys"), "k"),
    **dict.fromkeys(("v", "value", "values"), "v"),
}
_IN_DUMPS = ROLES | {f"x{role}": role for role in "qkv"} | {f"{role}cur": role for role in "qkv"}

# Words around a role that say nothing of it, and what of several such tensors attention uses: what
# a projection gave before what was normalised, the rest, and what was rotated.
_STAGE = {
    **dict.fromkeys(("proj", "projection", "projected", "lin", "linear", "to", "mixed"), 0),
    **dict.fromkeys(("norm", "normed", "normalized", "layernorm", "ln"), 1),
    **dict.fromkeys(("hook", "state", "states", "layer", "head", "heads", "tensor"), 2),
    **dict.fromkeys(("cache", "cached", "past", "present", "out", "output", "outputs", "act"), 2),
    **dict.fromkeys(("vec", "vector", "vectors", "mat", "matrix", "data", "call"), 2),
    **dict.fromkeys(("rot", "rotary", "rotated", "rope", "roped", "embed", "post"), 3),
    "pre": -1,  # before a rotation that is named too
}
_LATEST = 2

_PLAIN = re.compile(r"(?:(?P<group>.*)[./])?(?P<last>[^./]+)", re.DOTALL)
_WORD = r"[A-Z]?[a-z]+\d*|[A-Z]+\d*|\d+|[^\W_a-zA-Z\d]+"
_NUMBERED = re.compile(r"(?:[a-z]*\D)?\d+")

# What stands for a name where none is known to fit.
NO_EXAMPLE = "NAME"

# Names that fit an option, by their last words.
_FIT = {
    "sinks": r"(\w+_)?sinks?|s_aux",
    "attn_mask": r"(attn_|attention_|causal_)?mask|(attn|attention|position|relative)_bias",
    "key_padding": r"(key_)?padding(_mask)?|attention_mask",
    "segments": r"segments?(_ids)?|document(_id)?s|seq_idx",
    "position_ids": r"position(_id)?s",
    "x": r"x|hidden(_states)?|inputs?|input_embeds|resid\w*",
    "wq": r"wq|w_q|(q_proj|query|to_q|q_lin|q)\.weight",
    "wk": r"wk|w_k|(k_proj|key|to_k|k_lin|k)\.weight",
    "wv": r"wv|w_v|(v_proj|value|to_v|v_lin|v)\.weight",
    "wo": r"wo|w_o|(o_proj|out_proj|dense|to_out(\.0)?|out_lin|c_proj)\.weight",
    "bq": r"bq|b_q|(q_proj|query|to_q|q_lin|q)\.bias",
    "bk": r"bk|b_k|(k_proj|key|to_k|k_lin|k)\.bias",
    "bv": r"bv|b_v|(v_proj|value|to_v|v_lin|v)\.bias",
    "bo": r"bo|b_o|(o_proj|out_proj|dense|to_out(\.0)?|out_lin|c_proj)\.bias",
    "qkv": r"\w*qkv\w*|query_key_value|c_attn|in_proj|mixed_x_layer",
    "actual_output": r"\w*(out|output|context|hook_z|attn)|o|z",
    "actual_weights": r"(\w+_)?(weights|attentions?|probs|pattern)",
    "weights": r"(\w+_)?(weights|attentions?|probs|pattern)",
    "against": r"(attn_|attention_|causal_)?mask",
    "actual_logsumexp": r"(\w+_)?(lse|logsumexp)",
    "scores": r"(\w+_)?(scores|logits)",
}


@dataclass(frozen=True, slots=True)
class Part:
    """What a name says.

    Attributes:
        group: whose part the tensor is; "" for nobody's.
        role: "q", "k" or "v".
        stage: which of several tensors in one role attention uses: the largest.
    """

    group: str
    role: str
    stage: int = _LATEST


def plain_part(name: str) -> Part | None:
    """What a name as attncli asks for says; None for any other."""
    found = _PLAIN.fullmatch(name)
    role = ROLES.get(found["last"].lower()) if found else None
    return None if found is None or role is None else Part(found["group"] or "", role)


def dumped_part(name: str) -> Part | None:
    """What a name as dumps of models have it says; None where it names no role, or several.

    The role is a word of its own, and what follows it says nothing or is a number:
    `blocks.0.attn.hook_q` is q of the group `blocks.0.attn`, `layer3_q` of `layer3`, `q.0` of `0`;
    `q_proj.weight` and `key_padding_mask` are not.
    """
    pieces = re.split(r"[./]", name)
    words = [_words(piece) for piece in pieces]
    at = max((index for index, some in enumerate(words) if _roles(some)), default=None)
    if at is None or len(_roles(words[at])) > 1:
        return None
    (middle,) = _roles(words[at])
    before = words[at][:middle]
    after = [*words[at][middle + 1 :], *(word for some in words[at + 1 :] for word in some)]
    numbers = [word for word in after if _NUMBERED.fullmatch(word)]
    if any(word.lower() not in _STAGE and word not in numbers for word in after):
        return None
    stages = [_STAGE[word.lower()] for word in (*before, *after) if word.lower() in _STAGE]
    rotated = 3 in stages and -1 not in stages
    stage = max(stages) if rotated else max(0, min(stages, default=_LATEST))
    kept = "_".join(word for word in before if word.lower() not in _STAGE)
    group = [name[: len(".".join(pieces[:at]))], kept, *numbers]
    return Part(".".join(filter(None, group)), _IN_DUMPS[words[at][middle].lower()], stage)


def usual_layout(name: str, rank: int) -> str | None:
    """The order of axes that dumps give a tensor of that name and rank; None for no one order.

    Hooks of TransformerLens see (B, S, H, d), and a projection gives (B, S, H·d).
    """
    part = None if plain_part(name) else dumped_part(name)
    if part is None:
        return None
    if rank == 4 and re.search(r"(^|[._/])hook_[^./]*$", name):
        return "bshd"
    return "bsh" if rank < 4 and part.stage == 0 else None


def _roles(words: list[str]) -> list[int]:
    """Where among the words those stand that are a role."""
    return [index for index, word in enumerate(words) if word.lower() in _IN_DUMPS]


def _words(piece: str) -> list[str]:
    """The words between underscores, hyphens and capitals; layer_3 is one, q3 is two."""
    found: list[str] = []
    for word in re.findall(r"(?:layer|block|head)_\d+|" + _WORD, piece):
        letters = word.rstrip("0123456789")
        apart = letters.lower() in _IN_DUMPS and letters != word
        found += [letters, word[len(letters) :]] if apart else [word]
    return found


def fits(name: str, option: str) -> bool:
    """Whether a tensor of that name may be meant by an option: "k", "sinks", "attn_mask"."""
    if option in ("q", "k", "v"):
        part = plain_part(name) or dumped_part(name)
        return part is not None and part.role == option
    pattern = _FIT.get(option)
    return pattern is not None and bool(re.fullmatch(rf"(?i)(.*[./])?({pattern})", name, re.DOTALL))


def example(names: Iterable[str | None], option: str) -> str:
    """A name that fits an option, or the word that stands for one."""
    return next((name for name in names if name is not None and fits(name, option)), NO_EXAMPLE)
