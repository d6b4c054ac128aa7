"""The ops of the step. Importing this package registers all of them under `torch.ops.dsv4`."""

from dsv4.ops._register import registered
from dsv4.ops.advance import advance_csa, advance_hca, advance_window
from dsv4.ops.advance_state import advance_state
from dsv4.ops.attend import attend
from dsv4.ops.compress import compress
from dsv4.ops.fp8 import linear_fp8_block
from dsv4.ops.hyper_connection import hc_head, hc_mix, hc_mix_head, hc_post, hc_pre
from dsv4.ops.index_topk import index_topk
from dsv4.ops.kv_write import kv_write
from dsv4.ops.linear import linear_fp32
from dsv4.ops.moe import clamped_swiglu, moe, moe_fp8, moe_nvfp4
from dsv4.ops.moe_nvfp4_w4a4 import moe_nvfp4_w4a4
from dsv4.ops.nvfp4 import linear_nvfp4
from dsv4.ops.project import project
from dsv4.ops.quantize_nvfp4 import quantize_nvfp4
from dsv4.ops.rope import kv_rope, q_rope
from dsv4.ops.route import route_hash, route_topk
from dsv4.ops.route_moe import route_moe_nvfp4
from dsv4.ops.sample import sample

__all__ = [
    "advance_csa",
    "advance_hca",
    "advance_state",
    "advance_window",
    "attend",
    "clamped_swiglu",
    "compress",
    "hc_head",
    "hc_mix",
    "hc_mix_head",
    "hc_post",
    "hc_pre",
    "index_topk",
    "kv_rope",
    "kv_write",
    "linear_fp8_block",
    "linear_fp32",
    "linear_nvfp4",
    "moe",
    "moe_fp8",
    "moe_nvfp4",
    "moe_nvfp4_w4a4",
    "project",
    "q_rope",
    "quantize_nvfp4",
    "registered",
    "route_hash",
    "route_moe_nvfp4",
    "route_topk",
    "sample",
]
