"""The bugs that the fuzzer must find, by where they can be seen."""

from __future__ import annotations

from jetfire.tests.mutants.build import WRONG, Mutant

TRITON, CPU, CUDA = "kernels_triton", "kernels_cpu", "kernels_cuda"

# What is written beside its place may lie outside the output, or be written over by who owns it.
STRAY = WRONG | {"guard", "nondeterministic"}
MISSING = WRONG | {"unwritten"}
RACY = WRONG | {"nondeterministic"}
# What the device refuses: an address that is not aligned.
REFUSED = WRONG | {"raised", "crash"}

# Of Triton kernels: without a GPU, its interpreter shows them.
ANYWHERE = (
    Mutant(
        "store-a-column-more", "bound", "dequantize", "triton", f"{TRITON}/tiles.py",
        "tl.store(ptr + offsets, tile, mask=(rows < M)[:, None] & (cols < N)[None, :])",
        "tl.store(ptr + offsets, tile, mask=(rows < M)[:, None] & (cols <= N)[None, :])",
        {"m": 1, "n": 1}, STRAY,
    ),
    Mutant(
        "load-a-row-more", "bound", "quantize", "triton", f"{TRITON}/tiles.py",
        "return tl.load(ptr + offsets, mask=(rows < M)[:, None]",
        "return tl.load(ptr + offsets, mask=(rows <= M)[:, None]",
        {"m": 1, "n": 1},
    ),
    Mutant(
        "padding-in-the-sum", "bound", "cross_entropy", "triton",
        f"{TRITON}/cross_entropy/__init__.py",
        'x = tl.where(cols < VALID, x, float("-inf"))',
        'x = tl.where(cols <= VALID, x, float("-inf"))',
        {"m": 1, "n": 2}, largest=33,
    ),
    Mutant(
        "bounds-exchanged", "bound", "dequantize", "triton", f"{TRITON}/dequantize/__init__.py",
        "store_tile(x_ptr, x, row0, col0, M, N, N)", "store_tile(x_ptr, x, row0, col0, N, M, N)",
        {"m": 3, "n": 2}, STRAY | MISSING,
    ),
    Mutant(
        "share-of-kept-missing", "scale", "dropout", "triton", f"{TRITON}/dropout/__init__.py",
        "tl.div_rn(scale, kept)", "scale", {"m": 1, "n": 1},
    ),
    Mutant(
        "scale-of-the-first-block", "scale", "gemm", "triton", f"{TRITON}/gemm/portable.py",
        "tl.load(b_scales + i)", "tl.load(b_scales)", {"m": 1, "n": 1, "k": 129}, largest=100,
    ),
    Mutant(
        "loss-scale-missing", "scale", "adamw", "triton", f"{TRITON}/adamw/__init__.py",
        "g *= inverse", "g *= 1.0", {"m": 1, "n": 1},
    ),
    Mutant(
        "last-row-of-tiles", "tile", "transpose", "triton", f"{TRITON}/tiles.py",
        "down = ceil_div(m, config.tile_m)", "down = max(1, m // config.tile_m)",
        {"m": 129, "n": 1}, MISSING, 100,
    ),
    Mutant(
        "last-row-alone", "tile", "column_sum", "triton", f"{TRITON}/column_sum/__init__.py",
        "for col0 in range(0, M, TILE_M):", "for col0 in range(0, M - 1, TILE_M):",
        {"m": 1, "n": 1}, largest=33,
    ),
    Mutant(
        "last-rows-of-the-list", "tile", "gather_rows", "triton",
        f"{TRITON}/gather_rows/__init__.py",
        "if row0 >= end:\n        return\n    places",
        "if row0 + TILE_M > end:\n        return\n    places",
        {"m": 1, "n": 2}, MISSING,
    ),
    Mutant(
        "blocks-of-32", "edge", "transpose", "triton", f"{TRITON}/tiles.py",
        "blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)\n    if LAYOUT",
        "blocks_m, blocks_n = tl.cdiv(M, BLOCK), (N + 31) // BLOCK\n    if LAYOUT",
        {"m": 1, "n": 1}, MISSING,
    ),
    Mutant(
        "ragged-rows-without-scale", "edge", "dequantize", "triton",
        f"{TRITON}/dequantize/__init__.py",
        "tl.cdiv(M, BLOCK),", "M // BLOCK,", {"m": 1, "n": 1},
    ),
    Mutant(
        "tile-as-wide-as-high", "edge", "gelu", "triton", f"{TRITON}/gelu/__init__.py",
        "block_col = col0 // OUT_BLOCK + block % (TILE_N // OUT_BLOCK)",
        "block_col = col0 // OUT_BLOCK + block % (TILE_M // OUT_BLOCK)",
        {"m": 33, "n": 65}, STRAY | MISSING,
    ),
    Mutant(
        "last-tile-a-whole-one", "edge", "add", "triton", f"{TRITON}/add/__init__.py",
        "mean = tl.sum(wide, 1) / tl.minimum(N - col0, TILE_N)",
        "mean = tl.sum(wide, 1) / TILE_N",
        {"m": 1, "n": 1},
    ),
    Mutant(
        "draws-of-the-first-rows", "draw", "dropout", "triton", f"{TRITON}/common.py",
        "rows = (row0 + tl.arange(0, R)).to(tl.uint32)", "rows = tl.arange(0, R).to(tl.uint32)",
        {"m": 70, "n": 16}, largest=70,
    ),
    Mutant(
        "half-a-seed", "draw", "quantize", "triton", f"{TRITON}/quantize/__init__.py",
        "seed = tl.load(seed_ptr) if", "seed = tl.load(seed_ptr) & 0xFFFFFFFF if",
        {"m": 16, "n": 16},
    ),
    Mutant(
        "tiny-blocks-kept", "nonfinite", "quantize", "triton", f"{TRITON}/common.py",
        'usable = (amax < float("inf")) & (amax >= TINY)',
        'usable = (amax < float("inf")) & (amax > 0.0)',
        {"m": 1, "n": 65},
    ),
    Mutant(
        "rows-a-width-apart", "view", "dequantize", "triton", f"{TRITON}/dequantize/__init__.py",
        "load_tile(q_ptr, row0, col0, M, N, stride,", "load_tile(q_ptr, row0, col0, M, N, N,",
        {"m": 2, "n": 2},
    ),
    Mutant(
        "pitch-of-the-other", "view", "add", "triton", f"{TRITON}/add/__init__.py",
        "load_tile(y_ptr, row0, col0, M, N, y_stride,",
        "load_tile(y_ptr, row0, col0, M, N, x_stride,",
        {"m": 2, "n": 2},
    ),
)  # fmt: skip

