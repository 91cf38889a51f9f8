"""Work of an instruction of a compiled program: floating-point operations, bytes, and of which kernel class.

Counted from shapes alone. A fusion is what is inside: its products, gathers, scatters, sorts and reductions each by
themselves, and what it reads and writes beside them in one pass. Operations that only name what is there already cost
nothing; neither do the parts of a table that a gather, slice or update in place leaves alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from recjax.utils.hlo import Array, Computation, Instruction, Program

FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier add-dependency
    domain get-dimension-size
    """.split()
)
_MOVES = frozenset(
    """
    copy transpose concatenate slice pad broadcast reshape reverse iota dynamic-slice dynamic-update-slice copy-start
    bitcast-convert custom-call
    """.split()
)
_TRANSCENDENTAL = frozenset(
    "exponential exponential-minus-one log log-plus-one tanh logistic power sine cosine tan atan2 erf cbrt".split()
)
_SLICES = ("gather", "slice", "dynamic-slice")
_UPDATES = ("scatter", "dynamic-update-slice")
_WHOLE = ("dot", "sort", "reduce-window", "custom-call", "convolution", "fusion", "call")  # ask for all of an operand
_BY_SHARE = ("reduce", "concatenate", "pad", "gather")  # as much of an operand as of the result
# Calls of recjax-kernels: where among operands and results stand one of [B, ...] and one of [K, N].
DENSE_CALLS = {"recjax_dense_forward": (0, 1), "recjax_dense_into_input": (2, 0), "recjax_dense_into_kernel": (0, 3)}
_GPU_KERNEL = re.compile(r"/recjax_(\w+)/pallas_call")
_ROUNDED = re.compile(r"dot_tf32_tf32_f32(_x3)?\b", re.IGNORECASE)  # how a GPU multiplies float32, if it says so
_NARROW = ("bf16", "f16")
_STRIDE_BYTES = 1024  # from one row to the next, of which columns fall into few sets: on a CPU three times as slow
_VIEWS = ("bitcast", "reshape")  # which hand on what they are given
_INTERACTING = 64  # rows and columns of matrices that a model multiplies sample by sample are not all more
_SMALL = 8  # rows and columns of matrices; larger ones XLA multiplies itself
_LONG_BYTES = 512  # of a row of a lookup: longer ones are as many of these


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of a kernel.

    Attributes:
      kernel: its class, as the machine file names them, perhaps with a variant: "matmul.nn_f32".
      sizes: what the class is measured over, see `machine.SIZES`.
      flops: floating-point operations.
      bytes: that it reads and writes at least.
    """

    kernel: str
    sizes: Mapping[str, float]
    flops: float
    bytes: float


def works(instruction: Instruction, inside: Computation, program: Program) -> tuple[Work, ...]:
    """Works of an instruction; () if it costs nothing.

    Loops, calls, conditionals and collectives are not for here: see `recjax.planning.graph`.

    Args:
      instruction: the instruction.
      inside: the computation that it stands in.
      program: the program.
    """
    if instruction.opcode in FREE:
        return ()
    if instruction.opcode == "fusion":
        return _of_fusion(program.computations[instruction.called("calls")])
    operands = [inside.instructions[name] for name in instruction.operands]
    if heavy := _heavy(instruction, operands):
        return (_each(heavy),)
    reads: float = sum(o.bytes for o in operands)
    if instruction.opcode in _SLICES:
        reads = instruction.bytes
    if instruction.opcode in _UPDATES:
        reads = _update(instruction, operands)
        return (_streamed([instruction], 2 * reads, {}),)
    own = {instruction.name: float(instruction.arrays[0].size)}
    return (_streamed([instruction], reads + instruction.bytes, own), *_transcendental([instruction], own))


def _of_fusion(computation: Computation) -> tuple[Work, ...]:
    """Work of all that is inside a fusion."""
    members = computation.instructions
    needed = _needed(computation)
    found: list[Work] = []
    for instruction in members.values():
        if heavy := _heavy(instruction, [members[name] for name in instruction.operands]):
            if instruction.opcode == "gather":
                heavy = _part(heavy, needed[instruction.name] / max(1, instruction.arrays[0].size))
            found.append(heavy)
    if len(found) > 1 or _computes(members.values()):
        found = [_fused(work) for work in found]
    read = sum(needed[i.name] * i.arrays[0].item_bytes for i in members.values() if i.opcode == "parameter")
    rest = read + _written(computation.root, members) - sum(work.bytes for work in found)
    if rest > 0 or not found:
        found.append(_streamed(members.values(), max(rest, 0.0), needed, fused=True))
    return (*found, *_transcendental(members.values(), needed), *_rounded(computation, needed))


def _needed(computation: Computation) -> dict[str, float]:
    """Elements of each member that a fusion computes or reads, since each element of its result asks for its own.

    Slices of one operand are taken to be different parts of it, and all else to ask for the same elements.
    """
    members = computation.instructions
    needed, sliced = dict.fromkeys(members, 0.0), dict.fromkeys(members, 0.0)
    needed[computation.root.name] = float(sum(array.size for array in computation.root.arrays))
    for user in reversed(members.values()):
        for place, name in enumerate(user.operands):
            size = float(members[name].arrays[0].size) if members[name].arrays else 0.0
            asked = _asked(user, place, size, needed[user.name])
            if user.opcode in _SLICES and place == 0:
                asked = sliced[name] = sliced[name] + asked
            needed[name] = min(size, max(needed[name], asked))
    return needed


def _asked(user: Instruction, place: int, size: float, count: float) -> float:
    """Elements of an operand of `size` that so many elements of the user's result ask for; all may be asked for again.

    An update in place does not read what it leaves alone.
    """
    if not count:
        return 0.0
    if user.opcode in _UPDATES:
        return 0.0 if place < len(user.arrays) else size
    if user.opcode in _SLICES and place == 0:
        return count
    if user.opcode in _WHOLE or user.opcode in ("dynamic-slice", "tuple"):
        return size
    of_user = user.arrays[0].size
    if user.opcode in _BY_SHARE:
        return size * count / max(1, of_user)
    return count


def _part(work: Work, share: float) -> Work:
    """A part of a lookup."""
    sizes = {**work.sizes, "rows": max(1.0, share * work.sizes["rows"])}
    return dataclasses.replace(work, sizes=sizes, flops=share * work.flops, bytes=share * work.bytes)


def _fused(work: Work) -> Work:
    """The work of a gather whose rows are not written as they are, so that each element finds its row again."""
    return dataclasses.replace(work, kernel="gather.fused") if work.kernel == "gather" else work


def _computes(members: Iterable[Instruction]) -> bool:
    """Returns whether floating-point numbers are computed with, and not just chosen."""
    return any(
        i.opcode in ("add", "subtract", "multiply", "divide", "maximum", "minimum") and i.arrays[0].dtype != "s32"
        for i in members
    )


def _written(root: Instruction, members: Mapping[str, Instruction]) -> float:
    """Bytes that a fusion writes."""
    roots = [members[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for one in roots:
        while one.opcode in _VIEWS:
            one = members[one.operands[0]]
        if one.opcode in _UPDATES:
            total += _update(one, [members[name] for name in one.operands])
        elif one.opcode != "parameter":  # handed through
            total += one.bytes
    return total


def _update(instruction: Instruction, operands: list[Instruction]) -> float:
    """Bytes that an update in place writes."""
    if instruction.opcode == "scatter":
        tables = len(instruction.arrays)
        return sum(o.bytes for o in operands[tables + 1 :])
    return operands[1].bytes


def _heavy(instruction: Instruction, operands: list[Instruction]) -> Work | None:
    """The work of what has a class of its own; None for what only streams."""
    opcode = instruction.opcode
    if opcode == "dot":
        return _product(instruction, operands[0].arrays[0], operands[1].arrays[0])
    if opcode == "custom-call":
        return _called(instruction, operands)
    if opcode == "gather":
        slices = instruction.numbers("slice_sizes")
        table, ids = operands[0].arrays[0], operands[1].arrays[0]
        together = _together(slices, table.dims)
        row_bytes = together * table.item_bytes
        # Pieces of a column are gathered row by row: those of one row lie as near each other as the row is long.
        near_bytes = table.bytes * together / max(1, math.prod(slices))
        return gather(instruction.arrays[0].bytes / max(row_bytes, 1.0), row_bytes, near_bytes, ids.bytes)
    if opcode == "scatter":
        tables = len(instruction.arrays)
        ids, updates = operands[tables].arrays[0], operands[tables + 1].arrays[0]
        window = instruction.numbers("update_window_dims")
        row_bytes = math.prod(updates.dims[d] for d in window) * updates.item_bytes
        in_order, once = (f"{flag}=true" in instruction.attributes for flag in ("indices_are_sorted", "unique_indices"))
        variant = "add" if not in_order else "sorted" if once else "sorted_add"
        rows = updates.bytes / max(row_bytes, 1.0)
        return scatter(rows, row_bytes * tables, instruction.bytes, ids.bytes, variant)
    if opcode == "sort":
        keys, count = operands[0].arrays[0].size, len(operands)
        return sort(keys, count, sum(o.bytes for o in operands))
    if opcode in ("reduce", "reduce-window") and operands[0].arrays[0].size > 1:
        dims = instruction.numbers("dimensions")
        rows = opcode == "reduce-window" or len(operands[0].arrays[0].dims) - 1 in dims
        arrays = operands[: len(operands) // 2]
        moved = sum(o.bytes for o in arrays) + instruction.bytes
        flops = sum(o.arrays[0].size for o in arrays)
        return Work(f"reduce.{'rows' if rows else 'columns'}", {"bytes": moved}, flops, moved)
    return None


def _together(slices: Sequence[int], dims: Sequence[int]) -> int:
    """Elements of a slice that lie one after the other: of rows all of them, of columns one."""
    count = 1
    for taken, size in zip(reversed(slices), reversed(dims), strict=True):
        count *= taken
        if taken < size:
            break
    return count


def _called(instruction: Instruction, operands: list[Instruction]) -> Work | None:
    """A product by recjax-kernels or a GPU's library, or a kernel of `recjax.gpu_kernels`; None for any other call."""
    if kernel := _GPU_KERNEL.search(instruction.scope):
        return _gpu_kernel(kernel.group(1), [o.arrays[0] for o in operands], instruction)
    if 'custom_call_target="__cublas$' in instruction.attributes:
        return _library_product(operands[0].arrays[0], operands[1].arrays[0], instruction)
    target = re.search(r'custom_call_target="(\w+)"', instruction.attributes)
    places = DENSE_CALLS.get(target.group(1)) if target else None
    if places is None:
        return None
    arrays = [o.arrays[0] for o in operands] + list(instruction.arrays)
    batch, weights = (arrays[place] for place in places)
    k, n = weights.dims
    m = batch.dims[0]
    return matmul(m, n, k, 1, weights.dtype, "nn", sum(array.bytes for array in arrays))


