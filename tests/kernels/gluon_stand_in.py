"""Gluon kernels for SM90 on a CPU, one program after the other: Triton has no interpreter for them.

What is checked on the way: that a barrier is waited for in the phase that it is in, and that as many bytes arrive as
were expected; that a product which has not been waited for finds its operand unchanged when it is computed, as late as
may be; and the assembly, which is executed instruction by instruction. What is not: layouts, threads, and the
barriers between them, which are the compiler's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

Numbers = Any  # a tensor, or a Python number


class StandIn:
    """In place of a kernel: ``kernel[grid](*arguments)`` runs it on the arguments' memory."""

    def __init__(self, kernel: Any) -> None:
        self.function = _rebind(kernel.fn, {})

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            given = [_argument(one) for one in arguments]
            for program in product(*map(range, grid)):
                language.program = program
                self.function(*given, **options)

        return launch


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value.view(-1), torch.tensor(0))
    return Block(value.base, value.block_shape) if hasattr(value, "block_shape") else value


def _rebind(function: Any, done: dict[str, Any]) -> Any:
    """The function with Gluon's names, and those of kernels that it calls, replaced by ours."""
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        value = names.get(name)
        if name in _REPLACED:
            names[name] = _REPLACED[name]
        elif value is not None and hasattr(value, "is_gluon"):
            key = f"{value.fn.__module__}.{name}"
            if key not in done:
                done[key] = _rebind(value.fn, done)
            names[name] = done[key]
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


@dataclass(frozen=True)
class Pointer:
    """Elements of flat memory."""

    memory: torch.Tensor
    place: torch.Tensor

    def __add__(self, offset: Numbers) -> Pointer:
        return Pointer(self.memory, self.place + offset)


@dataclass(frozen=True)
class Block:
    """What a descriptor describes."""

    memory: torch.Tensor
    shape: list[int]
    layout: None = None

    @property
    def block_type(self) -> Any:
        rows, columns = self.shape
        return SimpleNamespace(nbytes=rows * columns * self.memory.itemsize)

    def read(self, place: list[int]) -> torch.Tensor:
        """The block from ``place`` on; zeros past the end."""
        out = torch.zeros(self.shape, dtype=self.memory.dtype)
        row, column = (int(start) for start in place)
        part = self.memory[row : row + self.shape[0], column : column + self.shape[1]]
        out[: part.shape[0], : part.shape[1]] = part
        return out


@dataclass
class Barrier:
    """Completed phases, and bytes that the phase which is on still waits for."""

    phases: int = 0
    missing: int = 0


@dataclass(frozen=True)
class Shared:
    """A part of the shared memory; the memory itself, not a copy."""

    memory: Any

    def index(self, place: Numbers) -> Any:
        part = self.memory[int(place)]
        return part if isinstance(part, Barrier) else Shared(part)

    def load(self, layout: Any) -> torch.Tensor:
        return self.memory.clone()

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.memory.narrow(dim, start, length))


@dataclass
class Sums:
    """A sum and the products that are still on their way to it."""

    value: torch.Tensor
    products: list[tuple[torch.Tensor, Shared]] = field(default_factory=list)

    def wait(self, left_over: int) -> None:
        while len(self.products) > left_over:
            left, right = self.products.pop(0)
            # Rounded once, as in Triton's interpreter: numpy's order of sums depends on where a row stands.
            self.value = (self.value.double() + left.double() @ right.memory.double()).float()

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        assert not self.products, "a sum is read that was not waited for"
        return self.value.to(dtype)


class _Language(SimpleNamespace):
    """``triton.experimental.gluon.language``; what is not ours is its own."""

    program: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        from triton.experimental.gluon import language

        return getattr(language, name)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
    if mask is None:
        return pointer.memory[pointer.place]
    place = pointer.place.where(mask, torch.tensor(0))
    return pointer.memory[place].where(mask, torch.tensor(other))


def _store(pointer: Pointer, value: torch.Tensor, mask: Any = True) -> None:
    mask = torch.as_tensor(mask).expand(pointer.place.shape)
    pointer.memory[pointer.place[mask]] = value[mask].to(pointer.memory.dtype)


def _shared(dtype: Any, shape: list[int], layout: Any) -> Shared:
    if dtype == torch.int64:
        return Shared([Barrier() for _ in range(shape[0])])
    memory = torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype)
    return Shared(memory)


def _where(condition: Any, a: Numbers, b: Numbers) -> Numbers:
    return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else a if condition else b


def _minimum(a: Numbers, b: Numbers) -> Numbers:
    return min(a, b) if not isinstance(a, torch.Tensor) else a.clamp(max=b)


