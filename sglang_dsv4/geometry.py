"""Layer kinds, rows, groups, pages, slots and their bytes: pure arithmetic, no torch, no SGLang.

Every size in the project derives from this module.  Quantities come in two flavours:

* *spec* bytes count the rows alone (584 B a main row, 68 or 132 B an indexer key);
* *allocated* bytes count what the pools occupy: rows are stored in groups of 64 whose stride is padded.

A row group in memory (`GROUP_ROWS` rows, one stride)::

    0                     64 * data_bytes        64 * (data_bytes + scale_bytes)     group_bytes
    | data row 0 .. data row 63 | scale row 0 .. scale row 63 | padding                    |

FlashMLA reads 64-row pages of exactly this shape, so its stride rule (round up to 576) is a hard requirement.
Groups are independent of radix pages: an entry's row is `token location // ratio`, so a page that produces
two HCA entries owns two rows and wastes nothing.

A layer's pools, one buffer per layer (layer-major)::

    window   uint8   [2 * num_slots, group_bytes]     row = slot * 128 + position % 128
    entries  uint8   [entry_groups, group_bytes]      row = token location // ratio     (ratio 4 and 128)
    keys     uint8   [entry_groups, group_bytes]      row = token location // 4         (ratio 4)
    overlap  float32 [num_slots, 4, 2, 640]           position % 4 | C, Z | main 512, indexer 128   (ratio 4)
    csa tail float32 [req_rows, 4, 2, 2, 640]         position % 4 | overlap, normal half | C, Z | channels
    hca tail float32 [req_rows, 128, 2, 512]          position % 128 | C, Z | channels
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

WINDOW = 128  # tokens
HEAD_DIM = 512  # channels of a window token or an entry; K = V
ROPE_DIM = 64  # the last channels
NOPE_DIM = HEAD_DIM - ROPE_DIM
INDEX_DIM = 128  # channels of an indexer key
CSA_RATIO = 4
HCA_RATIO = 128
GROUP_ROWS = 64
FP8_QUANT = 64  # channels per ue8m0 scale of a main row
FP4_QUANT = 32  # channels per ue8m0 scale of an MXFP4 indexer key
PAGE_SIZES = (128, 256)  # tokens; whole HCA blocks, so a page boundary finds every compressor tail empty

WINDOW_GROUPS = WINDOW // GROUP_ROWS  # per slot and layer
CSA_STATE_DIM = HEAD_DIM + INDEX_DIM  # main and indexer channels stand side by side in CSA state rows
STATE_PARTS = 2  # C (values) and Z (pooling scores)
STATE_BYTES = 4  # float32


class LayerKind(Enum):
    """What a layer's attention reads beside the window."""

    WINDOW = 0
    CSA = CSA_RATIO
    HCA = HCA_RATIO

    @property
    def ratio(self) -> int:
        """Tokens per entry; 0 for a layer without entries."""
        return self.value


