"""The matrix memory over a chunk of tokens, read without ever being rewritten, and its adjoint.

Step t of a chunk writes `M_t = a_t M_{t-1} + k_t u_t^T` and reads `y = M_t^T x` for R vectors x:
the queries of all layers and the key of the next token. With `c_ti = a_{i+1} .. a_t` (`c_tt = 1`,
and `c_t` the product from the chunk's start) everything follows from the start memory M_0:

    M_t  = c_t M_0 + sum_{i<=t} c_ti k_i u_i^T
    y    = c_t M_0^T x + sum_{i<=t} c_ti (k_i . x) u_i      one product with [M_0; u_1 .. u_t]

In reverse, with `dy` the gradient of a read and D_C the gradient that reaches the last memory from
later chunks:

    du_t = c_Ct D_C^T k_t + sum_{i>=t, x} c_it (x_i . k_t) dy_i
    dk_t = c_Ct D_C u_t   + sum_{i>=t, x} c_it (dy_i . u_t) x_i
    dx   = c_t M_0 dy     + sum_{i<=t} c_ti (u_i . dy) k_i
    D_0  = c_C D_C        + sum_{t, x} c_t x_t dy_t^T

The factors are products of decays in (0, 1], taken forwards and never divided: a strong decay
underflows to 0, which is right. A document boundary is a decay of exactly 0.

Shapes: P = B*H memories side by side, K key, V value, C tokens per chunk, R reads per token.
"""

import torch
from torch import Tensor

from groundlm.ops.stages import Sizes, empty


