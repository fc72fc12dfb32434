"""What our GPU kernels need, learned without a GPU: registers, spills, shared memory, tensor-core instructions.

    python scripts/kernel_resources.py [--tokens 197 …] [--width 64] [--capability 90] [--only Hopper] [--sparsity inf]

Triton compiles for a GPU that is not there; the compiler's report answers most questions before device time is spent:
how many programs fit on a multiprocessor, whether registers spill, whether the products use the tensor cores.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vitruvius.attention.fused import _pursuit, _pursuit_back, _pursuit_whole, _sparse, masked, rpc
from vitruvius.attention.fused.hopper import _calls, _mask, _mask_plan
from vitruvius.attention.fused.hopper import _pursuit as hopper_pursuit
from vitruvius.attention.fused.hopper import _pursuit_back as hopper_back

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
WORDS = ("HGMMA", "HMMA", "MUFU.EX2", "LDL")  # Hopper's products, older ones, exponentials, loads of spilled registers
B, H, N, D = 2, 3, 197, 64


class Absent:
    """A driver that knows only which GPU is meant."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int = 0) -> int:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[N])
    parser.add_argument("--width", type=int, default=D)
    parser.add_argument("--capability", type=int, default=90, help="90: Hopper, 80: Ampere")
    parser.add_argument("--sparsity", type=float, default=1.0, help="of rpc on Hopper; inf: nothing is clipped")
    parser.add_argument("--only", default="", help="kernels whose names begin so")
    options = parser.parse_args()
    driver.set_active(Absent(options.capability))
    for tokens in options.tokens:
        made = kernels(tokens, options.width)
        if options.capability >= 90:
            made |= hopper_kernels(tokens, options.width, options.sparsity)
        made = {name: kernel for name, kernel in made.items() if name.startswith(options.only)}
        print(f"bf16, {tokens} tokens, width {options.width}, sm_{options.capability}, Triton {triton.__version__}")
        print(f"{'':24s}registers  spilled bytes  shared bytes  " + "  ".join(f"{word:>9s}" for word in WORDS))
        for name, (kernel, arguments, settings) in made.items():
            print(f"{name:24s}{describe(kernel.warmup(*arguments, grid=(1,), **settings))}", flush=True)


def kernels(N: int, D: int) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Kernels with arguments of the right kinds; their numbers do not matter."""
    k = torch.zeros(B, N, 3, H, D, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)[1]
    x, f, bytes_ = torch.zeros(B, H, N, D).bfloat16(), torch.zeros(8), torch.zeros(8, dtype=torch.int8)
    whole, tiled, back = (rpc._Run.of(None, k, k, None, 1.0, -1, t) for t in (rpc.FORWARD, rpc.TILED, rpc.BACKWARD))
    numbers: tuple[Any, ...] = (x.numel(), B * H, 4)
    return {
        "rpc, a head at once": (
            _pursuit_whole.pursue,
            (k, k, k, k, x, x, f, f, x, f, integers(), *whole.strides, *numbers, 1.0, 0.125),
            {**whole.settings, "INVERSE": True, "REST": rpc.rows_over(N, whole.settings["ROWS"]), "ANCHORED": True,
             "CHUNKS": N // whole.settings["KEYS"], "EVERY": 1 << (N - 1).bit_length(), "SOME": False},
        ),
        "rpc, one iteration": (
            _pursuit.iterate, (k, k, k, k, x, x, f, f, x, x, *tiled.strides, *numbers, 3, 0.125), tiled.settings
        ),
        "rpc, one iteration back": (
            _pursuit_back.iterate_back,
            (k, k, k, x, x, f, f, x, bytes_, x, f, x, f, x, x, x, x, *back.strides[:3], *back.strides[6:], *numbers, 3,
             0.125),
            back.settings,
        ),
        "mask": (
            _sparse.look,
            (k, k, k, x, f, *[integers()] * 4, *k.stride()[:3] * 3, 4, 0.125),
            masked._settings(k, k, masked.FORWARD),
        ),
        "mask, back": (
            _sparse.look_back,
            (k, k, k, x, f, x, x, x, x, *[integers()] * 8, *k.stride()[:3] * 4, 4, 4, 0.125),
            masked._settings(k, k, masked.BACKWARD),
        ),
    }  # fmt: skip


def hopper_kernels(N: int, D: int, sparsity: float) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The same for those that only Hopper GPUs run, as they are launched."""
    k = torch.zeros(B, N, 3, H, D, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)[1]
    x, f = torch.zeros(B, N, H, D).bfloat16().transpose(1, 2), torch.zeros(8)
    rule = (4, sparsity, True, -1, 0.125)
    made: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
    with mock.patch.object(hopper_pursuit, "pursue", Catcher(hopper_pursuit.pursue, "Hopper: rpc", made)):
        _calls.pursue(k, k, x, x, f, f, integers(), *rule)
    back = Catcher(hopper_back.pursue_back, "Hopper: rpc back", made)
    with mock.patch.object(hopper_back, "pursue_back", back):
        _calls.pursue_back(x, k, k, x, x, f, f, integers(), x, x, *rule)
    if N in _mask_plan.SIZES and D == masked.WIDTH:
        plan = _mask_plan.make_plan(torch.ones(H, N, N, dtype=torch.bool))
        with mock.patch.object(_mask, "look", Catcher(_mask.look, "Hopper: mask", made)):
            masked._look_on_hopper(k, k, k, x, f, [x] * masked.LISTS + [*plan], 0.125)
    return made


class Catcher:
    """Notes with what a kernel would be launched."""

    def __init__(self, kernel: Any, name: str, notes: dict[str, Any]) -> None:
        self.kernel, self.name, self.notes = kernel, name, notes

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **settings: self.notes.__setitem__(self.name, (self.kernel, arguments, settings))


def integers() -> Tensor:
    return torch.zeros(8, dtype=torch.int32)


def describe(compiled: Any) -> str:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        usage, code = (
            subprocess.run([TOOL, option, file], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    counts = "  ".join(f"{code.count(word):9d}" for word in WORDS)
    return f"{registers:9d}  {stack:13d}  {compiled.metadata.shared:12d}  {counts}"


if __name__ == "__main__":
    main()