@dataclass(frozen=True)
class RowLayout:
    """Bytes of one stored row and of a group of `GROUP_ROWS` rows.

    `data_bytes` and `scale_bytes` are per row, `group_bytes` is the stride between groups and `align` what
    that stride is rounded up to.  Raises ValueError when they disagree.
    """

    name: str
    data_bytes: int
    scale_bytes: int
    group_bytes: int
    align: int = 1

    def __post_init__(self) -> None:
        if self.group_bytes != self.padded_bytes(GROUP_ROWS):
            raise ValueError(
                f"row layout {self.name}: group_bytes is {self.group_bytes}, but {GROUP_ROWS} rows of "
                f"{self.row_bytes} B aligned to {self.align} B take {self.padded_bytes(GROUP_ROWS)}; "
                f"correct the layout"
            )

    @property
    def row_bytes(self) -> int:
        """Spec bytes of one row."""
        return self.data_bytes + self.scale_bytes

    def padded_bytes(self, rows: int) -> int:
        """Bytes of `rows` rows stored together, rounded up to `align`."""
        return -(-rows * self.row_bytes // self.align) * self.align

    def data_offset(self, row: int) -> int:
        """Byte offset in the pool of the data of `row`."""
        return row // GROUP_ROWS * self.group_bytes + row % GROUP_ROWS * self.data_bytes

    def scale_offset(self, row: int) -> int:
        """Byte offset in the pool of the scales of `row`."""
        return (
            row // GROUP_ROWS * self.group_bytes
            + GROUP_ROWS * self.data_bytes
            + row % GROUP_ROWS * self.scale_bytes
        )


MAIN_FP8 = RowLayout("fp8", 576, 8, 37440, align=576)  # 448 e4m3, 64 bf16 | 7 ue8m0, 1 pad byte (0)
MAIN_FP32 = RowLayout("fp32", 2048, 0, 131072)
INDEX_FP4 = RowLayout("mxfp4", 64, 4, 4352)  # two channels a byte, the even one low | 4 ue8m0
INDEX_FP8 = RowLayout("fp8", 128, 4, 8448)  # 128 e4m3 | one float32 scale
INDEX_FP32 = RowLayout("fp32", 512, 0, 32768)

MAIN_LAYOUTS = {"fp8": MAIN_FP8, "fp32": MAIN_FP32}
INDEX_LAYOUTS = {"fp4": INDEX_FP4, "fp8": INDEX_FP8, "fp32": INDEX_FP32}


def _require(config: Mapping[str, Any], field: str, want: int, role: str) -> None:
    have = config.get(field)
    if have != want:
        raise ValueError(
            f"{field} is {have!r}: rows and kernels are laid out for {want} {role}; "
            f"serve a DeepSeek-V4 checkpoint with {field}={want}"
        )


def _positive(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(
            f"{field} is {value!r}: the geometry needs a positive integer; "
            f"take {field} from the released DeepSeek-V4 config.json"
        )
    return value


def _refuse_v41(reason: str) -> ValueError:
    return ValueError(
        f"{reason}: that is DeepSeek-V4.1, whose row formats and shared entries this plugin does not store; "
        f"serve it with SGLang's own deepseek_v41 support"
    )


def _backbone_ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ratio of each backbone layer; entries past `num_hidden_layers` are draft layers and are dropped."""
    if str(config.get("model_type", "")).startswith("deepseek_v41"):
        raise _refuse_v41(f"model_type is {config['model_type']!r}")
    if config.get("kv_source_layer_ids"):
        raise _refuse_v41("kv_source_layer_ids is set")
    ratios = config.get("compress_ratios")
    if not ratios:
        raise ValueError(
            "compress_ratios is missing: layer kinds cannot be guessed from other fields; "
            "add the list of the released config.json (one ratio per layer, then one per draft layer)"
        )
    layers = _positive(config, "num_hidden_layers")
    # Draft entries are judged too: a V4.1 ratio there still means another model.
    for layer, ratio in enumerate(ratios):
        if isinstance(ratio, int) and ratio in (1, 2) and not isinstance(ratio, bool):
            raise _refuse_v41(f"compress_ratios[{layer}] is {ratio}")
        if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio not in (0, CSA_RATIO, HCA_RATIO):
            raise ValueError(
                f"compress_ratios[{layer}] is {ratio!r}: a DeepSeek-V4 layer has ratio 0, {CSA_RATIO} or "
                f"{HCA_RATIO}; correct the list from the released config.json"
            )
    if len(ratios) < layers:
        raise ValueError(
            f"compress_ratios has {len(ratios)} entries, num_hidden_layers is {layers}: each layer needs a "
            f"ratio; complete the list from the released config.json"
        )
    return tuple(ratios[:layers])


@dataclass(frozen=True)
class Geometry:
    """Sizes of one model on one rank.  `ratios` covers backbone layers only; page_size is in tokens."""

    ratios: tuple[int, ...]
    num_heads: int
    hidden_size: int
    index_heads: int
    index_topk: int
    page_size: int = 128
    main: RowLayout = MAIN_FP8
    index: RowLayout = INDEX_FP4

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, page_size: int = 128, store: str = "fp8", indexer: str = "fp4"
    ) -> Geometry:
        """Reads a checkpoint's raw config.json mapping.

        `store` is the main row format (fp8, fp32), `indexer` the key format (fp4, fp8, fp32).
        Raises ValueError, one line with what, why and what to do, for anything the pools cannot hold.
        """
        ratios = _backbone_ratios(config)
        _require(config, "head_dim", HEAD_DIM, "channels")
        _require(config, "qk_rope_head_dim", ROPE_DIM, "rotary channels")
        _require(config, "sliding_window", WINDOW, "window tokens")
        _require(config, "index_head_dim", INDEX_DIM, "channels")
        if page_size not in PAGE_SIZES:
            raise ValueError(
                f"page_size is {page_size!r}: a page holds one or two whole compression blocks of "
                f"{HCA_RATIO} tokens; use --page-size 128 or --page-size 256"
            )
        for flag, value, known in (("store", store, MAIN_LAYOUTS), ("indexer", indexer, INDEX_LAYOUTS)):
            if value not in known:
                raise ValueError(f"{flag} is {value!r}: no such row format; use one of {', '.join(known)}")
        return cls(
            ratios=ratios,
            num_heads=_positive(config, "num_attention_heads"),
            hidden_size=_positive(config, "hidden_size"),
            index_heads=_positive(config, "index_n_heads"),
            index_topk=_positive(config, "index_topk"),
            page_size=page_size,
            main=MAIN_LAYOUTS[store],
            index=INDEX_LAYOUTS[indexer],
        )

    # Layers

    @property
    def num_layers(self) -> int:
        return len(self.ratios)

    def kind(self, layer: int) -> LayerKind:
        return LayerKind(self.ratios[layer])

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Ids of the layers with that ratio, ascending."""
        return tuple(layer for layer, r in enumerate(self.ratios) if r == ratio)

    def _count(self, ratio: int) -> int:
        return self.ratios.count(ratio)

    # Pages

    def entries_per_page(self, ratio: int) -> int:
        """Entries that one page of tokens produces in one layer of that ratio (0 for ratio 0)."""
        return self.page_size // ratio if ratio else 0

    def entry_groups(self, num_tokens: int, ratio: int) -> int:
        """Row groups of one layer's entry pool when token locations run over [0, num_tokens)."""
        return -(-num_tokens // (ratio * GROUP_ROWS)) if ratio else 0

    @property
    def token_bytes(self) -> Fraction:
        """Spec bytes per cached token, all layers."""
        csa = Fraction(self._count(CSA_RATIO) * (self.main.row_bytes + self.index.row_bytes), CSA_RATIO)
        return csa + Fraction(self._count(HCA_RATIO) * self.main.row_bytes, HCA_RATIO)

    @property
    def token_alloc_bytes(self) -> Fraction:
        """Allocated bytes per cached token, all layers (whole groups)."""
        csa = Fraction(self._count(CSA_RATIO) * (self.main.group_bytes + self.index.group_bytes), CSA_RATIO)
        return (csa + Fraction(self._count(HCA_RATIO) * self.main.group_bytes, HCA_RATIO)) / GROUP_ROWS

    @property
    def page_bytes(self) -> int:
        """Spec bytes of one page, all layers."""
        return int(self.token_bytes * self.page_size)

    def page_pool_bytes(self, num_tokens: int) -> int:
        """Allocated bytes of all entry and key pools for `num_tokens` token locations."""
        csa = self.entry_groups(num_tokens, CSA_RATIO) * (self.main.group_bytes + self.index.group_bytes)
        hca = self.entry_groups(num_tokens, HCA_RATIO) * self.main.group_bytes
        return self._count(CSA_RATIO) * csa + self._count(HCA_RATIO) * hca

    def entry_pool_shape(self, num_tokens: int, ratio: int) -> tuple[int, int]:
        """uint8 shape of one layer's entry pool."""
        return self.entry_groups(num_tokens, ratio), self.main.group_bytes

    def key_pool_shape(self, num_tokens: int) -> tuple[int, int]:
        """uint8 shape of one CSA layer's indexer key pool."""
        return self.entry_groups(num_tokens, CSA_RATIO), self.index.group_bytes

    # Slots and snapshots (one size)

    @property
    def overlap_bytes(self) -> int:
        """CSA overlap halves of a slot, all layers: last 4 tokens, C and Z, main and indexer."""
        return CSA_RATIO * STATE_PARTS * CSA_STATE_DIM * STATE_BYTES * self._count(CSA_RATIO)

    @property
    def slot_spec_bytes(self) -> int:
        """Spec bytes of a slot or snapshot, all layers: window rows and overlap halves."""
        return WINDOW * self.main.row_bytes * self.num_layers + self.overlap_bytes

    @property
    def slot_bytes(self) -> int:
        """Allocated bytes of a slot or snapshot, all layers."""
        return WINDOW_GROUPS * self.main.group_bytes * self.num_layers + self.overlap_bytes

    def slot_pool_bytes(self, num_slots: int) -> int:
        """Allocated bytes of `num_slots` slots, the dummy slot 0 included in the count."""
        return num_slots * self.slot_bytes

    def window_pool_shape(self, num_slots: int) -> tuple[int, int]:
        """uint8 shape of one layer's window pool."""
        return WINDOW_GROUPS * num_slots, self.main.group_bytes

    def overlap_shape(self, num_slots: int) -> tuple[int, int, int, int]:
        """float32 shape of one CSA layer's overlap halves."""
        return num_slots, CSA_RATIO, STATE_PARTS, CSA_STATE_DIM

    # Tails (per request row, never in a snapshot)

    @property
    def csa_tail_bytes(self) -> int:
        """CSA pending rows of a request row, all layers: 4 tokens, both halves, C and Z, main and indexer."""
        return CSA_RATIO * 2 * STATE_PARTS * CSA_STATE_DIM * STATE_BYTES * self._count(CSA_RATIO)

    @property
    def hca_tail_bytes(self) -> int:
        """HCA pending rows of a request row, all layers: 128 tokens, C and Z."""
        return HCA_RATIO * STATE_PARTS * HEAD_DIM * STATE_BYTES * self._count(HCA_RATIO)

    def tail_bytes(self, rows: int) -> int:
        """Allocated bytes of the tails of `rows` request rows, the dummy row 0 included in the count."""
        return rows * (self.csa_tail_bytes + self.hca_tail_bytes)

    def csa_tail_shape(self, rows: int) -> tuple[int, int, int, int, int]:
        """float32 shape of one CSA layer's tail."""
        return rows, CSA_RATIO, 2, STATE_PARTS, CSA_STATE_DIM

    def hca_tail_shape(self, rows: int) -> tuple[int, int, int, int]:
        """float32 shape of one HCA layer's tail."""
        return rows, HCA_RATIO, STATE_PARTS, HEAD_DIM
