"""Triton's interpreter without what it works out again at every operation.

A kernel computes what it did: what is left out is how the interpreter gets there. Of an interpreted
test's time the operations themselves are a tenth.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache, partial
from operator import index
from types import FunctionType
from typing import Any


def quicken() -> None:
    """Have Triton's interpreter remember its builtins, dtypes, block types and shapes."""
    _remember_builtins()
    _remember_dtypes()
    _remember_shapes()
    _know_operands()
    _skip_overflow_checks()


def _remember_builtins() -> None:
    """List the builtins of the language once, and replace them once per launch.

    The interpreter does both at every call of a jit function, also of one by another.
    """
    from triton import language as tl
    from triton.language.core import builtin, is_builtin
    from triton.runtime import interpreter

    builtins: dict[Any, list[tuple[str, Any, Any]]] = {}
    checks = builtin(lambda: None).__code__  # that it is called by a kernel, and nothing else

    def interpreted(member: Any) -> Any:
        plain = member.__wrapped__ if getattr(member, "__code__", None) is checks else member
        # A partial has no frame: errors name the kernel's line, which called it.
        return partial(plain, _semantic=interpreter.interpreter_semantic)

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            members = inspect.getmembers(package, is_builtin)
            builtins[package] = [(name, one, interpreted(one)) for name, one in members]
        for name, member, call in builtins[package]:
            if getattr(package, name) is not member:
                continue
            if inspect.isclass(package):  # whose methods are functions
                interpreter._patch_attr(package, name, member, builder, scope)
            else:
                scope.set_attr(package, name, call)

    @cache
    def languages(function: FunctionType) -> list[Any]:
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [value for value in seen if value in (tl, tl.core)]

    def patch_language(function: FunctionType) -> Any:
        if any(is_builtin(language.load) for language in languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    assert callable(interpreter._patch_builtin)
    interpreter._patch_builtin = patch_builtin
    patch, interpreter._patch_lang = interpreter._patch_lang, patch_language


def _remember_dtypes() -> None:
    """Keep NumPy's dtype of each of Triton's, for which the interpreter makes a table per call."""
    from triton.runtime import interpreter

    dtypes: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = find(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = get_np_dtype


def _remember_shapes() -> None:
    """Keep the fields of each block type, and the shape that its tensors have of constants."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(index, shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def broadcast(self: Any, first: Any, second: Any) -> Any:
        if first.shape is second.shape:
            return first, second
        return make_alike(self, first, second)

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    make_alike, TritonSemantic.broadcast_impl_value = TritonSemantic.broadcast_impl_value, broadcast


def _know_operands() -> None:
    """Take tensors of one type and shape as operands as they are, and make a constant's once.

    A dtype is found to be itself without a look at its name.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    halves = (core.float16, core.bfloat16)  # which are divided as float32
    constants: dict[tuple[Any, ...], Any] = {}

    def operands(self: Any, lhs: Any, rhs: Any, *kind: bool) -> tuple[Any, Any]:
        left, right = type(lhs) is core.tensor, type(rhs) is core.tensor
        if left and right:
            if lhs.shape is not rhs.shape or lhs.dtype is not rhs.dtype or lhs.dtype in halves:
                return convert(self, lhs, rhs, *kind)
            return convert(self, lhs, rhs, *kind) if lhs.dtype.is_ptr() else (lhs, rhs)
        if not left and not right:
            return convert(self, lhs, rhs, *kind)
        tensor, number = (lhs, rhs) if left else (rhs, lhs)
        # As text, in which −0 is not 0, and 1 is neither 1.0 nor True.
        key = repr(number), type(number), tensor.type.name, left, kind
        if key in constants:
            return (lhs, constants[key]) if left else (constants[key], rhs)
        pair = convert(self, lhs, rhs, *kind)
        same, constant = pair if left else pair[::-1]
        if same is tensor:
            constant.handle.data.flags.writeable = False
            constants[key] = constant
        return pair

    def cast(self: Any, input: Any, dtype: Any, *how: Any) -> Any:
        return input if input.dtype is dtype else change(self, input, dtype, *how)

    def equal(self: Any, other: Any) -> bool:
        return self is other or compare(self, other)

    def unwrap(x: Any) -> Any:
        return x if type(x) is core.tensor else take(x)

    semantic: Any = TritonSemantic
    convert, semantic.binary_op_type_checking_impl = semantic.binary_op_type_checking_impl, operands
    change, semantic.cast = semantic.cast, cast
    compare, core.dtype.__eq__ = core.dtype.__eq__, equal
    take, core._unwrap_if_constexpr = core._unwrap_if_constexpr, unwrap


def _skip_overflow_checks() -> None:
    """Leave out each integer operation's second computation, in 64 bits.

    It is for an assertion that a kernel makes only where it is debugged.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