def _expect(barrier: Barrier, size: int, pred: Numbers = True) -> None:
    if pred:
        assert not barrier.missing, "bytes are expected twice"
        barrier.missing = size


def _wait(barrier: Barrier, phase: int) -> None:
    assert not barrier.missing and barrier.phases % 2 != phase, "nothing will arrive: the kernel would hang"


def load_block(block: Block, place: list[int], barrier: Barrier, to: Shared, pred: Numbers = True) -> None:
    if pred:
        part = block.read(place)
        assert barrier.missing >= part.nbytes, "more bytes arrive than were expected"
        to.memory.copy_(part)
        barrier.missing -= part.nbytes
        barrier.phases += not barrier.missing


def _multiply(left: torch.Tensor, right: Shared, sums: Sums, is_async: bool) -> Sums:
    return Sums(sums.value, [*sums.products, (left, right)])


def _wait_for_products(left_over: int, deps: list[Sums]) -> Sums:
    deps[0].wait(left_over)
    return deps[0]


# ---- assembly ----


def _bfloat16(halves: torch.Tensor) -> torch.Tensor:
    return (halves << 16).to(torch.int32).view(torch.float32)


def _multiply_pairs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(a)
    for shift in (0, 16):
        x, y = (_bfloat16(_signed(word >> shift & 0xFFFF)) for word in (a, b))
        exact = (x.double() * y.double()).to(torch.bfloat16)
        out |= (exact.view(torch.int16).long() & 0xFFFF) << shift
    return out


def _signed(half: torch.Tensor) -> torch.Tensor:
    return half - (half >> 15 << 16)


def _permute_bytes(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    both, out = a | b << 32, torch.zeros_like(a)
    for i in range(4):
        out |= (both >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i)
    return out


def _table(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    assert int(table) == 0xEA, "the table is not (a & b) | c"
    return a & b | c


_INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "lop3.b32": _table,
    "prmt.b32": _permute_bytes,
    "mul.rn.bf16x2": _multiply_pairs,
}


def assemble(
    text: str, constraints: str, given: list[torch.Tensor], dtype: Any, is_pure: bool, pack: int
) -> tuple[torch.Tensor, ...]:
    """What inline assembly makes of words, with one word of each operand at a time."""
    assert pack == 1 and set(dtype) == {torch.bfloat16}
    shape = torch.broadcast_shapes(*(words.shape for words in given))
    outputs = constraints.count("=")
    registers = {f"${outputs + i}": words.long() & 0xFFFFFFFF for i, words in enumerate(given)}

    def value(operand: str) -> torch.Tensor:
        return registers[operand] if operand in registers else torch.tensor(int(operand, 0))

    for line in re.findall(r"^\s*(\w[^;]*);", text, re.MULTILINE):
        name, _, rest = line.partition(" ")
        if name == "mov.b32":
            low, high, source = re.findall(r"[$\w]+", rest)
            registers[low], registers[high] = value(source) & 0xFFFF, value(source) >> 16
        else:
            target, *operands = (part.strip() for part in rest.split(","))
            registers[target] = _INSTRUCTIONS[name](*map(value, operands))
    results = [_bfloat16(_signed(registers[f"${i}"])) for i in range(outputs)]
    return tuple(result.expand(shape).bfloat16() for result in results)


# ---- what the names stand for ----

language = _Language(
    program_id=lambda axis: language.program[axis],
    arange=lambda start, end, layout=None: torch.arange(start, end),
    load=_load,
    store=_store,
    zeros=lambda shape, dtype, layout: Sums(torch.zeros(shape, dtype=dtype)),
    where=_where,
    minimum=_minimum,
    cdiv=lambda a, b: -(-a // b),
    static_range=range,
    join=lambda a, b: torch.stack([a, b], -1),
    reshape=lambda x, shape: x.reshape(shape),
    permute=lambda x, order: x.permute(order),
    split=lambda x: x.unbind(-1),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    allocate_shared_memory=_shared,
    inline_asm_elementwise=assemble,
    bfloat16=torch.bfloat16,
    float32=torch.float32,
    int32=torch.int32,
    int64=torch.int64,
)

_REPLACED: dict[str, Any] = {
    "gl": language,
    "mbarrier": SimpleNamespace(
        expect=_expect,
        wait=_wait,
        init=lambda barrier, count: None,
        MBarrierLayout=lambda: None,
    ),
    "load_block": load_block,
    "warpgroup_mma": _multiply,
    "warpgroup_mma_wait": _wait_for_products,
}
