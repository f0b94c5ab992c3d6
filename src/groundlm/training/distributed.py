"""One process or many: torchrun's ranks, what they share, and who may write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from groundlm.errors import UserError

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
        """Read torchrun's environment and meet the other ranks (NCCL on GPUs, else gloo)."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        ranks = cls(int(os.environ["RANK"]), world, int(os.environ["LOCAL_RANK"]))
        on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        if on_gpu:
            torch.cuda.set_device(ranks.local_rank)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
        return ranks

    def leave(self) -> None:
        """Part from the other ranks."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_writer(self) -> bool:
        """Rank 0 alone writes files and speaks."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """This rank's device: on a machine with several GPUs, its own."""
        return torch.device("cuda", self.local_rank) if device.type == "cuda" else device

    def share(self, count: int) -> range:
        """This rank's part of `count` things: contiguous, sizes differing by at most one.

        Raises `UserError` when a rank would get nothing.
        """
        if count < self.world:
            raise UserError(f"training.batch_size {count} is less than the {self.world} ranks")
        return range(self.rank * count // self.world, (self.rank + 1) * count // self.world)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages gradients over the ranks."""
        if self.world == 1:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int, device: torch.device) -> int:
        """The largest of the ranks' values."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """All ranks' rows [B, ...] in global order (every rank may hold a different number)."""
        if self.world == 1:
            return rows
        parts: list[Tensor | None] = [None] * self.world
        dist.all_gather_object(parts, rows.cpu())
        return torch.cat([part for part in parts if part is not None])

    def wait(self) -> None:
        """Wait until every rank has come here."""
        if self.world > 1:
            dist.barrier()
