"""The few PTX instructions of the kernels' inline assembly, on NumPy arrays.

Triton's interpreter runs no inline assembly, so without a GPU this is what runs it.
"""

import re

import numpy as np

_ONES = np.uint32(0xFFFFFFFF)


def _prmt(a, b, selector):
    """Byte i of the result is the byte of b:a that the selector's nibble i names, or its sign."""
    source = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(source)
    for i in range(4):
        nibble = int(selector.flat[0]) >> 4 * i & 15
        byte = source >> np.uint64(8 * (nibble & 7)) & np.uint64(255)
        if nibble & 8:
            byte = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= byte << np.uint64(8 * i)
    return result.astype(np.uint32)


def _lop3(a, b, c, table):
    result = np.zeros_like(a)
    for i in range(8):
        if int(table.flat[0]) >> i & 1:
            term = a if i & 4 else a ^ _ONES
            term = term & (b if i & 2 else b ^ _ONES)
            result |= term & (c if i & 1 else c ^ _ONES)
    return result


def _dp4a(a, b, c):
    parts = [word.view(np.int8).reshape(*word.shape, 4).astype(np.int32) for word in (a, b)]
    return ((parts[0] * parts[1]).sum(-1, dtype=np.int32) + c.view(np.int32)).view(np.uint32)


def _rounded(exact, down):
    """fp64 to fp32, to nearest or down; the sums here are exact in fp64."""
    nearest = exact.astype(np.float32)
    if down:
        below = np.nextafter(nearest, np.float32(-np.inf))
        nearest = np.where(nearest.astype(np.float64) > exact, below, nearest)
    return nearest.view(np.uint32)


def _float(word):
    return word.view(np.float32).astype(np.float64)


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "dp4a.s32.s32": _dp4a,
    "fma.rn.f32": lambda a, b, c: _rounded(_float(a) * _float(b) + _float(c), down=False),
    "add.rn.f32": lambda a, b: _rounded(_float(a) + _float(b), down=False),
    "add.rm.f32": lambda a, b: _rounded(_float(a) + _float(b), down=True),
}


def run(asm, outputs, *inputs):
    """The output registers, uint32 arrays of the inputs' shape.

    Args:
        asm: a body as `inline_asm_elementwise` takes it: operands are $0, $1, …, outputs first.
        outputs: how many there are.
        inputs: arrays of four bytes an element, of one shape.
    """
    shape = inputs[0].shape
    known = {f"${outputs + i}": x.view(np.uint32) for i, x in enumerate(inputs)}

    def value(name):
        if name in known:
            return known[name]
        number = int(name.replace("0f", "0x", 1) if name.startswith("0f") else name, 0)
        return np.full(shape, number & 0xFFFFFFFF, np.uint32)

    for line in re.split(r"[;{}]", re.sub(r"<\d+>", "", asm)):
        name, _, operands = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        known[target] = _OPERATIONS[name](*map(value, sources))
    return [known[f"${i}"] for i in range(outputs)]
