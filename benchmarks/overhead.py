"""What hooks cost: HF eager, HF sdpa, TransformerBridge and HookedVLM over the same random LLaVA, in one run.

    PYTHONPATH=. python benchmarks/overhead.py [--rounds 7]

The model has 8 layers, width 512, 576 visual and 40 text tokens. Rounds are interleaved, so that a busy machine slows all of
them alike; medians and the ratio to HF sdpa are printed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from subjects import IMAGE, SIDE, VOCAB, bridge_of, random_llava
from tests.tiny import LLAVA_TEMPLATE, Variant, image_processor, tokenizer

from sightlens import HookedVLM

WORDS = 40


def inputs() -> dict[str, torch.Tensor]:
    """Make one prompt: text, 576 visual tokens, text."""
    ids = torch.randint(10, VOCAB, (1, WORDS + 576), generator=torch.Generator().manual_seed(0))
    ids[0, 5 : 5 + 576] = IMAGE
    pixels = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def contestants(tensors: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return a forward pass of each; they share nothing but their weights' values."""
    base = random_llava()
    eager, sdpa, hooked = (copy.deepcopy(base) for _ in range(3))
    eager.set_attn_implementation("eager")
    bridge = bridge_of(base)
    processor = SimpleNamespace(tokenizer=tokenizer(LLAVA_TEMPLATE), image_processor=image_processor(Variant("llava")))
    vlm = HookedVLM.from_hf(hooked, processor)
    residuals = [(f"blocks.{layer}.hook_resid_post", lambda value, hook: None) for layer in range(8)]
    pattern = [("blocks.3.attn.hook_pattern", lambda value, hook: None)]

    def with_hooks(hooks: list) -> Callable[[], object]:
        def run() -> object:
            with vlm.hooks(fwd_hooks=hooks):
                return vlm.hf(**tensors, use_cache=False)

        return run

    rest = {name: value for name, value in tensors.items() if name != "input_ids"}
    return {
        "HF sdpa": lambda: sdpa(**tensors, use_cache=False),
        "HF eager": lambda: eager(**tensors, use_cache=False),
        "TransformerBridge": lambda: bridge(tensors["input_ids"], **rest),
        "HookedVLM": lambda: vlm.hf(**tensors, use_cache=False),
        "HookedVLM, 8 residuals read": with_hooks(residuals),
        "HookedVLM, one pattern read": with_hooks(pattern),
    }


@torch.no_grad()
def main() -> None:
    """Time the contestants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    runs = contestants(inputs())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            gc.collect()
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    base = statistics.median(times["HF sdpa"])
    print(f"{'forward pass, 616 positions, 1 thread':42s} {'median':>9s} {'of HF sdpa':>11s}")
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:42s} {middle * 1e3:7.0f} ms {middle / base:10.2f}×")


if __name__ == "__main__":
    main()
