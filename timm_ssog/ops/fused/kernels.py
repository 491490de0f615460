"""The Triton kernels of the separable mix and of the gradient of its column kernels; the only importer of Triton.

A program works on the planes (height, width) of one head: a few channels at a time, the source columns in chunks. The
components of a group are stacked along the row axis of one matrix, so that a chunk of values, read once, gives
T[(m, i), (l, c)] = A[(m, i), k] V[k, (l, c)] for all of them in a product large enough for tensor cores. Rounded and
transposed to T[(i, c), (m, l)], it is an operand of the second product. The M-fold intermediate never leaves the
multiprocessor.
"""

import triton
import triton.language as tl


@triton.jit
def _turn(intermediate, GROUP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr):
    """T[(m, i), (l, c)] -> T[(i, c), (m, l)]."""
    parts = tl.reshape(intermediate, (GROUP, ROWS, CHUNK, CHANNELS))
    return tl.reshape(tl.permute(parts, (1, 3, 0, 2)), (ROWS * CHANNELS, GROUP * CHUNK))


@triton.jit(do_not_specialize=["height", "width", "heads", "components"])
def mix_kernel(
    values,  # (batch, height, width, heads, head_dim), any strides except the last, which is 1
    rows,  # (heads, components, height, row_pitch): A[m, i, k], zero for k >= height
    columns,  # (heads, components, width, column_pitch): B[m, j, l] at [m, l, j], zero for j >= width
    output,  # (batch, height, width, heads, head_dim), contiguous
    batch_stride,
    row_stride,
    column_stride,
    head_stride,
    height,
    width,
    heads,
    head_dim,
    components,
    row_pitch,
    column_pitch,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    EXTENT: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Mix ROWS x EXTENT cells of CHANNELS channels of one head and image.

    WHOLE: the height is at most DEPTH, so that A is loaded once; otherwise the first product takes DEPTH source rows at
    a time. WIDE: offsets within an image need 64 bits. UPCAST: multiply in float32 (Triton's interpreter multiplies the
    bits of bfloat16).
    """
    dtype = output.dtype.element_ty
    channel_blocks = tl.cdiv(head_dim, CHANNELS)
    row_blocks = tl.cdiv(height, ROWS)
    column_blocks = tl.cdiv(width, EXTENT)
    # channel blocks run fastest: neighbours read the other half of the same cache lines
    program = tl.program_id(0)
    first_channel = program % channel_blocks * CHANNELS
    program = program // channel_blocks
    first_row = program % row_blocks * ROWS
    program = program // row_blocks
    first_column = program % column_blocks * EXTENT
    program = program // column_blocks
    head = (program % heads).to(tl.int64)
    image = (program // heads).to(tl.int64)

    of_stack = tl.arange(0, GROUP * ROWS)
    of_chunk = tl.arange(0, CHUNK * CHANNELS)
    of_turned = tl.arange(0, GROUP * CHUNK)
    source_row = tl.arange(0, DEPTH)
    column = first_column + tl.arange(0, EXTENT)
    stack_component = of_stack // ROWS
    stack_row = first_row + of_stack % ROWS
    chunk_column = of_chunk // CHANNELS
    chunk_channel = first_channel + of_chunk % CHANNELS
    turned_component = of_turned // CHUNK
    turned_column = of_turned % CHUNK
    if WIDE:
        source_row = source_row.to(tl.int64)
        column = column.to(tl.int64)
        stack_row = stack_row.to(tl.int64)
        chunk_column = chunk_column.to(tl.int64)
        turned_column = turned_column.to(tl.int64)

    values += image * batch_stride + head * head_stride
    rows += head * components * height * row_pitch
    columns += head * components * width * column_pitch
    output += (image * height * width * heads + head) * head_dim

    value_offset = source_row[:, None] * row_stride + (chunk_column * column_stride + chunk_channel)[None, :]
    accumulator = tl.zeros((ROWS * CHANNELS, EXTENT), dtype=tl.float32)
    for first_component in range(0, components, GROUP):
        component = first_component + stack_component
        stack_offset = ((component * height + stack_row) * row_pitch)[:, None] + source_row[None, :]
        stack_mask = ((component < components) & (stack_row < height))[:, None]
        if WHOLE:
            stack = tl.load(rows + stack_offset, mask=stack_mask & (source_row < row_pitch)[None, :], other=0.0)
            if UPCAST:
                stack = stack.to(tl.float32)
        for start in range(0, width, CHUNK):
            chunk_mask = ((start + chunk_column < width) & (chunk_channel < head_dim))[None, :]
            chunk_values = values + start * column_stride
            if WHOLE:
                mask = chunk_mask & (source_row < height)[:, None]
                chunk = tl.load(chunk_values + value_offset, mask=mask, other=0.0)
                if UPCAST:
                    chunk = chunk.to(tl.float32)
                intermediate = tl.dot(stack, chunk, input_precision=PRECISION)
            else:
                intermediate = tl.zeros((GROUP * ROWS, CHUNK * CHANNELS), dtype=tl.float32)
                for first_source in range(0, height, DEPTH):
                    mask = stack_mask & (first_source + source_row < row_pitch)[None, :]
                    stack = tl.load(rows + first_source + stack_offset, mask=mask, other=0.0)
                    mask = chunk_mask & (first_source + source_row < height)[:, None]
                    chunk = tl.load(chunk_values + first_source * row_stride + value_offset, mask=mask, other=0.0)
                    if UPCAST:
                        stack = stack.to(tl.float32)
                        chunk = chunk.to(tl.float32)
                    intermediate = tl.dot(stack, chunk, intermediate, input_precision=PRECISION)
            turned = _turn(intermediate.to(dtype), GROUP, ROWS, CHUNK, CHANNELS)

            weight_component = first_component + turned_component
            source_column = start + turned_column
            weight_mask = ((weight_component < components) & (source_column < width))[:, None]
            weights = tl.load(
                columns + ((weight_component * width + source_column) * column_pitch)[:, None] + column[None, :],
                mask=weight_mask & (column < column_pitch)[None, :],
                other=0.0,
            )
            if UPCAST:
                turned = turned.to(tl.float32)
                weights = weights.to(tl.float32)
            accumulator = tl.dot(turned, weights, accumulator, input_precision=PRECISION)

    of_output = tl.arange(0, ROWS * CHANNELS)
    output_row = first_row + of_output // CHANNELS
    output_channel = first_channel + of_output % CHANNELS
    if WIDE:
        output_row = output_row.to(tl.int64)
    offset = (output_row * width * heads * head_dim + output_channel)[:, None] + (column * heads * head_dim)[None, :]
    mask = ((output_row < height) & (output_channel < head_dim))[:, None] & (column < width)[None, :]
    tl.store(output + offset, accumulator.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["batch", "height", "width", "heads", "components", "splits"])
def column_gradient_kernel(
    grad,  # (batch, height, width, heads, head_dim), any strides except the last, which is 1
    values,  # likewise
    rows,  # (heads, components, height, row_pitch): A[m, i, k], zero for k >= height
    partial,  # (splits, heads, components, width, width), float32, contiguous: [m, j, l]
    grad_batch_stride,
    grad_row_stride,
    grad_column_stride,
    grad_head_stride,
    batch_stride,
    row_stride,
    column_stride,
    head_stride,
    batch,
    height,
    width,
    heads,
    head_dim,
    components,
    row_pitch,
    splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    EXTENT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split's share of dB[m, j, l] = sum over images, rows and channels of G[i, j, c] T[m, i, l, c].

    A program owns CHUNK source columns of GROUP components of one head, for grids of at most EXTENT x EXTENT, and
    walks its split of all (image, channel block, row block). Nothing is added atomically.
    """
    dtype = values.dtype.element_ty
    channel_blocks = tl.cdiv(head_dim, CHANNELS)
    row_blocks = tl.cdiv(height, ROWS)
    chunks = tl.cdiv(width, CHUNK)
    groups = tl.cdiv(components, GROUP)
    # chunks run fastest: they read the same gradient
    program = tl.program_id(0)
    start = program % chunks * CHUNK
    program = program // chunks
    first_component = program % groups * GROUP
    program = program // groups
    head = (program % heads).to(tl.int64)
    split = (program // heads).to(tl.int64)

    of_stack = tl.arange(0, GROUP * ROWS)
    of_chunk = tl.arange(0, CHUNK * CHANNELS)
    of_turned = tl.arange(0, GROUP * CHUNK)
    of_grad = tl.arange(0, ROWS * CHANNELS)
    source_row = tl.arange(0, EXTENT)
    column = tl.arange(0, EXTENT)
    stack_component = first_component + of_stack // ROWS
    stack_row = of_stack % ROWS
    chunk_column = start + of_chunk // CHANNELS
    chunk_channel = of_chunk % CHANNELS
    grad_row = of_grad // CHANNELS
    grad_channel = of_grad % CHANNELS
    if WIDE:
        source_row = source_row.to(tl.int64)
        column = column.to(tl.int64)
        stack_row = stack_row.to(tl.int64)
        chunk_column = chunk_column.to(tl.int64)
        grad_row = grad_row.to(tl.int64)

    grad += head * grad_head_stride
    values += head * head_stride
    rows += head * components * height * row_pitch

    value_offset = source_row[:, None] * row_stride + (chunk_column * column_stride + chunk_channel)[None, :]
    value_mask = (source_row < height)[:, None] & (chunk_column < width)[None, :]
    grad_offset = column[:, None] * grad_column_stride + (grad_row * grad_row_stride + grad_channel)[None, :]
    stack_offset = ((stack_component * height + stack_row) * row_pitch)[:, None] + source_row[None, :]
    stack_mask = (stack_component < components)[:, None] & (source_row < row_pitch)[None, :]

    work = batch.to(tl.int64) * channel_blocks * row_blocks
    share = tl.cdiv(work, splits)
    accumulator = tl.zeros((EXTENT, GROUP * CHUNK), dtype=tl.float32)
    for item in range(split * share, tl.minimum(split * share + share, work)):
        first_row = (item % row_blocks * ROWS).to(tl.int32)
        plane = item // row_blocks
        first_channel = (plane % channel_blocks * CHANNELS).to(tl.int32)
        image = plane // channel_blocks

        stack = tl.load(
            rows + first_row * row_pitch + stack_offset,
            mask=stack_mask & (first_row + stack_row < height)[:, None],
            other=0.0,
        )
        chunk = tl.load(
            values + image * batch_stride + first_channel + value_offset,
            mask=value_mask & (first_channel + chunk_channel < head_dim)[None, :],
            other=0.0,
        )
        turned_grad = tl.load(
            grad + image * grad_batch_stride + first_channel + first_row * grad_row_stride + grad_offset,
            mask=(column < width)[:, None]
            & ((first_row + grad_row < height) & (first_channel + grad_channel < head_dim))[None, :],
            other=0.0,
        )
        if UPCAST:
            stack = stack.to(tl.float32)
            chunk = chunk.to(tl.float32)
            turned_grad = turned_grad.to(tl.float32)
        intermediate = tl.dot(stack, chunk, input_precision=PRECISION)
        turned = _turn(intermediate.to(dtype), GROUP, ROWS, CHUNK, CHANNELS)
        if UPCAST:
            turned = turned.to(tl.float32)
        accumulator = tl.dot(turned_grad, turned, accumulator, input_precision=PRECISION)

    component = first_component + of_turned // CHUNK
    source_column = start + of_turned % CHUNK
    offset = (component * width * width + source_column)[None, :] + (tl.arange(0, EXTENT) * width)[:, None]
    mask = ((component < components) & (source_column < width))[None, :] & (tl.arange(0, EXTENT) < width)[:, None]
    tl.store(partial + (split * heads + head) * components * width * width + offset, accumulator, mask=mask)
