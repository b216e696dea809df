"""Turn an indexer's projected queries and head weights into what `index_scores` multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec, hadamard
from sglang_dsv4.geometry import INDEX_DIM, INDEX_FP4, INDEX_FP8, ROPE_DIM
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import FLOATS, Check
from sglang_dsv4.ops.flush import rotate
from sglang_dsv4.ops.index_scores import MAX_HEADS, image_bytes


def index_query(
    q: Tensor,
    weights: Tensor,
    rope: Tensor,
    positions: Tensor,
    *,
    codec: RowCodec,
    scale: float,
    many: bool = False,
) -> tuple[Tensor, Tensor]:
    """Queries rotated, Hadamard-transformed and rounded like keys, and weights times `scale`.

    q          float [N, heads, 128], as the projection left it
    weights    float [N, heads], as the projection left them
    rope       float32 [positions, 64], cos of 32 pairs then sin, of the layer's own base
    positions  int64 [N]; padded tokens have any row of the table, position 0 by custom
    many       `many_queries` of the step: what comes back may then be in a form of its own that `index_scores` takes
    Returns float [N, heads, 128] (here float32; any type that holds every rounded value) and float32 [N, heads].

    The result is fixed to the bit, given q: the rotation is in float32, each product and each sum rounded once;
    then the butterflies in the order of `formats.hadamard`; then the codec. A weight is multiplied in float64 if
    it comes in float64, otherwise in float32 by `scale` rounded to float32.
    """
    turned = rotate(q.float(), rope[positions][:, None])
    query = codec.round_trip(hadamard(turned))
    wide = weights if weights.dtype == torch.float64 else weights.float()
    return query, (wide * scale).float()


def index_query_cuda(
    q: Tensor,
    weights: Tensor,
    rope: Tensor,
    positions: Tensor,
    *,
    codec: RowCodec,
    scale: float,
    many: bool = False,
) -> tuple[Tensor, Tensor]:
    """CUDA face of `index_query`: one launch, no workspace; the reference's numbers to the bit for finite queries.

    Queries of MXFP4 keys come back in bfloat16, which holds an e2m1 number times a power of two exactly; those of FP8
    keys carry a float32 scale and come back in float32. At most 64 heads. A position past the table turns like its
    last row. With `many` on Hopper: the operands of `index_scores` made of those numbers, uint8 [N, 8192], and float32
    [N, 64]. Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("index_query")
    check.codec("codec", codec, (INDEX_FP4, INDEX_FP8))
    check.tensor("q", q, FLOATS, ("tokens", "heads", INDEX_DIM), strided=2, align=16)
    if not 0 < q.shape[1] <= MAX_HEADS:
        raise check.fail("q", f"of {q.shape[1]} heads", f"of 1 to {MAX_HEADS} heads")
    check.tensor("weights", weights, (*FLOATS, torch.float64), ("tokens", "heads"), strided=1)
    check.tensor("rope", rope, torch.float32, (None, ROPE_DIM), strided=1, align=16)
    if rope.shape[0] == 0:
        raise check.fail("rope", "an empty table", "a table of at least one position")
    check.tensor("positions", positions, torch.int64, ("tokens",))
    device = check.cuda()
    fp4, images = codec.layout == INDEX_FP4, many and jit.architecture(device) == "90a"
    if images:
        query = q.new_empty((q.shape[0], image_bytes(True)), dtype=torch.uint8)
        scaled = q.new_empty((q.shape[0], MAX_HEADS), dtype=torch.float32)
    else:
        query = q.new_empty(q.shape, dtype=torch.bfloat16 if fp4 else torch.float32)
        scaled = q.new_empty(q.shape[:2], dtype=torch.float32)
    run = jit.function("index_query", "index_query", device)
    run(q, weights, rope, positions, query, scaled, float(scale), fp4, images)
    return query, scaled