def _gpu_kernel(kernel: str, operands: list[Array], instruction: Instruction) -> Work:
    """Returns the work of a kernel of `recjax.gpu_kernels`: of one that reads or updates rows theirs, else arrays."""
    if kernel == "update_rows":
        ids, grads = (operands[-3], operands[-2])
        width = grads.size / max(1, ids.size)
        rows = instruction.arrays[0].size / max(1.0, width)
        return scatter(ids.size, instruction.bytes / max(1.0, rows), instruction.bytes, ids.bytes, "sorted")
    if kernel.startswith("bag_sums_"):
        row_bytes, (table, ids, *_) = 4 * int(kernel.rpartition("_")[2]), operands
        moved = float(ids.size * row_bytes + sum(x.bytes for x in operands[1:]) + instruction.bytes)
        return Work("gather", _lookup_sizes(ids.size, row_bytes, table.bytes), 0.0, moved)
    moved = float(sum(x.bytes for x in operands) + instruction.bytes)
    return Work("elementwise", {"bytes": moved}, instruction.arrays[0].size, moved)


def _each(work: Work) -> Work:
    """The work of a batch of products so small, and in no fusion, that XLA calls a library for each of them."""
    base, _, variant = work.kernel.partition(".")
    if base != "batched_matmul" or max(work.sizes[size] for size in ("m", "n", "k")) >= _SMALL:
        return work
    return dataclasses.replace(work, kernel=f"{base}.each_{variant}")


