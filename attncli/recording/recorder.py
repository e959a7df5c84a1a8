"""Groups of Q, K and V with what shaped attention in each, in a bundle or kept in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from attncli.analysis.attention_arguments import as_array, read_keywords
from attncli.analysis.inputs import read_group
from attncli.analysis.tensor_files import (
    ALL_GROUPS,
    FROM_FILES,
    LABELS,
    LAYOUT,
    HeldTensor,
    groups_in,
)
from attncli.attention.options import OPTIONS, Kind, Layout, Precision
from attncli.attention.problem import make_problem
from attncli.columns import column
from attncli.errors import DataError, UsageError
from attncli.files.stream import TensorStream
from attncli.files.torch_tensors import to_numpy
from attncli.recording.selfcheck import SelfCheck, self_check

LabelRows = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGroup:
    """What was recorded of one attention call."""

    group: str = column("group", description="its name in the bundle", is_key=True)
    module: str | None = column(None, description="path of the module that made the call")
    batch: int = column(None, description="number of batches")
    heads: int = column("heads", description="query heads")
    kv_heads: int = column("kv heads", description="key and value heads")
    q_len: int = column("q len", description="number of queries")
    k_len: int = column("k len", description="number of keys")
    dk: int = column("d_k", description="width of queries and keys")
    dv: int = column("d_v", description="width of values")
    dtype: str = column("dtype", description="of the recorded tensors")
    options: dict[str, Any] = column(
        "options", description="what shaped attention, as the bundle declares it"
    )
    self_check: float | None = column(
        "self-check",
        description="error of the model's own output, as a share of Σ w·|v|, against attention as "
        "recorded, in float64, in the row that is furthest off; none where it was not compared",
    )
    allowed: float | None = column(None, description="what rounding explains of it")

    @property
    def failed(self) -> bool:
        """Whether what was recorded is not what the model did."""
        return self.self_check is not None and not self.self_check <= (self.allowed or 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedTensors:
    """A group as the functions of attncli take it: `attncli.compute(g.q, g.k, g.v, **g.options)`.

    Attributes:
        q: (B, H, S_q, d_k).
        k: (B, H_kv, S_k, d_k).
        v: (B, H_kv, S_k, d_v).
        options: keywords.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Entry:
    """One recorded call, whose name may be known only in the end.

    Attributes:
        name: of its group; "" as long as it is not known.
        shapes: of q, k and v, (B, H, S, d) each.
        dtype: of q.
        keywords: what shaped attention; arrays are kept only where there is no bundle.
        declared: the same as a bundle declares it.
        check: against the model's own output; None where there was none.
        labels: what the bundle says of them under `LABELS` and `LABELS_FROM`.
        module, repeat, step, text, total: of a model: path of the module, how often it was called
            before in this pass, which pass, which text, and how many positions it has seen.
    """

    name: str = ""
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    keywords: dict[str, Any]
    declared: dict[str, Any]
    check: SelfCheck | None
    labels: dict[str, Any] = field(default_factory=dict)
    module: str | None = None
    repeat: int = 0
    step: int = 0
    text: str = ""
    total: int = 0