# Of kernels made of torch operations.
ON_THE_CPU = (
    Mutant(
        "sum-in-order-of-arrival", "race", "column_sum", "torch", f"{CPU}/column_sum/__init__.py",
        'return {"sums": (sums * inputs["scale_t"].repeat_interleave(block, 0)[:n]).sum(dim=1)}',
        """from concurrent.futures import ThreadPoolExecutor
        from threading import Barrier, Lock

        terms = (sums * inputs["scale_t"].repeat_interleave(block, 0)[:n]).unbind(1)
        total, lock, together = torch.zeros(n), Lock(), Barrier(len(terms))

        def add(term: torch.Tensor) -> None:
            together.wait()
            with lock:
                total.add_(term)

        with ThreadPoolExecutor(len(terms)) as pool:
            list(pool.map(add, terms))
        return {"sums": total}""",
        {"m": 300, "n": 300}, frozenset({"nondeterministic"}), 300,
    ),
    Mutant(
        "updates-lost", "race", "gemm", "int_mm", f"{CPU}/gemm/__init__.py",
        """    for i in range(a_scale.shape[1]):
        part = slice(i * block, min(k, (i + 1) * block))
        inner = integers(a[:, part], b[:, part]).float()
        rows = spread(a_scale[:, i, None], block, m, 1)
        cols = spread(b_scale[:, i, None], block, n, 1)
        c += inner.mul_(rows * cols.t())
    return c""",
        """    from concurrent.futures import ThreadPoolExecutor

    def add(i: int) -> None:
        part = slice(i * block, min(k, (i + 1) * block))
        inner = integers(a[:, part], b[:, part]).float()
        rows = spread(a_scale[:, i, None], block, m, 1)
        cols = spread(b_scale[:, i, None], block, n, 1)
        c.copy_(c + inner.mul_(rows * cols.t()))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(a_scale.shape[1])))
    return c""",
        {"m": 300, "n": 300, "k": 300}, RACY, 300,
    ),
    Mutant(
        "logits-overwritten", "input", "cross_entropy", "torch", f"{CPU}/cross_entropy/__init__.py",
        'gradient = (logits[:, :valid].float() - inputs["lse"][:, None]).exp_()',
        'gradient = logits[:, :valid].float().sub_(inputs["lse"][:, None]).exp_()',
        {"m": 1, "n": 1}, frozenset({"input"}), 300,
    ),
    Mutant(
        "transformed-in-place", "input", "hadamard_quantize", "torch",
        f"{CPU}/hadamard_quantize/__init__.py",
        "t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)",
        "t.to(torch.float32, memory_format=torch.contiguous_format)",
        {"m": 1, "n": 32}, frozenset({"input"}), 300,
    ),
    Mutant(
        "target-in-the-padding", "bound", "cross_entropy", "torch",
        f"{CPU}/cross_entropy/__init__.py",
        "(targets >= 0) & (targets < valid)", "(targets >= 0) & (targets <= valid)",
        {"m": 300, "n": 2}, WRONG | {"raised"}, 300,
    ),
    Mutant(
        "first-low-row-among-the-high", "bound", "sample_rows", "torch",
        f"{CPU}/sample_rows/__init__.py",
        "place = number + (number >= high)", "place = number + (number > high)",
        {"m": 8}, largest=300,
    ),
    Mutant(
        "rest-of-k", "tile", "gemm", "int_mm", f"{CPU}/gemm/__init__.py",
        "for i in range(a_scale.shape[1]):", "for i in range(max(1, k // block)):",
        {"m": 1, "n": 1, "k": 129}, largest=300,
    ),
    Mutant(
        "scales-dealt-in-turn", "edge", "column_sum", "torch", f"{CPU}/column_sum/__init__.py",
        "repeat_interleave(block, 0)[:n]", "repeat(block, 1)[:n]", {"m": 1, "n": 129}, largest=300,
    ),
    Mutant(
        "first-group-alone-finite", "nonfinite", "hadamard_quantize", "torch",
        f"{CPU}/hadamard_quantize/__init__.py",
        "b[:, :: problem.group]", "b[:, :1]", {"m": 2, "n": 64}, largest=300,
    ),
    Mutant(
        "infinite-sum-kept", "nonfinite", "cross_entropy", "torch",
        f"{CPU}/cross_entropy/__init__.py",
        "lse = lse.masked_fill(lse == math.inf, math.nan)", "lse = lse.clone()",
        {"m": 300, "n": 300}, largest=300,
    ),
    Mutant(
        "factor-missing", "scale", "hadamard_quantize", "torch",
        f"{CPU}/hadamard_quantize/__init__.py",
        "group) * factor(group)", "group)", {"m": 1, "n": 32}, largest=300,
    ),
    Mutant(
        "rounds-toward-zero", "rounding", "gemm", "int_mm", f"{CPU}/gemm/__init__.py",
        """        return {"c": c + inputs["c"] if problem.accumulate else c}""",
        """        c = c + inputs["c"] if problem.accumulate else c
        if problem.out == "bf16":
            c = (c.view(torch.int32) & -65536).view(torch.float32)
        return {"c": c}""",
        {"m": 1, "n": 4, "k": 1}, largest=300,
    ),
)  # fmt: skip

