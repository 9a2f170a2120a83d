"""Recurrent replay distributed DQN: Kapturowski et al. 2019 (https://openreview.net/forum?id=r1lyTjAqYX).

DQN with a recurrent cell that learns from sequences. Replay keeps the state that the actor had where a sequence began;
the first `burn_in` steps only bring that state up to the parameters of now (section 3). Values are learned on the scale
of eq. 1, and sequences are prioritised by a mixture of the largest and the mean TD error (section 2.3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.agent import Bound
from torchpod.algos.dqn import DQN, DQNConfig
from torchpod.bounds import bounded
from torchpod.nets import CELLS
from torchpod.ops.returns import n_step
from torchpod.ops.values import rescale, unscale
from torchpod.specs import EnvSpec
from torchpod.types import FIRST, LAST, ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree


@dataclass(frozen=True)
class R2D2Config(DQNConfig):
    """Sequences begin where unrolls began.

    `algo.unroll_length` is the distance between two: at most `length`, or the steps between would not be learned from.
    """

    hidden: tuple[int, ...] = (64,)
    recurrent: int = 64
    """Units of the recurrent cell."""
    cell: str = "lstm"
    """Of the recurrent cell: gru or lstm."""
    burn_in: int = 4
    """First steps of a sequence, which only bring the stored state of the cell up to date."""
    length: int = 8
    """Steps of a sequence that are learned from."""
    rescale: float = bounded(1e-3, least=0)
    """Epsilon of eq. 1 of the paper, the scale of values; 0: they are learned as they are."""
    largest_share: float = bounded(0.9, least=0, most=1)
    """Share of a sequence's largest TD error in its priority, eta of section 2.3; the rest is the mean's."""
    epsilon: float = 0.4
    epsilon_spread: float = 7.0


class R2D2(DQN):
    """See the module."""

    recurrent = True
    bounds_errors = False

    def __init__(self, spec: EnvSpec, config: R2D2Config = R2D2Config()) -> None:
        if config.cell not in CELLS:
            raise ValueError(f"cell={config.cell} is not known; use {' or '.join(CELLS)}.")
        if config.burn_in < 0 or config.length < 1 or config.recurrent < 1:
            raise ValueError(
                f"burn_in={config.burn_in} must be at least 0, length={config.length} and recurrent="
                f"{config.recurrent} at least 1."
            )
        super().__init__(spec, config, features=config.recurrent)
        self.r2d2 = config
        self.cell = CELLS[config.cell](self.encoder.out_features, config.recurrent)
        self.longest_unroll = config.length
        self.replayed = config.burn_in + config.length + config.n_step - 1

    def initial_state(self, batch_size: int) -> Tree:
        """Zeros `[B, state_size of the cell]`."""
        return torch.zeros(batch_size, self.cell.state_size)

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """Epsilon-greedy, every environment with its own epsilon."""
        state = torch.where((timestep.step_type == FIRST)[:, None], 0.0, state)
        state = self.cell.step(self.cell.input(self.encoder(timestep.observation)), state)
        action = self.best(self.heads(self.cell.output(state)), timestep.observation)
        return ActorOutput(self.explored(action, timestep.observation, keys) if explore else action, {}), state

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """The sequence as it is, `[L + 1, K, ...]`, and for each step that is learned from where its n steps end."""
        t, c = trajectory.timestep, self.r2d2
        last = t.step_type == LAST
        clipped = t.reward.clamp(-self.reward_clip, self.reward_clip)
        returns, discounts, ends = [], [], []
        for i in range(c.burn_in, c.burn_in + c.length):
            part = slice(i + 1, i + 1 + c.n_step)
            total, discount, steps = n_step(clipped[part], t.discount[part], last[part], discount=self.discount)
            returns.append(total)
            discounts.append(discount)
            ends.append(i + steps)
        row = torch.zeros_like(clipped)

        def whole(parts: list[Tensor]) -> Tensor:  # [length, K] among all L + 1
            after = row[c.burn_in + c.length :].to(parts[0].dtype)
            return torch.cat([row[: c.burn_in].to(parts[0].dtype), torch.stack(parts), after])

        steps = {
            "observation": t.observation,
            "first": t.step_type == FIRST,
            "action": pytree.tree_map(lambda x: torch.cat([x, x[-1:]]), trajectory.output.action),
            "reward": whole(returns),
            "discount": whole(discounts),
            "end": whole(ends),
            "weight": whole([(~last[i]).to(row.dtype) for i in range(c.burn_in, c.burn_in + c.length)]),
        }
        return Batch(steps, trajectory.actor_state)

    def sequence(self, observation: Tree, first: Tensor, state: Tensor) -> Tensor:
        """What the network says along sequences, `[L + 1, R, A, outputs]`; no gradient flows through the burn-in."""
        gates, hidden = self.cell.input(self.encoder(observation)), []
        for i in range(first.shape[0]):
            if i == self.r2d2.burn_in:
                state = state.detach()
            state = self.cell.step(gates[i], torch.where(first[i, :, None], 0.0, state))
            hidden.append(self.cell.output(state))
        return self.heads(torch.stack(hidden))

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """Section 2.3: double, n-step, on the scale of eq. 1."""
        assert target is not None
        b, c = batch.steps, self.r2d2
        inputs = b["observation"], b["first"], batch.actor_state
        outputs = self.sequence(*inputs)
        following = target("sequence", *inputs)
        best = self.best(outputs if c.double else following, b["observation"])
        value = self.values(self._of(outputs, b["action"]).unsqueeze(-2)).squeeze(-1)  # [L + 1, R]
        ahead = self.values(self._of(following, best).unsqueeze(-2)).squeeze(-1).gather(0, b["end"])
        wanted = rescale(b["reward"] + b["discount"] * unscale(ahead, c.rescale), c.rescale)
        td = (wanted.detach() - value) * (b["weight"] > 0)
        loss = (0.5 * td.square() * b["weight"]).sum()
        size = td.detach().abs()
        counted = (b["weight"] > 0).sum(0).clamp(min=1)
        priority = c.largest_share * size.amax(0) + (1.0 - c.largest_share) * size.sum(0) / counted
        metrics = {"value": (unscale(value, c.rescale) * b["weight"]).sum(), "td_error": (size * b["weight"]).sum()}
        return LossOutput(loss, metrics, priority)
