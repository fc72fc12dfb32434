"""Gluon, as far as our kernels use it, on the CPU: tensors are torch's, layouts are ignored, programs run in turn.

Import this before any kernel, in a process of its own: it stands in for Triton's module. What is checked this way are
formulas, indices and the renaming of columns, not layouts, fences and races. Shared memory begins as NaN, and what a
masked copy leaves out stays so.
"""

import builtins
import sys
from types import ModuleType, SimpleNamespace

import torch

_grid = {"program": 0, "programs": 1, "warps": 4}


class Pointer:
    """Entries of one memory, by number."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, torch.as_tensor(offset)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, tensor):
        """To the first entry of a tensor, whatever its strides."""
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))
        return cls(whole, tensor.storage_offset())

    def __add__(self, other):
        return Pointer(self.memory, self.offset + other)


class Shared:
    """Shared memory. It begins as NaN."""

    def __init__(self, entries):
        self.entries, self.shape, self.dtype = entries, entries.shape, entries.dtype

    def store(self, x):
        assert x.dtype == self.dtype, f"{x.dtype} stored in {self.dtype}"
        assert x.shape == self.shape, f"{x.shape} stored in {self.shape}"
        self.entries.copy_(x)

    def load(self, layout):
        return self.entries.clone()

    def index(self, place):
        return Shared(self.entries[int(place)])

    def slice(self, start, length, dim=0):
        assert start + length <= self.shape[dim], "a slice beyond the memory"
        return Shared(self.entries.narrow(dim, int(start), length))

    def permute(self, order):
        return Shared(self.entries.permute(order))

    def reinterpret(self, dtype, shape, layout):
        return Shared(self.entries.view(shape))


def load(pointer, mask=None, other=None):
    if mask is None:
        return pointer.memory[pointer.offset.long()]
    offset, mask = torch.broadcast_tensors(pointer.offset, torch.as_tensor(mask))
    found = pointer.memory[torch.where(mask, offset, 0).long()]
    return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))


def store(pointer, value, mask=None):
    value = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else pointer.memory.dtype)
    assert value.dtype == pointer.memory.dtype, f"{value.dtype} stored in {pointer.memory.dtype}"
    mask = torch.tensor(True) if mask is None else mask
    offset, value, mask = torch.broadcast_tensors(pointer.offset, value, mask)
    pointer.memory[offset[mask].long()] = value[mask]


def copy(target, pointer, mask=torch.tensor(True)):  # noqa: B008
    found = load(pointer, mask, 0.0)
    target.entries.copy_(torch.where(mask, found, target.entries))


def entries_of(x):
    return x.entries if isinstance(x, Shared) else x


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    product = entries_of(a).float() @ entries_of(b).float()
    assert product.shape == acc.shape
    return product + acc if use_acc else product


def warpgroup_mma_wait(outstanding=0, deps=()):
    return deps[0] if len(deps) == 1 else tuple(deps)


def both(function):
    """A function of two numbers or tensors."""
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def where(condition, a, b):
    numbers = [x for x in (a, b) if isinstance(x, torch.Tensor)]
    a, b = (x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=numbers[0].dtype) for x in (a, b))
    return torch.where(torch.as_tensor(condition), a, b)


def jit(function=None, **_):
    return function if function else lambda given: given


def layout(*_, **__):
    return None


def counting(*limits):
    """`range` whose numbers are tensors, as they are in a kernel."""
    return (torch.tensor(i) for i in builtins.range(*(int(limit) for limit in limits)))


def launch(kernel, programs, arguments, *, num_warps, enable_fp_fusion=True, maxnreg=None, **settings):
    """Run all programs of a kernel; tensors become pointers."""
    sys.modules[kernel.__module__].range = counting
    given = [Pointer.to(x) if isinstance(x, torch.Tensor) else x for x in arguments]
    given = [torch.tensor(x) if isinstance(x, int) else x for x in given]
    for program in builtins.range(programs):
        _grid.update(program=program, programs=programs, warps=num_warps)
        kernel(*given, **settings)


def _module(name, **contents):
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(contents)
    return module


_layouts = (
    "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
    "SliceLayout", "SwizzledSharedLayout",
)  # fmt: skip
_name = "triton.experimental.gluon"
_language = _module(
    f"{_name}.language",
    **dict.fromkeys(_layouts, layout),
    constexpr=object, shared_memory_descriptor=Shared, static_range=builtins.range, load=load, store=store, where=where,
    barrier=lambda: None, int8=torch.int8, int32=torch.int32, int64=torch.int64, float32=torch.float32,
    num_warps=lambda: _grid["warps"], program_id=lambda _: torch.tensor(_grid["program"]),
    num_programs=lambda _: torch.tensor(_grid["programs"]),
    arange=lambda start, end, _=None: torch.arange(start, end),
    zeros=lambda shape, dtype, _=None: torch.zeros(*shape, dtype=dtype),
    full=lambda shape, value, dtype, _=None: torch.full(shape, value, dtype=dtype),
    allocate_shared_memory=lambda dtype, shape, _: Shared(torch.full(tuple(shape), float("nan"), dtype=dtype)),
    convert_layout=lambda x, _: x, sum=lambda x, axis: x.sum(axis),
    max=lambda x, axis: x.nan_to_num(-torch.inf).amax(axis), abs=torch.abs, exp2=torch.exp2, log2=torch.log2,
    sqrt=torch.sqrt, maximum=both(torch.fmax),
    minimum=both(torch.fmin), inline_asm_elementwise=lambda *_: 0,
)  # fmt: skip
_copies = SimpleNamespace(async_load=copy, commit_group=lambda: None, wait_group=lambda _: None)
_module(_name, jit=jit, constexpr_function=jit, language=_language)
_module(
    f"{_name}.language.nvidia.hopper",
    async_copy=_copies, fence_async_shared=lambda: None, warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait,
)  # fmt: skip