class Recorder:
    """Writes a bundle group by group; without a path it keeps the groups.

    Args:
        path: the bundle, a safetensors file, which appears on leaving the context without error;
            None to keep the tensors in memory.
        labels: a token per position for all groups, or such a row for each batch.

    Attributes:
        warnings: what the reader of the results should know, once the context is left.
    """

    def __init__(self, path: str | None = None, *, labels: LabelRows | None = None) -> None:
        self.path = path
        self.labels: dict[str, Any] = {} if labels is None else {ALL_GROUPS: rows_of(labels)}
        self.warnings: list[str] = []
        self._stream = None if path is None else TensorStream(path)
        self._entries: list[Entry] = []
        self._kept: dict[str, torch.Tensor] = {}
        self._arrays: dict[int, tuple[NDArray[Any], str]] = {}  # held, so that identities stay
        self._digests: dict[bytes, str] = {}

    def __enter__(self) -> Self:
        if self._stream is not None:
            self._stream.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._stream is not None:
                self._stream.__exit__()

    def add(
        self,
        name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        output: torch.Tensor | None = None,
        labels: LabelRows | None = None,
        **options: Any,
    ) -> None:
        """Record a group.

        Args:
            name: of the group.
            q: (S_q, d_k), (H, S_q, d_k) or (B, H, S_q, d_k).
            k: like q, with S_k and H_kv.
            v: like k, with d_v.
            output: like q, with d_v: what is compared with attention as it is recorded.
            labels: a token per key, or such a row for each batch.
            options: any field of `AttentionOptions`.

        Raises:
            AttncliError: tensors and options that do not go together.
        """
        if not name or any(entry.name == name for entry in self._entries):
            raise UsageError("name", f"expected one that is not taken, got {name!r}")
        entry = self._record(q, k, v, output, options)
        self._arrays.clear()  # of masks that are in the bundle their digests are enough
        entry.name = name
        if labels is not None:
            entry.labels[LABELS] = rows_of(labels)

    @property
    def groups(self) -> dict[str, CapturedGroup]:
        """What has been recorded, by the names of the groups."""
        self._name()
        return {entry.name: _described(entry) for entry in self._entries}

    def __getitem__(self, name: str) -> CapturedTensors:
        """A group with its tensors, read from the bundle once that is there."""
        self._name()
        names = [entry.name for entry in self._entries]
        if name not in names:
            raise KeyError(name)
        if self.path is None:
            at = names.index(name)
            q, k, v = (self._kept[f"{at}.{role}"] for role in "qkv")
            return CapturedTensors(q, k, v, self._entries[at].keywords)
        (found,) = groups_in([self.path], [name])
        tensors = read_group(found).tensors
        options = {
            option: as_array(value.read()) if isinstance(value, HeldTensor) else value
            for option, value in found.declared.items()
            if option in OPTIONS
        }
        return CapturedTensors(tensors["q"], tensors["k"], tensors["v"], options)

    @torch.no_grad()
    def _record(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor | None,
        keywords: Mapping[str, Any],
    ) -> Entry:
        """Check what is recorded, and write it."""
        q, k, v = (tensor.detach()[(None,) * (4 - tensor.ndim)] for tensor in (q, k, v))
        problem = make_problem(
            q,
            k,
            v,
            read_keywords(keywords),
            precision=Precision.FLOAT64,
            device=str(q.device),
            allow_nonfinite=True,
        )
        check = None
        if output is not None:
            check = self_check(problem, output.detach()[(None,) * (4 - output.ndim)])
        known = {"scale": problem.scale} | dict(keywords)
        declared = {name: self._declared(name, value) for name, value in known.items()}
        at = len(self._entries)
        for role, tensor in zip("qkv", (q, k, v), strict=True):
            self._put(f"{at}.{role}", tensor)
        entry = Entry(
            shapes=tuple(tuple(tensor.shape) for tensor in (q, k, v)),
            dtype=str(q.dtype).removeprefix("torch."),
            keywords=known if self.path is None else {},
            declared=declared,
            check=check,
        )
        self._entries.append(entry)
        return entry

    def _declared(self, name: str, value: Any) -> Any:
        """A value as metadata hold it: numbers, lists of them, or the name of a tensor."""
        if name in FROM_FILES and OPTIONS[name].kind is not Kind.LOGITS:
            return self._stored(value)
        if isinstance(value, tuple):
            return list(value)
        return value.tolist() if hasattr(value, "tolist") else value

    def _stored(self, values: Any) -> str:
        """The name of a tensor with these values, which groups share."""
        array = values if not isinstance(values, torch.Tensor) else to_numpy(values.cpu())
        if id(array) in self._arrays:
            return self._arrays[id(array)][1]
        hashed = hashlib.blake2b(f"{array.shape} {array.dtype}".encode())
        hashed.update(np.ascontiguousarray(array).data)
        digest = hashed.digest()
        if digest not in self._digests:
            self._digests[digest] = f"masks.{len(self._digests)}"
            self._put(self._digests[digest], torch.from_numpy(array))
        self._arrays[id(array)] = array, self._digests[digest]
        return self._digests[digest]

    def _put(self, key: str, tensor: torch.Tensor) -> None:
        if self._stream is None:
            self._kept[key] = tensor.to("cpu", copy=True)
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._stream.write(key, tuple(tensor.shape), dtype, _parts(tensor))

    def _name(self) -> None:
        """Name the groups whose names depend on what else there is."""

    def _finish(self) -> None:
        """Say what is off, and write the header."""
        if not self._entries:
            raise DataError(self.path or "the recording", "expected a group at least, got none")
        groups = self.groups
        self.warnings += [_warning(group) for group in groups.values() if group.failed]
        self._arrays.clear()
        if self._stream is None:
            return
        metadata: dict[str, dict[str, Any]] = {ALL_GROUPS: {LAYOUT: str(Layout.BHSD)}}
        for name, rows in self.labels.items():
            metadata.setdefault(name, {})[LABELS] = rows
        names = {name: name for name in self._digests.values()}
        for at, entry in enumerate(self._entries):
            said = groups[entry.name]
            about = {"module": said.module, "self_check": said.self_check}
            metadata[entry.name] = entry.declared | entry.labels
            metadata[entry.name] |= {
                key: value for key, value in about.items() if value is not None
            }
            names |= {f"{at}.{role}": f"{entry.name}.{role}" for role in "qkv"}
        self._stream.finish(names, metadata)


def _described(entry: Entry) -> CapturedGroup:
    (batch, heads, q_len, dk), (_, kv_heads, k_len, _), (*_, dv) = entry.shapes
    return CapturedGroup(
        group=entry.name,
        module=entry.module,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        k_len=k_len,
        dk=dk,
        dv=dv,
        dtype=entry.dtype,
        options=entry.declared,
        self_check=None if entry.check is None else entry.check.error,
        allowed=None if entry.check is None else entry.check.allowed,
    )


def _warning(group: CapturedGroup) -> str:
    return (
        f"{group.group}: the model's own output is {group.self_check:.1e} from attention as it "
        f"was recorded, of which rounding explains {group.allowed:.1e}: something is missing"
    )


def rows_of(labels: LabelRows) -> list[Any]:
    """Labels as metadata hold them: those of a batch of one as they are."""
    rows = [row if isinstance(row, str) else list(row) for row in labels]
    return rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows


def _parts(tensor: torch.Tensor) -> Iterator[NDArray[Any]]:
    """The data of a tensor in order, a matrix at a time: a view is never copied whole."""
    if tensor.ndim > 2:
        for part in tensor:
            yield from _parts(part)
        return
    yield to_numpy(tensor.cpu().contiguous())