def _library_product(left: Array, right: Array, instruction: Instruction) -> Work:
    """A product of matrices by cuBLAS.

    Each of m, n and k is a dimension of two of the three matrices: the product of their sizes is (m n k)^2. A batch of
    large products is a sum over a batch of samples that XLA cut into pieces (split-K), and counted as that.
    """
    result = instruction.arrays[0]
    batch = math.prod(result.dims[:-2])
    m, n = result.dims[-2:] if len(result.dims) > 1 else (result.size, 1)
    k = max(1, round(math.sqrt(left.size * right.size / max(1, m * n)) / batch))
    moved = left.bytes + right.bytes + result.bytes
    if min(m, n, k) > _INTERACTING:
        k, batch = batch * k, 1
    return matmul(m, n, k, batch, _factors(instruction, left), _layout(instruction.attributes, left, right), moved)


def _layout(attributes: str, left: Array, right: Array) -> str:
    """Layout of a product by cuBLAS, from the dimensions that are summed over; "nn" where the text has none."""

    def last(side: str, array: Array, otherwise: bool) -> bool:
        summed = re.search(rf'"{side}_contracting_dimensions":\["(\d+)"\]', attributes)
        return otherwise if summed is None else int(summed.group(1)) == len(array.dims) - 1

    return ("n" if last("lhs", left, True) else "t") + ("t" if last("rhs", right, False) else "n")


