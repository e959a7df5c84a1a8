"""Three ways to see the attention calls of a running model, each call once.

- Transformers asks `AttentionInterface.get_interface` for a function. What it gets is wrapped: the
  model keeps its own function and mask, and its module's own eager code is among them.
- Everything else that calls `F.scaled_dot_product_attention`, also from inside
  `F.multi_head_attention_forward`, which a mode cannot look into; its attribute is replaced.
- Softmax written out between two products, followed where that is asked for (`trace`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.overrides import TorchFunctionMode

from attncli.recording.trace import Trace

# Above so many cells a module's eager function is given some queries at a time.
_EAGER_CELLS = 1 << 22
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_INTERFACE = ("query", "key", "value", "attention_mask", "dropout", "scaling")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One attention call, as it was seen.

    Attributes:
        module: path of the module that made it; "" for the model itself.
        q: (B, H, S_q, d_k) or without B, k and v like it, with H_kv and S_k.
        output: (B, H, S_q, d_v).
        mask: bool, True = may attend, or additive; None for none.
        bias: additive, beside the mask.
        causal: whether key j is visible to query i iff j ≤ i.
        scale: multiplies the scores; None for 1/√d_k.
        softcap: of the scaled scores.
        sinks: (H,), logits in the denominator.
    """

    module: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class Watch:
    """What is seen of one model.

    Attributes:
        modules: path → module.
        paths: identity of a module → its path.
        receive: is told each call.
        trace: whether to follow softmax that is written out.
        inside: paths of the modules that are running, the innermost last.
        ran: paths of all modules that have run.
        busy: how many functions that are recorded as a whole are running.
    """

    modules: dict[str, nn.Module]
    paths: dict[int, str]
    receive: Callable[[Call], None]
    trace: bool
    inside: list[str] = field(default_factory=list)
    ran: set[str] = field(default_factory=set)
    busy: int = 0

    @property
    def module(self) -> str:
        """Path of the innermost running module."""
        return self.inside[-1] if self.inside else ""


@contextmanager
def watching(
    model: nn.Module, receive: Callable[[Call], None], *, trace: bool = False
) -> Iterator[Watch]:
    """Tell `receive` of every attention call of a model."""
    modules = dict(model.named_modules())
    watch = Watch(modules, {id(m): path for path, m in modules.items()}, receive, trace)
    with ExitStack() as stack:
        for module in model.modules():
            _follow(stack, watch, module)
        transformers = sys.modules.get("transformers.modeling_utils")
        interface = getattr(transformers, "AttentionInterface", None)
        if hasattr(interface, "get_interface"):  # that of transformers 5
            _wrap_interface(stack, watch, interface)
        sdpa = F.scaled_dot_product_attention
        _replace_sdpa(stack, watch)
        # The fast path of nn.TransformerEncoderLayer is one operation for everything.
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(_Mode(watch, sdpa))
        yield watch


def _follow(stack: ExitStack, watch: Watch, module: nn.Module) -> None:
    """Know of a module when it runs."""
    path = watch.paths[id(module)]

    def enter(*_: Any) -> None:
        watch.inside.append(path)
        watch.ran.add(path)

    def leave(*_: Any) -> None:
        watch.inside.pop()

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)


def _wrap_interface(stack: ExitStack, watch: Watch, interface: Any) -> None:
    """See the calls that go through transformers' interface."""
    plain = interface.get_interface

    def get_interface(self: Any, implementation: str, default: Any) -> Any:
        own, kind = plain(self, implementation, default), implementation or "eager"

        def attend(module: nn.Module, *args: Any, **given: Any) -> Any:
            said = dict(zip(_INTERFACE, args, strict=False)) | given
            q, k, v = (said.pop(name) for name in _INTERFACE[:3])
            watch.busy += 1
            try:
                apart = kind == "eager" and q.shape[-2] * k.shape[-2] > _EAGER_CELLS
                if apart and not said.get("output_attentions"):
                    result = _by_rows(own, module, q, k, v, said)
                else:
                    result = own(module, *args, **given)
            finally:
                watch.busy -= 1
            if id(module) in watch.paths:
                tensors = q, k, v, result[0].transpose(-3, -2)
                watch.receive(_call(kind, watch.paths[id(module)], module, tensors, said))
            return result

        return attend

    interface.get_interface = get_interface
    stack.callback(setattr, interface, "get_interface", plain)


