"""What a batch says of rewards and values before anything is learned from it: metrics, of each policy its own."""

import torch
from torch import Tensor

from torchpod.distributed import Ranks
from torchpod.types import Batch


def prefixes(batch: Batch) -> tuple[str, ...]:
    """Of the policies that report, `tagger/`; of a single one the empty string."""
    return tuple(name.removesuffix("reward") for name in batch.report if name.rpartition("/")[2] == "reward")


def measure(batch: Batch) -> tuple[Tensor, Tensor]:
    """What `metrics_of` needs, of G policies.

    Args:
      batch: from `Agent.prepare`; see `Batch.report`.

    Returns:
      `[G, 6]` float64, weighted sums of 1, rewards, value targets, their squares, what values miss of them, and its
      squares; and `[G, 2]` float64, the largest reward, and the negative of the least.
    """
    sums, largest = [], []
    for prefix in prefixes(batch):
        told = batch.steps | batch.report
        weight, reward = (told[prefix + name].double() for name in ("weight", "reward"))
        value, target = (
            batch.report.get(prefix + name, torch.zeros_like(reward)).double() for name in ("value", "value_target")
        )
        missed = target - value
        columns = (torch.ones_like(reward), reward, target, target * target, missed, missed * missed)
        sums.append(torch.stack([(weight * x).sum() for x in columns]))
        counts, none = weight > 0, -float("inf")
        largest.append(torch.stack([torch.where(counts, x, none).amax() for x in (reward, -reward)]))
    return torch.stack(sums), torch.stack(largest)


def of_all(ranks: Ranks, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """What `measure` says of the batches of all ranks, by one sum over them."""
    if ranks.world_size == 1:
        return sums, largest
    rows = largest.new_zeros(ranks.world_size, *largest.shape)
    rows[ranks.rank] = largest  # the others leave it as it is
    flat = ranks.sum(torch.cat([sums.flatten(), rows.flatten()]))
    return flat[: sums.numel()].view_as(sums), flat[sums.numel() :].view_as(rows).amax(0)


def metrics_of(names: tuple[str, ...], sums: Tensor, largest: Tensor) -> dict[str, Tensor]:
    """Rewards and explained variance of each policy, `{tagger/reward_mean: scalar}`; NaN where no row counts.

    The explained variance is that of Schulman's baselines, 1 - Var(target - value) / Var(target): 1 for values that say
    what came, 0 for such that know no more than a constant; NaN where all targets are alike, and of a policy that is
    not trained.

    Args:
      names: the prefixes.
      sums: `[..., G, 6]`, from `measure` or `of_all`.
      largest: `[..., G, 2]`, likewise.
    """
    total = sums[..., 0]
    reward, target, squares, missed, missed_squares = (sums[..., 1:] / total[..., None]).unbind(-1)
    variance = squares - target.square()
    left = (missed_squares - missed.square()).clamp(min=0.0)
    nothing = torch.full_like(total, float("nan"))
    found = {
        "reward_mean": reward,
        "reward_min": torch.where(total > 0, -largest[..., 1], nothing),
        "reward_max": torch.where(total > 0, largest[..., 0], nothing),
        # What is left of rounding is no variance.
        "explained_variance": torch.where(variance > 1e-12 * squares, 1.0 - left / variance, nothing),
    }
    return {prefix + name: x[..., i] for i, prefix in enumerate(names) for name, x in found.items()}