def _product(instruction: Instruction, left: Array, right: Array) -> Work:
    """A product of matrices, or of a batch of them."""
    batch = instruction.numbers("lhs_batch_dims")
    contracted_left = instruction.numbers("lhs_contracting_dims")
    contracted_right = instruction.numbers("rhs_contracting_dims")
    k = math.prod(left.dims[d] for d in contracted_left)
    count = math.prod(left.dims[d] for d in batch)
    m, n = left.size // max(1, k * count), right.size // max(1, k * count)
    layout = "n" if contracted_left[-1:] == (len(left.dims) - 1,) else "t"
    layout += "t" if contracted_right[-1:] == (len(right.dims) - 1,) else "n"
    moved = left.bytes + right.bytes + instruction.bytes
    return matmul(m, n, k, count, _factors(instruction, left), layout, moved)


def _factors(instruction: Instruction, left: Array) -> str:
    """Returns the dtype of a product's factors: "tf32" or "tf32x3" if float32 is rounded on the way in."""
    rounded = _ROUNDED.search(instruction.attributes)
    return f"tf32{(rounded.group(1) or '')[1:].lower()}" if rounded else left.dtype


def matmul(m: int, n: int, k: int, batch: int, dtype: str, layout: str, moved: float) -> Work:
    """Products of matrices [m, k] x [k, n]: 2 m n k operations each.

    Args:
      m: rows of the left one.
      n: columns of the right one.
      k: what is summed over.
      batch: how many products.
      dtype: of the operands, as XLA calls it; or "tf32" or "tf32x3", float32 multiplied in one or three products of
        TensorFloat32.
      layout: "nn", or with t where an operand lies transposed: the left one as [k, m], the right one as [n, k]. One of
        "tn" is counted as "strided_tn" where the columns of the left one lie in few sets of a cache.
      moved: bytes of operands and result.
    """
    flops = 2.0 * batch * m * n * k
    if batch > 1:
        return Work(f"batched_matmul.{layout}_{dtype}", {"batch": batch, "m": m, "n": n, "k": k}, flops, moved)
    item_bytes = Array(dtype, ()).item_bytes
    if layout == "tn" and m * item_bytes % _STRIDE_BYTES == 0:
        layout = "strided_tn"
    return Work(f"matmul.{layout}_{dtype}", {"m": m, "n": n, "k": k}, flops, moved)


