"""The actor-critic that ppo, a2c and impala share: networks, `act`, and log-probabilities of rows or sequences.

Discrete, multi-discrete and continuous actions, MLP or CNN, with a GRU, an LSTM or none. It cannot learn: `prepare` and
`loss` are the algorithm's, of parts that are here.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchpod.actions import mask_of
from torchpod.agent import Agent
from torchpod.algos.unfit import unfit
from torchpod.bounds import bounded
from torchpod.nets import CELLS, Encoder, ObservationNormalizer, RunningMoments, choose_torso, make_head, orthogonal
from torchpod.nets.nets import STATE
from torchpod.ops.returns import gae
from torchpod.specs import EnvSpec
from torchpod.types import FIRST, LAST, ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree

_SAID = {"action_log_prob": "`dist.log_prob(action)`", "state_value": "what the critic says of the observation"}
"""What `act` puts into its extras for `prepare`."""


@dataclass(frozen=True)
class ActorCriticConfig:
    """The networks, and what the losses have in common; defaults as for classic control in CleanRL and purejaxrl."""

    hidden: tuple[int, ...] = (64, 64)
    """Units of each hidden layer, of policy and value."""
    activation: str = "tanh"
    """Of hidden layers: tanh, relu or silu."""
    torso: str = "small"
    """For images `[H, W, C]`: small, nature, impala_shallow or impala_deep; see `make_torso`."""
    channels: tuple[int, ...] = (16,)
    """Of the torso "small", one 3x3 layer each; empty: flatten images for the MLP."""
    width: int = 1
    """Multiplies the channels of impala_deep."""
    depth: int = 1
    """Multiplies the residual blocks of impala_deep."""
    recurrent: int = 0
    """Units of a recurrent cell between encoder and heads; 0 for none."""
    cell: str = "gru"
    """Of the recurrent cell: gru or lstm."""
    shared: bool = False
    """One encoder for policy and value instead of two. With a recurrent cell it is always shared."""
    initial_log_std: float = 0.0
    """Of continuous actions, in units of half the action range."""
    normalize_observation: bool = False
    """Bring observations to mean 0 and variance 1, by all that was seen so far."""
    normalize_reward: bool = False
    """Divide rewards by the standard deviation of the discounted returns so far, as Engstrom et al. 2020
    (https://arxiv.org/abs/2005.12729) find in PPO's code."""
    reward_scale: float = 1.0
    """Multiplies rewards before they are learned from (not those that are reported)."""
    reward_clip: float = bounded(math.inf, least=1e-9)
    """Rewards are learned from as clipped to [-reward_clip, reward_clip], after they were scaled."""
    reuse_forward: bool = False
    """Differentiate the forward pass of the rollout, instead of computing it again; for one epoch of one minibatch."""
    discount: float = bounded(0.99, least=0, most=1)
    """Gamma: what a reward is worth one step later."""
    value_coefficient: float = 0.5
    """Of the value loss, where policy and value share a loss: c1 of eq. 9 of PPO's paper."""
    entropy_coefficient: float = 0.01
    """Of the entropy bonus: c2 of eq. 9 of PPO's paper."""


class ActorCritic(Agent):
    """See the module."""

    def __init__(self, spec: EnvSpec, config: ActorCriticConfig) -> None:
        super().__init__()
        head = make_head(spec.action, config.initial_log_std)
        if head is None:
            raise ValueError(unfit(type(self).__name__, "one Discrete, MultiDiscrete or Box action", spec))
        self.config, self.head = config, head
        self.recurrent, self.reuse_forward = config.recurrent > 0, config.reuse_forward
        self.hyperparameter("reward_scale", config.reward_scale)
        self.hyperparameter("reward_clip", config.reward_clip)
        if not config.hidden or min(*config.hidden, config.width, config.depth, 1) < 1 or config.recurrent < 0:
            raise ValueError(
                f"hidden={list(config.hidden)}, width={config.width} and depth={config.depth} must be at least 1 each, "
                f"and recurrent={config.recurrent} at least 0."
            )
        if config.cell not in CELLS:
            raise ValueError(f"cell={config.cell} is not known; use {' or '.join(CELLS)}.")
        self.return_moments = RunningMoments(()) if config.normalize_reward else None
        torso = choose_torso(
            spec,
            config.torso,
            channels=config.channels,
            hidden=config.hidden[-1],
            width=config.width,
            depth=config.depth,
        )  # it refuses what has more than one level of names
        self.normalizer = ObservationNormalizer(spec.observation) if config.normalize_observation else None
        make = functools.partial(Encoder, spec.observation, config.hidden, config.activation, torso)
        self.encoder = make()
        is_central = isinstance(spec.observation, dict) and STATE in spec.observation
        if is_central and (config.shared or self.recurrent):
            raise ValueError(
                f"values of {spec.name} see what its policy does not, and need an encoder; use shared=false and "
                "recurrent=0."
            )
        self.value_encoder = None if config.shared or self.recurrent else make(sees_state=is_central)
        features = self.encoder.out_features
        self.cell = CELLS[config.cell](features, config.recurrent) if self.recurrent else None
        features = config.recurrent or features
        self.policy = orthogonal(nn.Linear(features, head.num_outputs), 0.01)
        self.value = orthogonal(nn.Linear(features, 1), 1.0)

    def initial_state(self, batch_size: int) -> Tree:
        """Zeros `[B, state_size of the cell]`, or nothing; and, if rewards are normalised, the return so far `[B]`."""
        state = () if self.cell is None else torch.zeros(batch_size, self.cell.state_size)
        return state if self.return_moments is None else {"cell": state, "return": torch.zeros(batch_size)}

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """See `Agent.act`."""
        first = timestep.step_type == FIRST
        policy, value, cell = self._step(timestep.observation, first, state)
        action = self.head.draw(policy, keys, explore)
        log_prob, _ = self.head.log_prob(policy, action)
        extras: dict[str, Tree] = {"action_log_prob": log_prob, "state_value": value}
        if self.reuse_forward:
            extras["forward"] = {"policy": policy, "value": value}
        if self.return_moments is None:
            return ActorOutput(action, extras), cell
        # Discounted backwards in time: its spread is that of the returns, and it is known at once.
        total = torch.where(first, 0.0, state["return"] * self.discount) + timestep.reward
        return ActorOutput(action, extras | {"discounted_return": total}), {"cell": cell, "return": total}

    def statistics(self, trajectory: Trajectory) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """See `Agent.statistics`."""
        seen: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        if self.normalizer is not None:
            observation = pytree.tree_map(lambda x: x[:-1], trajectory.timestep.observation)
            seen |= {f"normalizer.{name}": x for name, x in self.normalizer.seen(observation).items()}
        if self.return_moments is not None:  # one of every transition: with its reward, and of resets none
            t, before = trajectory.timestep, trajectory.output.extras["discounted_return"]
            seen["return_moments"] = before * self.discount + t.reward[1:], (t.step_type[:-1] != LAST).float()
        return seen

    def _said(self, name: str, trajectory: Trajectory) -> Tensor:
        """What `act` has said of every step, `extras[name]` `[T, B]`; an `act` of one's own may have forgotten it."""
        extras, (length, size) = trajectory.output.extras, trajectory.timestep.step_type.shape
        x = extras.get(name)
        if isinstance(x, Tensor) and x.shape == (length - 1, size):
            return x
        found = f"it has shape {list(x.shape)}" if isinstance(x, Tensor) else f"act returned only {sorted(extras)}"
        raise ValueError(
            f"{type(self).__name__} needs extras[{name!r}] of shape [T, B], here [{length - 1}, {size}], and {found}; "
            f"let act put {_SAID[name]} there, [B], one number per row."
        )

    def _gae(self, trajectory: Trajectory, lambda_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Generalised advantages, value targets, and the values they begin from, `[T, B]` each."""
        t, v_tm1 = trajectory.timestep, self._said("state_value", trajectory)
        v_t = torch.cat([v_tm1[1:], self._bootstrap(trajectory)[None]])
        reward, discount = self._reward(t.reward[1:]), t.discount[1:] * self.discount
        advantage = gae(reward, discount, t.step_type[1:] == LAST, v_tm1, v_t, lambda_=lambda_)
        return advantage, advantage + v_tm1, v_tm1

    def _batch(self, trajectory: Trajectory, advantage: Tensor, value_target: Tensor, value: Tensor) -> Batch:
        """What every loss needs, of `[T, B]` each; resets get weight 0."""
        t, out = trajectory.timestep, trajectory.output
        steps = {
            "observation": pytree.tree_map(lambda x: x[:-1], t.observation),
            "first": t.step_type[:-1] == FIRST,
            "action": out.action,
            "advantage": advantage,
            "value_target": value_target,
            # LAST -> FIRST is a reset, no transition: mask it, or the value is learned across episodes.
            "weight": (t.step_type[:-1] != LAST).float(),
        }
        report = {"reward": t.reward[1:], "value": value, "value_target": value_target}
        return Batch(steps | self._reused(out), trajectory.actor_state, report)

    def _policy_gradient(self, batch: Batch) -> LossOutput:
        """`-log pi(a|s) A + c_v (V - v)^2 / 2 - c_e H`."""
        b = batch.steps
        policy, value = self._forward(batch)
        log_prob, entropy = self.head.log_prob(policy, b["action"])
        metrics = {
            "policy_loss": -log_prob * b["advantage"],
            "value_loss": 0.5 * (value - b["value_target"]).square(),
            "entropy": entropy,
        }
        loss = metrics["policy_loss"] + self.value_coefficient * metrics["value_loss"]
        loss = loss - self.entropy_coefficient * entropy
        return LossOutput((loss * b["weight"]).sum(), {k: (v * b["weight"]).sum() for k, v in metrics.items()})

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Policy output `[..., A]` and value `[...]` of a batch: those of the rollout if it is reused, or new ones."""
        if self.reuse_forward:
            return batch.steps["forward"]["policy"], batch.steps["forward"]["value"]
        return self._sequence(batch.steps["observation"], batch.steps["first"], batch.actor_state)

    def _reused(self, output: ActorOutput) -> dict[str, Tree]:
        """What `prepare` hands on to `_forward`."""
        return {"forward": output.extras["forward"]} if self.reuse_forward else {}

    def _cell_state(self, state: Tree) -> Tree:
        """That of the recurrent cell, of an agent's state."""
        return state if self.return_moments is None else state["cell"]

    def _reward(self, reward: Tensor) -> Tensor:
        """What is learned from, of what the environment gave."""
        if self.return_moments is not None:
            reward = reward / self.return_moments.std
        return (reward * self.reward_scale).clamp(-self.reward_clip, self.reward_clip)

    def _step(self, observation: Tree, first: Tensor, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        """Policy output `[B, A]`, value `[B]` and next recurrent state, for one step."""
        state, observation = self._cell_state(state), self._normalized(observation)
        features = self.encoder(observation)
        if self.cell is not None:
            state = self.cell.step(self.cell.input(features), torch.where(first[..., None], 0.0, state))
            features = self.cell.output(state)
        return *self._heads(features, observation), state

    def _sequence(self, observation: Tree, first: Tensor, state: Tree) -> tuple[Tensor, Tensor]:
        """Policy output `[..., A]` and value `[...]` of rows, or of sequences `[T, B, ...]` if recurrent."""
        state, observation = self._cell_state(state) if self.recurrent else (), self._normalized(observation)
        features = self.encoder(observation)
        if self.cell is not None:
            gates, hidden = self.cell.input(features), []
            for t in range(gates.shape[0]):
                state = self.cell.step(gates[t], torch.where(first[t, :, None], 0.0, state))
                hidden.append(self.cell.output(state))
            features = torch.stack(hidden)
        return self._heads(features, observation)

    def _bootstrap(self, trajectory: Trajectory) -> Tensor:
        """Value `[B]` of where the trajectory ends."""
        t = trajectory.timestep
        last = pytree.tree_map(lambda x: x[-1], t.observation)
        return self._step(last, t.step_type[-1] == FIRST, trajectory.last_actor_state)[1]

    def _normalized(self, observation: Tree) -> Tree:
        return observation if self.normalizer is None else self.normalizer(observation)

    def _heads(self, features: Tensor, observation: Tree) -> tuple[Tensor, Tensor]:
        if self.value_encoder is None:  # one layer of both, so that it is one network (kernels/mlp.py)
            weight = torch.cat([self.policy.weight, self.value.weight])
            bias = torch.cat([self.policy.bias, self.value.bias])
            policy, value = nn.functional.linear(features, weight, bias).split([len(bias) - 1, 1], -1)
        else:
            policy, value = self.policy(features), self.value(self.value_encoder(observation))
        if (mask := mask_of(observation)) is not None:
            policy = policy.masked_fill(~mask, -float("inf"))
        return policy, value.squeeze(-1)
