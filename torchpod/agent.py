"""Agents: a plain `nn.Module` to their author, a pure function to the framework. Read types.py first.

The author writes methods that use `self.policy(...)` as usual. The loops call `bind(agent, variables).act(...)`, which
runs the method with the parameters and buffers of `variables` in place of the module's own. So one file serves one run,
a population (vmap over variables), several ranks, gradients through updates, and both loops, and never knows which.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchpod.types import ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree

Variables = dict[str, Tensor]
"""Parameters and buffers of an agent by name."""


class Agent(nn.Module):
    """Base of all agents: override `act`, `prepare` and `loss`.

    An agent is made as `MyAgent(env.spec, config)`; what its constructor's second argument is annotated with, a frozen
    dataclass, says which settings `algo.agent.*` there are.
    """

    recurrent: bool = False
    """True: `loss` gets whole sequences `[T, B', ...]`; False: rows `[R, ...]` shuffled over time and environment."""
    standardise: tuple[str, ...] = ()
    """Names in `Batch.steps` that the learner brings to mean 0, std 1, per minibatch and over all ranks."""
    target_rate: float | None = None
    """Target parameters follow by `target += rate * (params - target)` after each update; None for no targets."""
    target_interval: int = 1
    """Targets follow after every so many updates."""
    annealed: tuple[str, ...] = ()
    """Hyperparameters that fall linearly to 0 over the run, in `act` and `loss`, as those of the learner's `anneal`."""
    optimizer_intervals: Mapping[str, int] = {}
    """Optimizer groups that take a step after every so many updates, e.g. a policy that waits for its critic."""
    policy_groups: tuple[str, ...] = ()
    """Optimizer groups whose losses share no parameters: no step if nobody follows one (`steps["GROUP/weight"]` 0)."""
    replayed: int = 0
    """Steps T of the trajectories that `prepare` gets from replay, e.g. n of n-step targets; 0: no replay, it learns
    from what was just seen. Then `prepare` may return fewer rows than steps, or one more, `[T', B, ...]`; a recurrent
    agent gets `actor_state`, the others none, and `last_actor_state` is empty."""
    teams: Mapping[str, Callable[[dict[str, Tree], int], Tree]] = {}
    """Agents whose episodes are counted apart from those of their groups: picks them, `[..., N, ...]`, out of a tree by
    group, `[..., N_group, ...]`, with N_group at an axis."""
    max_lag: int | None = 0
    """How many iterations old the parameters may be that acted; 0: just those, and a batch is one update; None: any."""
    longest_unroll: int | None = None
    """Steps of an unroll at most, as replay would never give it some of a longer one; None: any."""
    hyperparameters: tuple[str, ...] = ()
    """Names of its own, as `hyperparameter` has registered them."""
    begins_as: Mapping[str, str] = {}
    """`{"policies.runner": "runs/first:runner"}`: parts that begin a new run as policies of another one."""
    may_fall_back: bool = False
    """True: what does not compile of this agent runs uncompiled, after a warning that says why."""
    through_env: bool = False
    """True: the gradient of `loss` also flows through steps of the environment (through_env.py): a `recurrent` agent's
    with summed losses, which detaches what they should not feel. In Anakin, and with the trait `differentiable`."""
    reuse_forward: bool = False
    """True: the update differentiates the forward pass of the rollout instead of computing it again
    (reuse_forward.py). `act` puts what its networks say into `extras["forward"]`, `prepare` hands it on as
    `steps["forward"]`, and `loss` begins there. For one epoch of one minibatch, one loss, and Anakin."""

    if TYPE_CHECKING:  # buffers registered by name have no other declaration

        def __getattr__(self, name: str) -> Any: ...

    def hyperparameter(self, name: str, value: float) -> None:
        """Registers `self.<name>` as a float32 scalar tensor, so that members of a population may differ in it."""
        self.register_buffer(name, torch.tensor(float(value)))
        self.hyperparameters = (*self.hyperparameters, name)

    def initial_state(self, batch_size: int) -> Tree:
        """The recurrent state of `batch_size` fresh episodes, `[B, ...]`; () for feed-forward agents."""
        del batch_size
        return ()

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """One decision per environment.

        Args:
          timestep: `[B, ...]`. Reset the recurrent state where `step_type == FIRST`.
          state: `[B, ...]`, from `initial_state` or the last `act`.
          keys: `[B, 3]`, one fresh key per environment.
          explore: False for evaluation: the greedy action.
        """
        raise NotImplementedError(f"{type(self).__name__} must define act(self, timestep, state, keys, explore=True).")

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """What is computed once per trajectory, before the epochs: advantages, targets, weights.

        Args:
          trajectory: T steps of B environments, or as many windows of `replayed` steps.
          keys: `[B, 3]`, one fresh key per environment.
        """
        raise NotImplementedError(f"{type(self).__name__} must define prepare(self, trajectory, keys).")

    def loss(self, batch: Batch, keys: Tensor, target: "Bound | None") -> LossOutput:
        """The loss of one minibatch, a sum over rows weighted by `batch.steps["weight"]`.

        Args:
          batch: rows of what `prepare` made.
          keys: `[3]`, a fresh key.
          target: the agent with its target parameters, if it has any; call as `target("method", ...)`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(self, batch, keys, target).")

    def statistics(self, trajectory: Trajectory) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """`{name of a RunningMoments module: [..., *its shape]}`, or a pair, with weights `[...]`.

        The learner adds this to their buffers after each update, over all ranks.
        """
        del trajectory
        return {}

    def optimizer_groups(self) -> dict[str, tuple[str, ...]]:
        """Parameter-name prefixes per loss: `{"policy": ("actor.",), "value": ("critic.",)}`.

        Each group has its own optimizer state, learning rate and gradient norm, and follows the gradient of the loss
        of its name alone. The default is one loss for all parameters.
        """
        return {"loss": ("",)}

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Dispatch for `functional_call`, which only calls modules."""
        return getattr(self, method)(*args, **kwargs)


class Bound:
    """An agent with given variables: `bound.act(...)`, or `bound("any_method", ...)`. Pure; nothing is kept."""

    def __init__(self, agent: Agent, variables: Variables) -> None:
        self._agent, self._variables = agent, variables

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the agent by name."""
        return functional_call(self._agent, self._variables, (method, *args), kwargs)

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        return self("act", timestep, state, keys, explore)

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        return self("prepare", trajectory, keys)

    def loss(self, batch: Batch, keys: Tensor, target: "Bound | None" = None) -> LossOutput:
        return self("loss", batch, keys, target)


def bind(agent: Agent, variables: Variables) -> Bound:
    """The agent as a pure function of its parameters and buffers."""
    return Bound(agent, variables)


def variables_of(agent: Agent) -> tuple[Variables, Variables]:
    """Detached copies of what an agent learns, and of its buffers: hyperparameters, statistics, frozen parameters."""
    params = {name: value.detach().clone() for name, value in agent.named_parameters()}
    frozen = {name: params.pop(name) for name, value in agent.named_parameters() if not value.requires_grad}
    return params, frozen | {name: value.detach().clone() for name, value in agent.named_buffers()}
