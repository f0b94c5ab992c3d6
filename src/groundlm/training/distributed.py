"""One process or many: torchrun's ranks, what they share, and who may write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundlm.errors import FailedElsewhere, UserError

TIMEOUT = timedelta(minutes=30)


def is_writer() -> bool:
    """Whether this process is the one that writes and speaks, also before and after a run."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of a run; alone, every method is the identity."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def join(cls, device: str) -> Ranks:
        """Read torchrun's environment and meet the other ranks (NCCL on GPUs, else gloo).

        Raises `UserError` for an environment that names some of its variables only.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        try:
            rank, world, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        except (KeyError, ValueError) as error:
            raise UserError(
                f"WORLD_SIZE is set but RANK or LOCAL_RANK is not a number ({error}): start "
                "several processes with torchrun"
            ) from None
        on_gpu = device != "cpu" and torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(local)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
        return cls(rank, world, local)

    def leave(self) -> None:
        """Part from the other ranks."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_writer(self) -> bool:
        """Rank 0 alone writes files and speaks."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """This rank's device: under torchrun, the GPU of its local rank.

        Raises `UserError` for a numbered GPU that all ranks would share.
        """
        if self.world == 1 or device.type != "cuda":
            return device
        if device.index is not None:
            raise UserError(f"training.device {device}: under torchrun each rank takes its own GPU")
        return torch.device("cuda", self.local_rank)

    def share(self, count: int) -> range:
        """This rank's part of `count` things: contiguous, sizes differing by at most one.

        Raises `UserError` when a rank would get nothing.
        """
        if count < self.world:
            raise UserError(f"training.batch_size {count} is less than the {self.world} ranks")
        return range(self.rank * count // self.world, (self.rank + 1) * count // self.world)

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the ranks, all of them in flight at once.

        Called once a step. A scan's weight gradients are all formed at its end, so there is no
        backward left to hide the exchange behind, and every rank holds the same parameters anyway:
        they start from one seed and take the same steps.
        """
        if self.world > 1:
            grads = [p.grad for p in parameters if p.grad is not None]
            for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
                work.wait()

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        """The largest of the ranks' values."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, device=self._device())
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """All ranks' rows [B, ...] in global order (every rank may hold a different number)."""
        if self.world == 1:
            return rows
        counts = torch.zeros(self.world, dtype=torch.int64, device=rows.device)
        counts[self.rank] = len(rows)
        sizes = self.sum(counts).tolist()
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that succeeds on every rank or on none.

        An error of the user's or of the run on one rank is raised there and ends the others with
        `FailedElsewhere`. The block may not meet the other ranks where it can fail on one alone.
        """
        error = None
        try:
            yield
        except UserError as caught:
            error = caught
        if self.world > 1:
            # The first rank that failed itself speaks for all.
            code = 0 if error is None else error.exit_code
            own = error is not None and not isinstance(error, FailedElsewhere)
            shared = torch.tensor([code, self.world - self.rank if own else 0])
            shared = shared.to(self._device())
            dist.all_reduce(shared, dist.ReduceOp.MAX)
            code, first = int(shared[0]), self.world - int(shared[1])
            if code and first != self.rank:
                raise FailedElsewhere(code) from None
        if error is not None:
            raise error

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """A block that the writer goes through first and the others after it."""
        if not self.is_writer:
            self.wait()
        try:
            yield
        finally:
            if self.is_writer:
                self.wait()

    def wait(self) -> None:
        """Wait until every rank has come here."""
        if self.world > 1:
            dist.barrier()

    def _device(self) -> torch.device:
        """Where small tensors must lie to be shared."""
        on_gpu = dist.get_backend() == "nccl"
        return torch.device("cuda", self.local_rank) if on_gpu else torch.device("cpu")
