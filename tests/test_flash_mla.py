"""What FlashMLA is handed: index rows as wide as its kernels accept, nothing but -1 behind ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4.ops import flash_mla


@pytest.mark.parametrize("width, accepted", [(128, 128), (129, 256), (193, 256), (640, 640), (704, 768)])
def test_prefill_index_rows_are_padded_to_whole_pairs_of_tiles(monkeypatch, width, accepted):
    """The Hopper kernel ends the process for a width that is no multiple of 128."""
    seen = {}

    def forward(q, kv, indices, *_, **__):
        seen["indices"] = indices
        return (torch.zeros_like(q),)

    monkeypatch.setattr(flash_mla, "module", lambda: SimpleNamespace(flash_mla_sparse_fwd=forward))
    monkeypatch.setattr(flash_mla.jit, "function", lambda *_: lambda *_: None)
    q, rows = torch.zeros(3, 64, 512), torch.zeros(900, 512)
    indices = torch.arange(3 * width, dtype=torch.int32).view(3, width)
    flash_mla.prefill(q, rows, indices, torch.zeros(64), torch.zeros(9, 64), torch.arange(3), 0.04)
    assert seen["indices"].shape == (3, 1, accepted)
    assert torch.equal(seen["indices"][:, 0, :width], indices)
    assert (seen["indices"][:, 0, width:] == -1).all()


@pytest.mark.parametrize("width, accepted", [(128, 128), (130, 192), (512, 512)])
def test_decode_index_rows_are_padded_to_whole_tiles(width, accepted):
    padded = flash_mla._padded(torch.zeros(2, width, dtype=torch.int64))
    assert padded.shape == (2, 1, accepted) and padded.dtype == torch.int32 and padded.is_contiguous()
