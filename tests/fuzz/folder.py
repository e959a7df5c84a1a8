"""A folder of files to name in command lines: sound, odd, broken, and none at all."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

HOSTILE = {
    "q": {"scale": 0.5, "\x1b[31m": 1, "labels": ["a\x1b[31m", "\n", "é", "d", "e", "f", "g"]},
    "": {"scale": 0.5, "causal": True, "query_offset": "bottom-right"},
    "*": {"labels": ["\x9b1m", "\u202e", "c", "d", "e", "f", "<b>"]},
}
# Names of files that lie in the folder; each is written where it may be.
ODD_NAMES = (
    "red\x1b[31m.npy",
    "new\nline.npz",
    "a,b.npz",
    "q::k.npz",
    "é.npy",
    "\udcff.npy",
    "-x.npy",
)
FILES = (
    *("q.npy", "k.npy", "v.npy", "b.npz", "b.npz::q", "b.npz::zz", "layers.safetensors", "dump.pt"),
    *("layers.safetensors::layers.0.q", "weights.npy", "mask.npy", "additive.npy", "padding.npy"),
    *("lse.npy", "segments.npy", "x.npy", "w.npy", "bias.npy", "qkv.npy", "nan.npy", "empty.npy"),
    *("ints.npy",),
    *("bits.npy", "bad.npy", "cut.npz", "hostile.safetensors", "views.pt", "labels.txt", "sample"),
    *(*ODD_NAMES, "absent", "absent/q.npy", "folder", ".", "/", "loop", "/dev/null", "-", "none"),
    *("x" * 300, "x" * 5000, "a/" * 3000, "b.npz::", "::q", "b.npz::\x1b[31m", "q.npy/x", "~"),
    *("\udcff",),
)
_WRITTEN = (
    "",
    "-",
    "q.npy",
    "folder",
    "folder/",
    "absent/x",
    "new/",
    "loop",
    "/dev/full",
    "/dev/null",
)
_CODES = ("red\x1b[31m", "new\nline", "\udcff", "é", "x" * 250, "x" * 300, "[red]", "a,b", " ")
TARGETS = {
    "output": (*_WRITTEN, "out", "out.json", "out.html", "out.safetensors", *_CODES),
    "save": (
        *(*_WRITTEN, "out.npz", "out.safetensors", "out.npy", "out", "out/", "out.txt", ".npz"),
        *(code + suffix for code in _CODES for suffix in ("", ".npz", ".safetensors")),
    ),
    "plot": (
        *_WRITTEN,
        "out.png",
        "out.svg",
        "out.pdf",
        "out.gif",
        *(f"{code}.svg" for code in _CODES),
    ),
}


def fill(folder: Path) -> None:
    """Write all of them: B=2, H=4, H_kv=2, S=7, d=8."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, heads, 7, 8)).astype(np.float32) for heads in (4, 2, 2))
    keep = np.tril(np.ones((7, 7), bool)) & (rng.random((7, 7)) < 0.8)
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "weights": np.full((2, 4, 7, 7), 1 / 7, np.float32),
        "mask": keep,
        "additive": np.where(keep, 0.0, -np.inf),
        "padding": rng.random((2, 7)) < 0.7,
        "lse": q[..., 0],
        "segments": np.array([0, 0, 0, 1, 1, 2, 2]),
        "x": rng.standard_normal((7, 8)),
        "w": rng.standard_normal((8, 8)),
        "bias": rng.standard_normal(8),
        "qkv": rng.standard_normal((2, 7, 3, 4, 8)).astype(np.float32),
        "nan": q * np.nan,
        "empty": q[:, :, :0],
        "ints": np.arange(q.size, dtype=np.int64).reshape(q.shape),
        "bits": np.full((2, 4, 7, 8), 0x3F80, np.uint16),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    bundle = {"q": q, "k": k, "v": v}
    np.savez(folder / "b.npz", **bundle)
    layers = {f"layers.{n}.{role}": array for n in (0, 1) for role, array in bundle.items()}
    save_file(layers, folder / "layers.safetensors")
    loose = {name: torch.from_numpy(array) for name, array in bundle.items()}
    torch.save({"blocks": [loose], "step": 3}, folder / "dump.pt")
    expanded = {name: torch.ones(1).expand(1, 2, 40, 8) for name in bundle}
    torch.save({"q.views": torch.eye(3).T, **expanded}, folder / "views.pt")
    _fill_odd(folder, bundle)


def _fill_odd(folder: Path, bundle: dict[str, np.ndarray]) -> None:
    names = {"q": "q", "k": "k", "v": "v\x1b[31m", "w": "\x1b[2Jq\n.q", "x": "«scale».k"}
    hostile = {names[key]: bundle.get(key, bundle["k"]) for key in names}
    save_file(hostile, folder / "hostile.safetensors", {"attncli": json.dumps(HOSTILE)})
    (folder / "bad.npy").write_bytes(b"not an array")
    (folder / "none").write_bytes(b"")
    (folder / "labels.txt").write_bytes(b"the\ncat\x1b[31m\nsat\n\xff\n\ne\nf\n")
    archive = io.BytesIO()
    np.savez(archive, **bundle)
    (folder / "cut.npz").write_bytes(archive.getvalue()[:-40])
    (folder / "sample").write_bytes(b"\x93NUMPY")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    for name in ODD_NAMES:
        with (folder / name).open("wb") as file:
            if name.endswith(".npy"):
                np.save(file, bundle["q"])
            else:
                np.savez(file, **bundle)
