"""Score every visible indexer key of a request against a query's index heads.

Reads packed keys from pages; writes nothing but its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4.formats import RowCodec
from sglang_dsv4.geometry import CSA_RATIO, INDEX_DIM, INDEX_FP4, INDEX_FP8
from sglang_dsv4.models.invariant import ordered_sum
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import FLOATS, Check
from sglang_dsv4.ops.meta import StepMeta
from sglang_dsv4.ops.score_plan import SCORE_TILE, ScorePlan, plan_tensors

# Keys are multiplied in whole tiles so that a score does not depend on how many keys stand beside it.
KEY_TILE = SCORE_TILE
QUERY_TILE = 64
# The kernel: heads of a query's image, and the tokens up to which it treats a step as decode.
MAX_HEADS = 64
FEW_TOKENS = 1024
FEW_TOKENS_PER_REQUEST = 8


def many_queries(meta: StepMeta) -> bool:
    """Whether a step has so many tokens a request that each key meets many queries at once, as in prefill."""
    return meta.num_tokens > FEW_TOKENS or meta.num_tokens > FEW_TOKENS_PER_REQUEST * meta.num_requests


def image_bytes(hopper: bool) -> int:
    """Bytes of a token's query as operands of the kernel for many queries: e4m3 on Hopper, bfloat16 elsewhere."""
    return MAX_HEADS * INDEX_DIM * (1 if hopper else 2)


def index_scores(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    meta: StepMeta,
    *,
    codec: RowCodec,
    max_entries: int,
    plan: ScorePlan | None = None,
) -> Tensor:
    """float32 [N, max_entries]: sum over heads of weight * relu(q . key), -inf where an entry is not visible.

    q            float32 [N, heads, 128], rotated, Hadamard-transformed and rounded like the keys
    weights      float32 [N, heads], scaled; may be negative
    index_keys   uint8 [groups, group bytes], the layer's indexer keys
    max_entries  width of the result, at least the visible entries of every token
    plan         `score_plan` of this step, one token a request: it may change what is read how often, never a score
    """
    out = q.new_full((q.shape[0], max_entries), float("-inf"), dtype=torch.float32)
    visible = meta.visible_entries(CSA_RATIO)
    offsets = meta.token_offsets.tolist()
    for request in range(meta.num_requests):
        first, last = offsets[request], offsets[request + 1]
        count = int(visible[last - 1]) if last > first else 0
        if count == 0:
            continue
        ids = torch.arange(-(-count // KEY_TILE) * KEY_TILE, device=meta.device)
        ids = torch.where(ids < count, ids, torch.full_like(ids, -1))
        rows = meta.entry_rows(torch.full_like(ids, request), ids, CSA_RATIO)
        keys = codec.gather(index_keys, rows).double()
        for start in range(first, last, QUERY_TILE):
            stop = min(start + QUERY_TILE, last)
            dots = (q[start:stop].double().reshape(-1, INDEX_DIM) @ keys.T).relu_()
            dots = dots.view(stop - start, q.shape[1], -1) * weights[start:stop, :, None].double()
            scores = ordered_sum(dots, 1)[:, :count].float()
            hidden = torch.arange(count, device=meta.device) >= visible[start:stop, None]
            out[start:stop, :count] = scores.masked_fill(hidden, float("-inf"))
    return out


def index_scores_cuda(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    meta: StepMeta,
    *,
    codec: RowCodec,
    max_entries: int,
    plan: ScorePlan | None = None,
    portable: bool = False,
) -> Tensor:
    """CUDA face of `index_scores`: MXFP4 and FP8 keys, at most 64 heads, `q` bfloat16 or float32.

    Columns past a token's visible entries are left unwritten (`index_topk` never reads them): the width of a
    captured graph is its longest context. `q` must be rounded as keys are: it is multiplied as codes. On Hopper
    sums have the tensor cores' e4m3 accumulation (relative error about 2^-12 of the largest product); elsewhere,
    and with `portable`, products of bf16 are summed in float32.
    Decode is one launch without workspace; on Hopper, with a `plan`, it reads keys that requests share once for up to
    eight of them. Scores are the same bit for bit with a plan and without.
    A step of more than 8 tokens a request on average, or of more than 1,024 tokens, is two launches and allocates
    8.25 KiB a token (16.25 KiB with `portable`). With the uint8 images and float32 [N, 64] weights that
    `index_query_cuda` gives for such a step it is one launch and allocates nothing but its result.
    Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("index_scores")
    check.codec("codec", codec, (INDEX_FP4, INDEX_FP8))
    fields = check.meta(meta)
    made = q.dtype == torch.uint8
    if made:
        check.tensor("q", q, torch.uint8, ("tokens", image_bytes(True)), align=16)
        check.tensor("weights", weights, torch.float32, ("tokens", MAX_HEADS), align=16)
    else:
        check.tensor("q", q, FLOATS, ("tokens", "heads", INDEX_DIM), strided=1, align=16)
        if not 0 < q.shape[1] <= MAX_HEADS:
            raise check.fail("q", f"of {q.shape[1]} heads", f"of 1 to {MAX_HEADS} heads")
        check.tensor("weights", weights, torch.float32, ("tokens", "heads"), strided=1)
    check.pool("index_keys", index_keys, codec.layout)
    if not 0 < max_entries < 2**31 - 256:
        raise check.fail("max_entries", repr(max_entries), "a positive number of entries below 2^31 - 256")
    if index_keys.shape[0] == 0:
        raise check.fail("index_keys", "an empty pool", "a pool of at least one group")
    tokens = meta.num_tokens
    many = made or many_queries(meta)
    if plan is None or many:
        plan = ScorePlan.none(q.device)
    else:
        plan_tensors(check, "plan", plan, meta)
    device = check.cuda()
    # Rows start at 16-byte addresses, for index_topk's loads.
    out = q.new_empty((tokens, -(-max_entries // 4) * 4), dtype=torch.float32)[:, :max_entries]
    if tokens == 0:
        return out
    hopper = not portable and jit.architecture(device) == "90a"
    if made:
        if not hopper:
            raise check.fail("q", "images of e4m3", "numbers: this kernel multiplies bfloat16")
        images, image_weights = q, weights
    else:
        rows = tokens if many else 0
        images = q.new_empty((rows, image_bytes(hopper)), dtype=torch.uint8)
        image_weights = q.new_empty((rows, MAX_HEADS), dtype=torch.float32)
    run = jit.function("index_scores", "index_scores", device)
    planned = (plan.cost_before, plan.shared, plan.members)
    run(q, weights, index_keys, out, images, image_weights, *planned, codec.layout == INDEX_FP4, hopper, *fields)
    return out
