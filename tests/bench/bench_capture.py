"""A forward pass alone against the same captured: CPU seconds and memory, each in a fresh process.

    python tests/bench/bench_capture.py [--length 8192] [--pairs 3] [--only llama ...]

Both sides build the same small random model (6 layers, 8 heads, d 64) and run a short text first,
so that what is compared is the long one. They alternate; medians are printed. Memory is the largest
private resident set above that before the long text; mapped files do not count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

ONE_SIDE = """
import sys, tempfile, threading, time
from contextlib import nullcontext
import torch
import transformers as tf
import attncli

kind, length, captured = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "captured"
sizes = dict(hidden_size=512, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8,
             num_key_value_heads=2, vocab_size=200, max_position_embeddings=length, head_dim=64)
config = {
    "llama": lambda: tf.LlamaConfig(**sizes),
    "mistral": lambda: tf.MistralConfig(**sizes, sliding_window=1024),
    "gemma2": lambda: tf.Gemma2Config(**sizes, sliding_window=1024, query_pre_attn_scalar=64),
}[kind]()
model = tf.AutoModel.from_config(config).eval()
ids = torch.randint(0, 200, (1, length))
peak = [0]

def private():
    pages = open("/proc/self/statm").read().split()
    return (int(pages[1]) - int(pages[2])) * 4096

def watch():
    while True:
        peak[0] = max(peak[0], private())
        time.sleep(0.005)

def run(ids, folder):
    seen = attncli.capture(model, folder + "/qkv.safetensors") if captured else nullcontext()
    with torch.no_grad(), seen:
        model(input_ids=ids, use_cache=False)

with tempfile.TemporaryDirectory() as folder:
    with torch.no_grad(), attncli.capture(model):
        model(input_ids=ids[:, :64], use_cache=False)
    before = private()
    threading.Thread(target=watch, daemon=True).start()
    start = time.process_time()
    run(ids, folder)
    print(time.process_time() - start, (peak[0] - before) / 2**20)
"""


def side(kind: str, length: int, name: str) -> tuple[float, float]:
    """CPU seconds, and MiB."""
    words = [sys.executable, "-c", ONE_SIDE, kind, str(length), name]
    seconds, memory = subprocess.run(
        words, capture_output=True, text=True, check=True
    ).stdout.split()
    return float(seconds), float(memory)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["llama", "mistral", "gemma2"])
    given = parser.parse_args()
    for kind in given.only:
        pairs = [
            [side(kind, given.length, name) for name in ("alone", "captured")]
            for _ in range(given.pairs)
        ]
        ratio = median(captured[0] / alone[0] for alone, captured in pairs)
        more = median(captured[1] - alone[1] for alone, captured in pairs)
        seconds = median(alone[0] for alone, _ in pairs)
        print(f"{kind:8} {given.length}: {ratio:.2f} × {seconds:.1f} CPU s, {more:+.0f} MiB")


if __name__ == "__main__":
    main()
