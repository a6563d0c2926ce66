"""A process that holds training state of a given size. Runs in the training container, nothing of Stasis inside.

  workload.py dense|quantized BYTES

dense: a GPT of BYTES / 14 parameters, trained in mixed precision by AdamW for STEPS steps on the source of Python's
library; what it keeps is fp32 weights, both Adam moments and bf16 gradients (4 + 4 + 4 + 2 bytes a parameter).
quantized: 90% frozen int8 weights (normal, 7.4 bits of entropy a byte), 10% fp32 adapter state that every step draws
anew; each step moves every tensor to a new address, as cuda-checkpoint does.

It obeys what is written into /control/command, `NUMBER VERB`, and answers on stdout `answer NUMBER TEXT`.
"""

import ctypes
import hashlib
import mmap
import pathlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

COMMAND = pathlib.Path("/control/command")
STEPS = 10
CONTEXT, BATCH = 64, 4
PAGE = 4096


class Dense:
    """Tensors of a model that was really trained."""

    def __init__(self, size: int) -> None:
        import torch
        from torch import nn
        from torch.nn import functional

        parameters = size // 14
        width = 64 * max(2, round((parameters / 12 / 10) ** (1 / 2) / 64))
        layers = max(1, round((parameters - (256 + CONTEXT) * width) / (12 * width * width)))

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
                self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
                self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

            def forward(self, x):
                q, k, v = self.qkv(self.norm1(x)).view(BATCH, CONTEXT, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
                y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + self.out(y.transpose(1, 2).reshape(BATCH, CONTEXT, width))
                return x + self.mlp(self.norm2(x))

        class Gpt(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
                self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
                self.norm = nn.LayerNorm(width)

            def forward(self, ids):
                x = self.norm(self.blocks(self.tokens(ids) + self.places(torch.arange(CONTEXT))))
                return x @ self.tokens.weight.T

        torch.manual_seed(0)
        model = Gpt()
        for weight in model.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        text = torch.frombuffer(bytearray(library()), dtype=torch.uint8)
        for step in range(STEPS):
            starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,)).tolist()
            ids = torch.stack([text[at : at + CONTEXT + 1] for at in starts]).long()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        self.model = model
        tensors = []
        for weight in model.parameters():
            state = optimizer.state[weight]
            gradient = weight.grad.to(torch.bfloat16).view(torch.int16)
            weight.grad = None
            tensors += [weight.detach(), state["exp_avg"], state["exp_avg_sq"], gradient]
        self.arrays = [tensor.numpy() for tensor in tensors]

    def step(self) -> None:
        raise SystemExit("a dense state is trained once")


class Quantized:
    """Tensors in private mappings of their own, each with what fills it: `frozen` or not."""

    def __init__(self, size: int) -> None:
        self.random = random.Random(1)
        self.draw = np.random.default_rng(1)
        self.arrays: list[np.ndarray] = []
        self.frozen: list[bool] = []
        for share, frozen in ((0.9, True), (0.1, False)):
            left = int(share * size)
            while left > 0:
                count = min(left, 512 * self.random.randint(256, 32768))
                self.arrays.append(self.fill(place(count), frozen))
                self.frozen.append(frozen)
                left -= count

    def fill(self, array: np.ndarray, frozen: bool) -> np.ndarray:
        normal = self.draw.standard_normal(array.size if frozen else array.size // 4, dtype=np.float32)
        if frozen:
            array[:] = np.clip(np.rint(normal * 40), -127, 127).astype(np.int8).view(np.uint8)
        else:
            array[: normal.nbytes] = normal.view(np.uint8)
        return array

    def step(self) -> None:
        order = list(range(len(self.arrays)))
        self.random.shuffle(order)
        for number in order:
            old = self.arrays[number]
            new = place(old.size)
            if self.frozen[number]:
                new[:] = old
            else:
                self.fill(new, False)
            self.arrays[number] = new


def place(size: int) -> np.ndarray:
    """Fresh private memory at a page border; unmapped with the last reference."""
    block = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(block, np.uint8)[:size]


def library() -> bytes:
    files = sorted(pathlib.Path("/usr/lib/python3").rglob("*.py"))
    return b"".join(file.read_bytes() for file in files[:2000])[: 8 << 20]


def digest(arrays) -> str:
    """Of all bytes of all tensors, in order."""

    def one(array) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()

    with ThreadPoolExecutor(2) as pool:
        return hashlib.sha256(b"".join(pool.map(one, arrays))).hexdigest()


def main() -> None:
    kind, size = sys.argv[1], int(sys.argv[2])
    state = {"dense": Dense, "quantized": Quantized}[kind](size)
    ctypes.CDLL(None).malloc_trim(0)
    held = sum(array.nbytes for array in state.arrays)
    print(f"answer 0 {held}", flush=True)
    done = 0
    while True:
        number, _, verb = (COMMAND.read_text() if COMMAND.exists() else "0").partition(" ")
        if int(number) <= done:
            time.sleep(0.01)
            continue
        done = int(number)
        if verb == "end":
            return
        answer = ""
        if verb == "digest":
            answer = digest(state.arrays)
        elif verb == "step":
            state.step()
        elif verb == "spoil":  # for the benchmark's own test
            state.arrays[-1].reshape(-1).view(np.uint8)[-1] ^= 1
        print(f"answer {number} {answer}", flush=True)


if __name__ == "__main__":
    main()