def chunk_tokens(s: Sizes) -> int:
    """Tokens per chunk (C): half the key width, so the sum costs at most half a read of M_0."""
    return max(16, min(64, s.key // 2))


class LazyMemory:
    """Buffers of one tape of `steps` tokens, cut into chunks, and the walk over them.

    Forward, per chunk: `open`, then per token `decay`, `write`, `read`; `last` gives the memory
    behind the last token. Reverse: `open_reverse`, then per token `reverse_read`, `write_grad`,
    `key_grad`; `close_reverse` gives the gradient of the chunk's start memory.
    """

    def __init__(self, s: Sizes, steps: int, chunk: int) -> None:
        self.s, self.chunk = s, chunk
        chunks = -(-steps // chunk)
        pairs, reads = s.pairs, s.all_reads
        start_and_writes = empty(s, chunks, pairs, s.key + chunk, s.value)
        self.rows = start_and_writes.unbind(0)
        """[M_0; u_1 .. u_C] per chunk: [P, K + C, V]."""
        self.reads = empty(s, chunks, pairs, chunk * reads, s.key).unbind(0)
        """All x of a chunk: [P, C * R, K]."""
        factors = empty(s, chunks, pairs, chunk, chunk + 1).zero_()
        factors.diagonal(1, 2, 3).fill_(1)
        self.factors = factors.unbind(0)
        """[P, C, 1 + C]: column 0 holds c_t, column 1 + i holds c_ti (0 for i > t)."""
        self.answers_TPRV = empty(s, steps, pairs, reads, s.value)
        self.answers = self.answers_TPRV.unbind(0)
        """All y of a token: [P, R, V]."""
        self.keys = empty(s, pairs, chunk, s.key)
        self.mixed = empty(s, pairs, max(2, reads), s.key + chunk)
        self.first_key_PK = empty(s, pairs, s.key)

    def place(self, step: int) -> tuple[int, int]:
        """Chunk and position inside it of a token of the tape."""
        return divmod(step, self.chunk)

    def open(self, c: int, memory_PKV: Tensor) -> None:
        """Start chunk c at the given memory."""
        self.rows[c][:, : self.s.key].copy_(memory_PKV)
        self.now_rows, self.now_reads, self.now_factors = (
            self.rows[c],
            self.reads[c],
            self.factors[c],
        )

    def write(self, j: int, key_PK: Tensor, decay_P1: Tensor) -> Tensor:
        """Take in token j's key and decay factor; returns the view [P, V] to fill with u."""
        self.keys[:, j].copy_(key_PK)
        f = self.now_factors
        if j:
            torch.mul(f[:, j - 1, : j + 1], decay_P1, out=f[:, j, : j + 1])
        else:
            f[:, 0, :1] = decay_P1
        return self.now_rows[:, self.s.key + j]

    def slots(self, j: int, first: int, count: int) -> Tensor:
        """View [P, count, K] to fill with the reads `first ..` of token j."""
        at = j * self.s.all_reads + first
        return self.now_reads[:, at : at + count]

    def read(self, step: int, j: int, first: int, count: int) -> Tensor:
        """Answers [P, count, V] to the reads in `slots`, from the memory after token j's write."""
        x, key = self.slots(j, first, count), self.s.key
        factors = self.now_factors[:, j].unsqueeze(1)
        scores = torch.bmm(x, self.keys[:, : j + 1].transpose(1, 2))
        mixed = self.mixed[:, :count, : key + j + 1]
        torch.mul(x, factors[:, :, :1], out=mixed[:, :, :key])
        torch.mul(scores, factors[:, :, 1 : j + 2], out=mixed[:, :, key:])
        answer = self.answers[step][:, first : first + count]
        return torch.bmm(mixed, self.now_rows[:, : key + j + 1], out=answer)

    def last(self, c: int, count: int) -> Tensor:
        """The memory [P, K, V] after `count` tokens of chunk c (the keys must be at hand)."""
        factors, rows, key = self.factors[c][:, count - 1], self.rows[c], self.s.key
        weighted = self.keys[:, :count] * factors[:, 1 : count + 1, None]
        memory = rows[:, :key] * factors[:, :1, None]
        return memory.baddbmm_(weighted.transpose(1, 2), rows[:, key : key + count])

    def open_reverse(self, c: int, count: int, memory_grad: Tensor) -> Tensor:
        """Prepare the reverse walk over chunk c; returns `<D_C, M_C>` [P], where the decays start.

        `memory_grad` is D_C [P, K, V]: what reaches the memory after the chunk from behind it.
        """
        s, reads = self.s, self.s.all_reads
        self.now_rows, self.now_reads, self.now_factors = (
            self.rows[c],
            self.reads[c],
            self.factors[c],
        )
        keys, next_key = self.keys[:, :count], slice(1, None, reads)
        keys[:, 0] = self.reads[c - 1][:, next_key][:, -1] if c else self.first_key_PK
        keys[:, 1:] = self.now_reads[:, next_key][:, : count - 1]
        factors = self.now_factors[:, :count, 1 : count + 1]
        to_end = factors[:, count - 1, :, None]
        writes = self.now_rows[:, s.key : s.key + count]
        self.write_grads = torch.bmm(keys * to_end, memory_grad)
        self.key_grads = torch.bmm(writes * to_end, memory_grad.transpose(1, 2))
        scores = torch.bmm(keys, self.now_reads[:, : count * reads].transpose(1, 2))
        scores.view(-1, count, count, reads).mul_(factors.transpose(1, 2).unsqueeze(-1))
        self.scores = scores
        self.answer_grads = empty(s, s.pairs, count * reads, s.value)
        self.overlaps = empty(s, s.pairs, count * reads, count)
        return (memory_grad * self.last(c, count)).sum((1, 2))

    def grad_slots(self, j: int, first: int, count: int) -> Tensor:
        """View [P, count, V] to fill with the gradients of token j's answers `first ..`."""
        at = j * self.s.all_reads + first
        return self.answer_grads[:, at : at + count]

    def reverse_read(self, j: int, first: int, count: int) -> Tensor:
        """Gradients [P, count, K] of the reads, once `grad_slots` holds those of the answers."""
        key, at = self.s.key, j * self.s.all_reads + first
        factors = self.now_factors[:, j].unsqueeze(1)
        rows = self.now_rows[:, : key + j + 1].transpose(1, 2)
        products = torch.bmm(self.grad_slots(j, first, count), rows)
        overlaps = self.overlaps[:, at : at + count, : j + 1]
        torch.mul(products[:, :, key:], factors[:, :, 1 : j + 2], out=overlaps)
        grad = products[:, :, :key] * factors[:, :, :1]
        return grad.baddbmm_(overlaps, self.keys[:, : j + 1])

    def write_grad(self, j: int) -> Tensor:
        """du_j [P, 1, V], once all answers of tokens j .. have their gradients."""
        at = j * self.s.all_reads
        return torch.baddbmm(
            self.write_grads[:, j : j + 1],
            self.scores[:, j : j + 1, at:],
            self.answer_grads[:, at:],
        )

    def key_grad(self, j: int) -> Tensor:
        """The part of dk_j [P, 1, K] that comes from the write, after `reverse_read` of j."""
        at = j * self.s.all_reads
        return torch.baddbmm(
            self.key_grads[:, j : j + 1],
            self.overlaps[:, at:, j : j + 1].transpose(1, 2),
            self.now_reads[:, at : self.overlaps.shape[1]],
        )

    def close_reverse(self, count: int, memory_grad: Tensor) -> Tensor:
        """D_0 [P, K, V], the gradient of the chunk's start memory."""
        factors = self.now_factors[:, :count]
        reads = self.now_reads[:, : count * self.s.all_reads]
        weighted = (reads.unflatten(1, (count, -1)) * factors[:, :, :1, None]).flatten(1, 2)
        grad = memory_grad * factors[:, count - 1, :1, None]
        return grad.baddbmm_(weighted.transpose(1, 2), self.answer_grads)