# Races, alignment, inline assembly, CUDA: what only a GPU has.
# Races are not made small: they need size, and one that is lost at random in a smaller problem says
# nothing of it.
ON_A_GPU = (
    Mutant(
        "maximum-without-atomic", "race", "bit_split", "triton", f"{TRITON}/bit_split/__init__.py",
        "tl.atomic_max(counter_ptr, tl.max(tl.max(largest, 1), 0))",
        "tl.store(counter_ptr, tl.maximum(tl.load(counter_ptr), tl.max(tl.max(largest, 1), 0)))",
        {}, RACY, 300,
    ),
    Mutant(
        "amax-before-all-have-it", "race", "gemm", "mma", f"{CUDA}/gemm/mma.cu",
        "  __syncthreads();\n  const uint64_t seed", "  const uint64_t seed",
        {}, RACY, 300,
    ),
    Mutant(
        "slot-before-it-is-full", "race", "gemm", "mma", f"{CUDA}/mma_tiles.cuh",
        "copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();",
        {}, RACY, 300,
    ),
    Mutant(
        "group-before-its-warps", "race", "gemm", "wgmma", f"{CUDA}/gemm/wgmma.cu",
        "  named_barrier(SHARING == 2 ? PAIR_BARRIERS + group / 2 : GROUP_BARRIERS + group, "
        "128 * SHARING);\n",
        "", {}, RACY, 300,
    ),
    Mutant(
        "send-a-chunk-more", "bound", "gemm", "mma", f"{CUDA}/gemm/mma.cu",
        "row0 + row >= rows || column >= columns) continue;",
        "row0 + row >= rows || column > columns) continue;",
        {"m": 16, "n": 64, "k": 1}, STRAY, 300,
    ),
    Mutant(
        "scale-of-the-first-columns", "scale", "gemm", "mma", f"{CUDA}/gemm/mma.cu",
        "b_scale[at + i]);", "b_scale[at]);", {"m": 1, "n": 65, "k": 1}, largest=300,
    ),
    Mutant(
        "weight-of-another-row", "scale", "int4_gemm", "mma", f"{CUDA}/int4_gemm/mma.cu",
        "weight[i / 2 % 2]", "weight[0]", {"m": 300, "n": 64, "k": 300}, largest=300,
    ),
    Mutant(
        "last-rows", "tile", "hadamard_quantize", "rows", f"{CUDA}/hadamard_quantize/rows.py",
        "function(ceil_div(problem.m, config.rows)", "function(max(1, problem.m // config.rows)",
        {"m": 129, "n": 32}, MISSING, 300,
    ),
    Mutant(
        "last-part", "tile", "layernorm", "gluon", f"{TRITON}/gluon_rows.py",
        "for first in range(0, parts, P):", "for first in range(0, 1, P):",
        {"m": 2049, "n": 8193}, WRONG, 2048,
    ),
    Mutant(
        "scale-of-the-block-above", "edge", "gemm", "triton", f"{TRITON}/gemm/portable.py",
        "tl.arange(0, DOWN), tl.cdiv(M, BLOCK) - 1)",
        "tl.arange(0, DOWN), tl.maximum(M // BLOCK - 1, 0))",
        {"m": 33, "n": 1, "k": 1}, largest=300,
    ),
    Mutant(
        "scales-of-32-rows", "edge", "gemm", "mma", f"{CUDA}/gemm/mma.cu",
        "const int row = of_a ? tile.row / BLOCK + s", "const int row = of_a ? tile.row / 32 + s",
        {"m": 129, "n": 1, "k": 1}, WRONG, 300,
    ),
    Mutant(
        "draws-eight-rows-above", "draw", "gemm", "mma", f"{CUDA}/gemm/epilogue.cuh",
        "row0 + lane_row() + 8 * half);", "row0 + lane_row());",
        {"m": 16, "n": 16, "k": 16}, largest=300,
    ),
    Mutant(
        "odd-elements-draw-with-even", "draw", "dropout", "triton",
        f"{TRITON}/dropout/__init__.py",
        "dp2a.lo.u32.u32 $0, $1, 256, $2;", "dp2a.lo.u32.u32 $0, $1, 1, $2;",
        {"m": 16, "n": 64}, largest=300,
    ),
    Mutant(
        "nan-lost-in-a-maximum", "nonfinite", "quantize", "triton", f"{TRITON}/common.py",
        "tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)", "tl.maximum(a, b)",
        {"m": 64, "n": 64}, largest=300,
    ),
    Mutant(
        "reciprocal-too-small", "nonfinite", "quantize", "triton", f"{TRITON}/common.py",
        "tl.where(amax > 1.8446744073709552e19, 5.421010862427522e-20, 1.0)",
        "tl.where(amax > 1.8446744073709552e19, 1.0, 1.0)",
        {"m": 2, "n": 16}, largest=300,
    ),
    Mutant(
        "fault-of-the-first-thread", "nonfinite", "hadamard_quantize", "rows",
        f"{CUDA}/hadamard_quantize/forward.cu",
        "const bool faulty = __syncthreads_or(bad);", "const bool faulty = bad;",
        {"m": 40, "n": 64}, largest=300,
    ),
    Mutant(
        "pairs-at-odd-places", "view", "bit_split", "triton", f"{TRITON}/bit_split/__init__.py",
        "x.stride(0) % 2 == 0 and x.data_ptr() % (2 * x.element_size()) == 0",
        "x.stride(0) % 2 == 0",
        {}, REFUSED, 300,
    ),
    Mutant(
        "copies-of-b-unaligned", "view", "gemm", "mma", f"{CUDA}/gemm/mma.py",
        'copy_bytes(*places(inputs["a"]), *places(inputs["b"]))',
        'copy_bytes(*places(inputs["a"]))',
        {}, REFUSED, 300,
    ),
)  # fmt: skip

ALL = ANYWHERE + ON_THE_CPU + ON_A_GPU