def _by_rows(
    own: Any,
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    said: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """The module's own function, some queries at a time: S_q × S_k weights are never held."""
    step, q_len, k_len = max(1, _EAGER_CELLS // k.shape[-2]), q.shape[-2], k.shape[-2]

    def cut(value: Any, rows: slice) -> Any:
        over_rows = isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[-2] == q_len
        return value[..., rows, :] if over_rows and value.shape[-1] >= k_len else value

    outputs = []
    for start in range(0, q_len, step):
        rows = slice(start, start + step)
        some = {name: cut(value, rows) for name, value in said.items()}
        mask = some.pop("attention_mask", None)
        outputs.append(own(module, q[..., rows, :], k, v, mask, **some)[0])
    return torch.cat(outputs, -3), None


def _call(
    kind: str, path: str, module: nn.Module, tensors: tuple[torch.Tensor, ...], said: dict[str, Any]
) -> Call:
    """What a call through transformers' interface means.

    No mask is causal or none at all: the eager functions read nothing into it, the others ask the
    call, then the module, and a single query sees everything.

    Args:
        kind: which implementation it asked for.
        path: of the module.
        module: which calls.
        tensors: q, k, v and the output.
        said: its keywords, with the mask.
    """
    q, k, v, output = tensors
    flag, mask = said.get("is_causal"), said.get("attention_mask")
    flag = getattr(module, "is_causal", True) if flag is None else flag
    return Call(
        path,
        q,
        k,
        v,
        output,
        mask=mask,
        bias=said.get("position_bias"),
        causal=mask is None and kind != "eager" and bool(flag) and q.shape[-2] > 1,
        scale=said.get("scaling"),
        softcap=said.get("softcap"),
        sinks=said.get("s_aux", said.get("sinks")),
    )


def _replace_sdpa(stack: ExitStack, watch: Watch) -> None:
    """See the calls of `F.scaled_dot_product_attention` that look it up where it is."""
    plain = F.scaled_dot_product_attention

    def attend(*args: Any, **given: Any) -> Any:
        return _through_sdpa(watch, plain, args, given)

    F.scaled_dot_product_attention = attend
    stack.callback(setattr, F, "scaled_dot_product_attention", plain)


def _through_sdpa(watch: Watch, plain: Any, args: Any, given: dict[str, Any]) -> Any:
    watch.busy += 1
    try:
        output = plain(*args, **given)
    finally:
        watch.busy -= 1
    if not watch.busy:
        said = dict(zip(_SDPA, args, strict=False)) | given
        call = Call(
            watch.module,
            said["query"],
            said["key"],
            said["value"],
            output,
            mask=said.get("attn_mask"),
            causal=bool(said.get("is_causal")),
            scale=said.get("scale"),
        )
        watch.receive(call)
    return output


class _Mode(TorchFunctionMode):
    """Sees what is called by another name, or written out, while it is entered."""

    def __init__(self, watch: Watch, sdpa: Any) -> None:
        super().__init__()
        self.watch = watch
        self.sdpa = sdpa
        self.trace = Trace(self._found, self._heads) if watch.trace else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is self.sdpa and not self.watch.busy:
            return _through_sdpa(self.watch, func, args, given)
        if func is F.multi_head_attention_forward and given.get("need_weights", True):
            # With weights it writes out its softmax, unseen; once more it is the same by SDPA.
            func(*args, **(given | {"need_weights": False}))
        result = func(*args, **given)
        if self.trace is not None and not self.watch.busy:
            self.trace.follow(func, args, given, result)
        return result

    def _found(self, **seen: Any) -> None:
        """Receive attention that was written out: what its logits hold beyond scale · q·k."""
        self.watch.receive(Call(self.watch.module, **seen))

    def _heads(self) -> int | None:
        """How many heads the running module says that it has."""
        module = self.watch.modules[self.watch.module]
        found = next((getattr(module, name) for name in _HEADS if hasattr(module, name)), None)
        return found if isinstance(found, int) and found > 0 else None
