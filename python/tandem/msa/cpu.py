"""The CPU backend: the same interface over the C++ kernels."""

import torch
from torch import Tensor

from tandem.core import cpu
from tandem.msa.backend import AttendedTokens, AttentionBackend


class CpuBackend(AttentionBackend):
    """C++ kernels over a pool in host memory; results do not depend on batch, chunking or the number of threads."""

    kernels_only = True

    def write(self, layer: int, k: Tensor, v: Tensor, index_k: Tensor | None, tokens: AttendedTokens) -> None:  # noqa: D102
        parts = self.parts(layer, k, v, index_k)
        cpu.write_kv(self.pool, parts, tokens.token_seat, tokens.write_index, self.state.block_table)

    def select(self, layer: int, index_q: Tensor, tokens: AttendedTokens) -> Tensor:  # noqa: D102
        cached = self.layer(layer)
        sparse = cached.sparse
        out = torch.empty((index_q.shape[0], index_q.shape[1], sparse.topk), dtype=torch.int32)
        cpu.select_blocks(
            index_q,
            self.pool,
            cached.index_keys,
            self.state.block_table,
            tokens.token_seat,
            tokens.kv_len,
            sparse.topk,
            sparse.num_local,
            out,
        )
        return out

    def attend(self, layer: int, q: Tensor, blocks: Tensor | None, tokens: AttendedTokens) -> Tensor:  # noqa: D102
        cached = self.layer(layer)
        out = q.new_empty(q.shape)
        cpu.attend(
            q,
            self.pool,
            cached.k,
            cached.v,
            self.state.block_table,
            tokens.token_seat,
            tokens.kv_len,
            blocks,
            cached.geometry.scale,
            cached.geometry.first_index_attended,
            out,
        )
        return out