def gather(rows: float, row_bytes: float, table_bytes: float, ids_bytes: float) -> Work:
    """Reads rows of a table and writes them one after the other."""
    sizes = _lookup_sizes(rows, row_bytes, table_bytes)
    return Work("gather", sizes, 0.0, 2 * rows * row_bytes + ids_bytes)


def scatter(rows: float, row_bytes: float, table_bytes: float, ids_bytes: float, variant: str) -> Work:
    """Reads rows, and reads and writes those of a table that they are added to, or replace.

    Args:
      rows: how many.
      row_bytes: of each.
      table_bytes: of all rows of the table.
      ids_bytes: of the numbers of the rows.
      variant: "sorted" if rows of the table come in order, each once at most; "sorted_add", perhaps repeated; or "add".
    """
    sizes = _lookup_sizes(rows, row_bytes, table_bytes)
    items = rows * row_bytes / 4
    return Work(f"scatter.{variant}", sizes, items, 3 * rows * row_bytes + ids_bytes)


def _lookup_sizes(rows: float, row_bytes: float, table_bytes: float) -> dict[str, float]:
    pieces = max(1.0, row_bytes / _LONG_BYTES)
    return {"rows": rows * pieces, "row_bytes": row_bytes / pieces, "table_bytes": table_bytes}


def sort(keys: float, operands: int, moved: float) -> Work:
    """Sorts keys, and moves further operands with them."""
    sizes = {"keys": keys, "operands": operands}
    return Work("sort", sizes, keys * math.ceil(math.log2(max(2.0, keys))), 2 * moved)


def _streamed(members: Iterable[Instruction], moved: float, needed: Mapping[str, float], fused: bool = False) -> Work:
    """One pass over so many bytes; `needed` says how many elements of each member are computed.

    Its class says how it goes through them: "copy.transposed" if it changes their order, "copy.joined" if it puts
    pieces side by side, else "elementwise" if it computes, or "copy". Passes that compute or change the order have a
    variant where numbers have 16 bits. One that is `fused` and joins has one too: on CPUs XLA's loop over pieces of
    unlike lengths takes several times as long as an instruction of its own.
    """
    busy = [i for i in members if i.opcode not in FREE]
    flops = sum(needed.get(i.name, 0.0) for i in busy if i.opcode not in _MOVES and i.arrays)
    narrow = next((a.dtype for i in busy for a in i.arrays if a.dtype in _NARROW and a.size > 1), "")
    if any(_transposes(i) for i in busy):
        kind = f"copy.{narrow}_transposed" if narrow else "copy.transposed"
    elif any(i.opcode == "concatenate" for i in busy):
        kind = "copy.fused_joined" if fused else "copy.joined"
    elif flops:
        kind = f"elementwise.{narrow}" if narrow else "elementwise"
    else:
        kind = "copy"
    return Work(kind, {"bytes": max(moved, 1.0)}, flops, moved)


def _transposes(instruction: Instruction) -> bool:
    """Returns whether an instruction changes the order of dimensions that are longer than 1."""
    if instruction.opcode != "transpose":
        return False
    order, dims = instruction.numbers("dimensions"), instruction.arrays[0].dims
    long = [of for of, size in zip(order, dims, strict=True) if size > 1]
    return long != sorted(long)


def _transcendental(members: Iterable[Instruction], needed: Mapping[str, float]) -> tuple[Work, ...]:
    """Exponentials and the like, which cost more than the bytes that they take."""
    elements = sum(needed[i.name] for i in members if i.opcode in _TRANSCENDENTAL)
    return (Work("transcendental", {"elements": elements}, 20.0 * elements, 0.0),) if elements else ()


def _rounded(computation: Computation, needed: Mapping[str, float]) -> tuple[Work, ...]:
    """Conversions to 16 bits inside of a fusion, as after each operation of a model that computes in bfloat16.

    A pass that writes such numbers has one for each of them already.
    """
    root = computation.root
    written = (root.name, *root.operands) if root.opcode == "tuple" else (root.name,)
    elements = sum(
        needed[i.name]
        for i in computation.instructions.values()
        if i.opcode == "convert" and i.arrays[0].dtype in _NARROW and i.name not in written
    )
    return (Work("convert", {"elements": elements}, elements, 0.0),) if elements else ()
