"""The data that flows through every loop. Read this file first.

Axes have one letter everywhere: T time, B environment, N agent, A action, P population member. With several kinds of
agents (`groups`) observation, action, reward and discount are dicts by group name with leaves `[B, N_group, ...]`.
"""

from typing import Any, NamedTuple

from torch import Tensor

Tree = Any
"""A tensor, or any nesting of tuples, lists and dicts of tensors."""

FIRST, MID, LAST = 0, 1, 2
"""Step types, as in dm_env (https://github.com/google-deepmind/dm_env)."""
ACTION_MASK = "action_mask"
"""The entry of an observation that says which actions are allowed."""


class TimeStep(NamedTuple):
    """What a batch of environments returns, one row per environment.

    Termination is `LAST` with discount 0, truncation is `LAST` with discount 1. The step after `LAST` ignores the
    action and returns `FIRST` of the next episode ("next-step auto-reset"), so that the true final observation is
    never lost and no observation is stored twice.
    """

    step_type: Tensor
    """`[B]` int32, one of `FIRST`, `MID`, `LAST`."""
    reward: Tree
    """`[B]` float32 (`[B, N]` per group), reward of the transition that led here; 0 at `FIRST`."""
    discount: Tree
    """`[B]` float32 (`[B, N]` per group), 0 where the transition terminated, else 1. Gamma is the agent's affair."""
    observation: Tree
    """`[B, ...]`. A dict may hold an `action_mask` `[B, A]` bool (True = allowed)."""
    extras: dict[str, Tree]
    """A fixed dict, at least `raw_reward` `[B]` (before clipping) and `game_over` `[B]` bool (before episodic life).
    Groups whose agents can die add `alive`, `{group: [B, N]}` bool. `episode`, `{name: [B]}` float32, says of an
    episode what becomes the metric `episode_NAME`; it counts where `game_over`."""


class ActorOutput(NamedTuple):
    """What an agent decides in one step."""

    action: Tree
    """`[B]` int64 for discrete actions, `[B, A]` float32 for continuous ones."""
    extras: dict[str, Tree]
    """A fixed dict of what the update will need: `action_log_prob` `[B]`, `state_value` `[B]`, ..."""


class Trajectory(NamedTuple):
    """T steps of experience.

    `output[t]` was computed from `timestep[t]`; its action led to `timestep[t + 1]`, which carries its reward. Rows
    with `timestep.step_type[t] == LAST` are resets, no transitions: learners mask them.
    """

    timestep: TimeStep
    """`[T + 1, B, ...]`."""
    output: ActorOutput
    """`[T, B, ...]`."""
    actor_state: Tree
    """`[B, ...]`, the recurrent state before step 0."""
    last_actor_state: Tree
    """`[B, ...]`, the recurrent state after step T - 1: with `timestep[T]` it gives the bootstrap value."""


class Batch(NamedTuple):
    """What `Agent.prepare` makes of a trajectory, and, cut into minibatches, what `Agent.loss` gets.

    `steps["weight"]` says how much each row counts; 0 for resets. The learner rescales it so that the weights of one
    minibatch sum to 1 over all rows, chunks and ranks: a loss is therefore a *weighted sum* over rows. Where a row is
    of several agents, columns `steps["POLICY/weight"]` `[T, B, N]` say the same of each, and are rescaled likewise.
    """

    steps: dict[str, Tree]
    """`[T, B, ...]` from `prepare`. In `loss`: `[R, ...]`, or `[T, B', ...]` for recurrent agents."""
    actor_state: Tree = ()
    """`[B, ...]`, the recurrent state before step 0; empty for feed-forward agents."""
    report: dict[str, Tensor] = {}
    """Columns `[T, B]` that are reported and not learned from: `reward`, `value` and `value_target` become the metrics
    of measures.py. Of several policies `POLICY/reward` `[T, B, N]`, ...; of one that is not trained `weight` too."""


class LossOutput(NamedTuple):
    """What `Agent.loss` returns."""

    loss: Tensor | dict[str, Tensor]
    """Scalar, or one scalar per name of `Agent.optimizer_groups()`."""
    metrics: dict[str, Tensor]
    """Weighted sums, like the loss, hence means over the minibatch."""
    priority: Tensor | None = None
    """`[R]`, new priorities for prioritised replay: one per window that was sampled."""
    buffers: dict[str, Tensor] = {}
    """New values of scalar float buffers of the agent for the next minibatch: means over chunks and ranks, by rows."""


class Carry(NamedTuple):
    """What a loop owns between two steps."""

    env_state: Tree
    timestep: TimeStep
    actor_state: Tree
    step: Tensor
    """int64 scalar: steps since the start. With a key it names every random draw (see `random`)."""
