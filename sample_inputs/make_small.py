"""Write the example, the bfloat16 samples and the broken files; same bytes every time.

    python sample_inputs/make_small.py

The bfloat16 samples are rounded from `minilm.safetensors` (see `make_minilm.py`), so that one
is regenerated first.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

HERE = Path(__file__).resolve().parent
MINILM = HERE / "minilm.safetensors"

# The 4×3 example of the theory; V is ours, the theory gives none.
EXAMPLE = {
    "q": [[0.11, 0.77, 0.08], [-0.55, -0.28, 0.24], [-0.79, 0.97, -0.74], [-0.72, 0.95, 0.36]],
    "k": [[-0.89, -0.34, -0.17], [-0.17, 0.81, -0.10], [0.86, -0.99, 0.30], [0.10, -0.91, 0.92]],
    "v": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]],
}

BF16_GROUPS = ("layers.0", "layers.5")
# The head of layer 0 that looks at the previous token.
PREVIOUS_TOKEN_HEAD = 2


def write_bundle(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Path:
    """Write contiguous tensors as a safetensors file with a header in a fixed order.

    The library writes the metadata in a different order each time, so the header is sorted
    afterwards: eight bytes of length (little-endian), JSON padded with spaces to a multiple of
    eight, then the data, which stays as it is.
    """
    raw = save(dict(tensors), metadata=dict(metadata))
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8 : 8 + length]), sort_keys=True, separators=(",", ":"))
    encoded = header.encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :])
    return path


def write_array(path: Path, array: np.ndarray) -> Path:
    """Write one array as `.npy`, in C order."""
    np.save(path, np.ascontiguousarray(array))
    return path


def write_example(folder: Path) -> list[Path]:
    """Write Q, K and V of the embedded example, each (4, 3) float64."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_array(folder / f"{role}.npy", np.array(rows, dtype=np.float64))
        for role, rows in EXAMPLE.items()
    ]


def write_bfloat16(folder: Path) -> list[Path]:
    """Write two layers of MiniLM as a bfloat16 bundle, and one head of them as a `.npy` pair.

    numpy has no bfloat16: the pair holds the raw bytes, dtype `|V2`, each (16, 32).
    """
    with safe_open(MINILM, framework="pt") as source:
        tensors = {
            name: source.get_tensor(name).to(torch.bfloat16)
            for name in source.keys()  # noqa: SIM118 - not a dict
            if name.startswith(tuple(f"{group}." for group in BF16_GROUPS))
        }
        metadata = source.metadata()
    options = json.loads(metadata["attncli"])
    metadata["attncli"] = json.dumps({group: options[group] for group in BF16_GROUPS})
    metadata["origin"] += ", rounded to bfloat16"

    written = [write_bundle(folder / "minilm-bf16.safetensors", tensors, metadata)]
    for role in ("q", "k"):
        head = tensors[f"layers.0.{role}"][0, PREVIOUS_TOKEN_HEAD]  # (S, d_k)
        bits = head.contiguous().view(torch.int16).numpy().view("V2")
        written.append(write_array(folder / f"bf16-{role}.npy", bits))
    return written


def write_broken(folder: Path) -> list[Path]:
    """Write one small file for each kind of mistake that the tour of errors shows."""
    folder.mkdir(parents=True, exist_ok=True)
    q, k = np.array(EXAMPLE["q"]), np.array(EXAMPLE["k"])

    nonfinite = q.copy()
    nonfinite[1, 0] = np.nan
    nonfinite[2, 2] = np.inf
    written = [
        write_array(folder / "nonfinite-q.npy", nonfinite),
        write_array(folder / "wrong-width-k.npy", np.hstack([k, k[:, :1]])),
    ]

    truncated = write_array(folder / "truncated.npy", q)
    truncated.write_bytes(truncated.read_bytes()[:-40])  # five of twelve numbers are missing

    text = folder / "text.npy"
    text.write_text("".join(" ".join(map(str, row)) + "\n" for row in EXAMPLE["q"]), newline="\n")

    payload = MINILM.read_bytes()
    pointer = folder / "lfs-pointer.safetensors"
    pointer.write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        f"oid sha256:{hashlib.sha256(payload).hexdigest()}\n"
        f"size {len(payload)}\n",
        newline="\n",
    )
    return [*written, truncated, text, pointer]


def write_all(folder: Path) -> list[Path]:
    """Write every small sample under `folder` and return the paths."""
    return [
        *write_example(folder / "example"),
        *write_bfloat16(folder),
        *write_broken(folder / "broken"),
    ]


if __name__ == "__main__":
    for path in write_all(HERE):
        print(f"wrote {path.relative_to(HERE)} ({path.stat().st_size:,} bytes)")
