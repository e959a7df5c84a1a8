"""Record what a model does while it runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from attncli.analysis.tensor_files import ALL_GROUPS, LABELS, LABELS_FROM
from attncli.errors import AttncliError, DataError, UsageError
from attncli.files.text import shown
from attncli.limits import require_disk
from attncli.recording.hooks import Call, Watch, watching
from attncli.recording.masks import MaskReader
from attncli.recording.names import Place, group_names, is_cross, is_decoder
from attncli.recording.recorder import Entry, LabelRows, Recorder, rows_of
from attncli.recording.selfcheck import SelfCheck

# Modules whose positions are no tokens of a text.
_NO_TEXT = re.compile(r"vision|visual|image|audio", re.IGNORECASE)


class Capture(Recorder):
    """Records every attention call of a model, each checked against the model's own output.

    A pass after the first is a step: its groups are `steps.T.layers.N`.

    Args:
        model: any module; of transformers' models all that go through their attention interface.
        path: as for `Recorder`.
        layers: indices of the layers to record, negative ones counted from the last; None for all.
        labels: as for `Recorder`: the tokens of all passes together.
        trace: whether to follow softmax that is written out, too.

    Leaving the context raises:
        DataError: nothing was recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | None = None,
        *,
        layers: Collection[int] | None = None,
        labels: LabelRows | None = None,
        trace: bool = False,
    ) -> None:
        super().__init__(path, labels=labels)
        self.model = model
        self._layers = layers
        self._trace = trace
        self._masks = MaskReader()
        self._hooks = ExitStack()
        self._watch: Watch | None = None
        self._alike = Counter(type(module) for module in model.modules())
        self._modules = dict(model.named_modules())
        self._text, self._step, self._padding = "", -1, None
        self._counts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._two_sided = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def __enter__(self) -> Self:
        super().__enter__()
        started = self.model.register_forward_pre_hook(
            self._begin_pass, prepend=True, with_kwargs=True
        )
        self._hooks.callback(started.remove)
        watch = watching(self.model, self._receive, trace=self._trace)
        self._watch = self._hooks.enter_context(watch)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._hooks.close()
        self._masks.forget()
        super().__exit__(kind, *rest)

    def begin_text(
        self, name: str, labels: LabelRows | None = None, decoder_labels: LabelRows | None = None
    ) -> None:
        """Begin another text, whose groups are NAME.layers.N; "" for the only one.

        Args:
            name: before the names of its groups.
            labels: its tokens; those of the encoder, where there are two sides.
            decoder_labels: those of the decoder.
        """
        self._text, self._step = name, -1
        self._totals.clear()
        self.label(name, labels, decoder_labels)

    def label(
        self, name: str, labels: LabelRows | None, decoder_labels: LabelRows | None = None
    ) -> None:
        """Say the tokens of a text, as for `begin_text`, once they are known."""
        for rows, decoder in ((labels, False), (decoder_labels, True)):
            if rows is not None:
                self.labels[_entry_of_labels(name, decoder)] = rows_of(rows)

    def _begin_pass(self, _: nn.Module, args: Any, given: dict[str, Any]) -> None:
        self._step += 1
        self._counts.clear()
        self._forget_masks()
        mask = given.get("attention_mask")
        is_padding = isinstance(mask, torch.Tensor) and mask.ndim == 2
        self._padding = mask if is_padding else None

    def _forget_masks(self) -> None:
        self._masks.forget()
        self._arrays.clear()

    def _receive(self, call: Call) -> None:
        """Record a call, if its layer is wanted."""
        repeat = self._counts[call.module]
        self._counts[call.module] += 1
        self._seen.add(call.module)
        if not repeat:
            self._totals[call.module] += call.q.shape[-2]
        if not self._is_wanted(call.module, repeat):
            return
        output = call.output
        try:
            entry = self._record(call.q, call.k, call.v, output, self._keywords(call))
        except AttncliError as error:
            self.warnings.append(f"{call.module}: recorded without its options: {error}")
            entry = self._record(call.q, call.k, call.v, None, {})
            entry.check = SelfCheck(float("inf"), 0.0)
        entry.module, entry.repeat, entry.text = call.module, repeat, self._text
        entry.step, entry.total = max(0, self._step), self._totals[call.module]
        if len(self._entries) == 1:
            self._require_disk(call.module)

    def _is_wanted(self, path: str, repeat: int) -> bool:
        """Whether the layer of a call is one of those to record."""
        if self._layers is None:
            return True
        config, alike = getattr(self.model, "config", None), self._alike[type(self._modules[path])]
        layers = getattr(config, "num_hidden_layers", None) or alike
        # Of one module for all layers the calls tell them apart.
        layer = repeat if alike == 1 and layers > 1 else Place.of(path).layer
        return layer is not None and (layer in self._layers or layer - layers in self._layers)

    def _keywords(self, call: Call) -> dict[str, Any]:
        """What shaped a call, as keywords of `AttentionOptions`."""
        q_len, k_len = call.q.shape[-2], call.k.shape[-2]
        found = self._masks.keywords(call.mask, call.bias, q_len, k_len)
        found = {"scale": call.scale, "softcap": call.softcap} | found
        if call.sinks is not None:
            found["sinks"] = call.sinks.detach().double().reshape(-1).cpu().numpy()
        if call.causal:
            found["causal"] = True
            if q_len != k_len:
                found["query_offset"] = "top-left"  # as torch has it
        elif q_len == 1 < k_len and "query_offset" not in found and self._is_newest(call.module):
            lengths = found.get("key_lengths", (k_len,))
            found["query_offset"] = tuple(length - 1 for length in lengths)
        found["query_lengths"] = self._query_lengths(call)
        return {name: value for name, value in found.items() if value is not None}

    def _is_newest(self, path: str) -> bool:
        """Whether a single query is the newest token: in a later step, or where modules say so."""
        causal = bool(getattr(self._modules[path], "is_causal", False))
        return not is_cross(path) and (self._step > 0 or causal)

    def _query_lengths(self, call: Call) -> tuple[int, ...] | None:
        """How many queries are real, where the batch is padded on the right."""
        mask, path = self._padding, call.module
        if mask is None or is_cross(path) or (self._two_sided and is_decoder(path)):
            return None
        shape = (call.q.shape[0], call.q.shape[-2])
        if call.q.ndim < 4 or tuple(mask.shape) != shape or call.k.shape[-2] != shape[1]:
            return None
        real = mask.bool()
        lengths = real.sum(-1)
        on_the_right = torch.arange(shape[1], device=mask.device) < lengths[:, None]
        if bool(real.all()) or not torch.equal(real, on_the_right):
            return None
        return tuple(lengths.tolist())

    def _require_disk(self, path: str) -> None:
        """Refuse what will not fit: all modules of a kind need as much as its first."""
        if self._stream is None or self.path is None:
            return
        layers = self._alike[type(self._modules[path])]
        wanted = min(layers, len(self._layers)) if self._layers is not None else layers
        folder = Path(self.path).resolve().parent
        require_disk(shown(self.path), folder, self._stream.size * max(0, wanted - 1))

    def _name(self) -> None:
        """Name the groups by what else there is, and say which labels are theirs."""
        by_pass: dict[tuple[str, int], list[Entry]] = {}
        for entry in self._entries:
            by_pass.setdefault((entry.text, entry.step), []).append(entry)
        # All passes together: a decoder's step alone would not know of the encoder.
        paths = dict.fromkeys((str(e.module), e.repeat) for e in self._entries)
        found = group_names(list(paths), two_sided=self._two_sided)
        names = dict(zip(paths, found, strict=True))
        for (text, step), entries in by_pass.items():
            lead = [text, f"steps.{step}" if step else ""]
            for entry in entries:
                name = names[str(entry.module), entry.repeat]
                entry.name = ".".join(filter(None, [*lead, name]))
                entry.labels = self._labels_of(entry)

    def _labels_of(self, entry: Entry) -> dict[str, Any]:
        """Which of the labels that are told once are those of a group's keys."""
        path = str(entry.module)
        of_decoder = self._two_sided and is_decoder(path) and not is_cross(path)
        told = _entry_of_labels(entry.text, of_decoder)
        rows = self.labels.get(told)
        if not self.labels:
            return {}
        if rows is None or _NO_TEXT.search(path):
            return {LABELS: None}
        said: dict[str, Any] = {} if told == ALL_GROUPS else {LABELS: told}
        length = len(rows[0] if rows and isinstance(rows[0], list) else rows)
        k_len = entry.shapes[1][2]
        if k_len != length and not is_cross(path) and k_len <= entry.total:
            said[LABELS_FROM] = entry.total - k_len
        return said

    def _finish(self) -> None:
        if not self._entries:
            raise self._nothing()
        self.warnings += self._missed()
        super()._finish()
        if self.model.training and any(group.failed for group in self.groups.values()):
            said = (
                "the model is in training mode, whose dropout is no part of attention: model.eval()"
            )
            self.warnings.append(said)

    def _nothing(self) -> AttncliError:
        """Why nothing was recorded."""
        name = type(self.model).__name__
        if self._seen and self._layers is not None:
            there = sorted({Place.of(path).layer or 0 for path in self._seen})
            wanted = f"expected some of the layers {there[0]} to {there[-1]}"
            return UsageError("«layers»", f"{wanted}, got {','.join(map(str, self._layers))}")
        ran = self._watch is not None and self._watch.ran
        problem = f"expected attention that can be recorded, got none from {name}"
        if not ran:
            return DataError(
                name, problem, "it did not run in this context, or was compiled: run it as it is"
            )
        advice = (
            "it writes out no softmax of q·kᵀ either"
            if self._trace
            else "it calls neither transformers' attention interface nor "
            "scaled_dot_product_attention: «trace» follows a softmax that it writes out"
        )
        return DataError(name, problem, advice)

    def _missed(self) -> list[str]:
        """Modules named attention that ran and of which nothing was recorded."""
        assert self._watch is not None
        kinds: Counter[str] = Counter()
        for path in self._watch.ran:
            kind = type(self._modules[path]).__name__
            related = any(_within(path, seen) or _within(seen, path) for seen in self._seen)
            if "Attention" in kind and not related:
                kinds[kind] += 1
        hint = "" if self._trace else ": «trace» follows a softmax that is written out"
        return [
            f"nothing was recorded of {count} modules {kind}{hint}"
            for kind, count in sorted(kinds.items())
        ]


def _within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or not other


def _entry_of_labels(text: str, decoder: bool) -> str:
    """Under which name of the metadata labels stand."""
    if not text and not decoder:
        return ALL_GROUPS
    return ".".join(filter(None, [text, "decoder" if decoder else "", "tokens"]))
