"""`check_agent`: calls every method of an agent as the loops do, and requires the contract of agent.py."""

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import lead_of, mask_by_choice, mask_of
from torchpod.agent import Agent, Variables, bind, variables_of
from torchpod.dealer import weight_of, weights_of
from torchpod.env import Env
from torchpod.groups import Groups
from torchpod.nets import RunningMoments
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Box, EnvSpec, SpecTree
from torchpod.testing.contract import (
    OURS,
    ContractError,
    attributes,
    clone,
    difference,
    form,
    named_leaves,
    raised,
    require,
    require_batched,
    require_spec,
    require_tensor,
    rows,
    written,
)
from torchpod.types import FIRST, LAST, ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree

TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}
"""Between sums in different orders: vmapped, permuted, split."""
_OF_THE_RUN = frozenset(
    ("iteration", "env_steps", "env_steps_per_s", "wall_s", "compile_s", "healthy", "grad_norm")
    + ("episodes", "episode_return", "episode_length")
)
"""Names in metrics.jsonl that are no agent's to give; of `loss` it would be the same."""
_INSTEAD = {
    "one_hot(": "use torchpod.ops.features.one_hot, which looks at no value",
    "random operation": "draw from the keys, by torchpod.random",
    "dynamic shape": "keep all rows: choose by torch.where, or give rows weight 0",
    "out-of-place": "compute new tensors, and write into none",
    "data-dependent": "keep numbers tensors, and choose by torch.where",
    ".item()": "keep numbers tensors, and choose by torch.where",
}
"""What stands in a line that cannot be mapped or compiled, or in what torch says of it; and what to do."""


def check_agent(
    agent: Agent,
    env: Env,
    *,
    num_envs: int = 8,
    unroll_length: int = 32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    compile: bool = True,
    quick: bool = False,
) -> None:
    """Tests that an agent keeps the contract which the loops and the learner rely on.

    Lets it act, prepares the trajectory, and takes the gradient of its loss: shapes, purity, the meaning of
    weights, that every parameter learns (of an agent with `through_env`, through the environment; with
    `reuse_forward`, through the rollout), that all of it works for a population (vmap) and can be compiled.

    Args:
      agent: the agent; a copy is tested.
      env: where it acts.
      num_envs: B, even.
      unroll_length: T; long enough for some episodes to end, or the rule about resets goes untested.
      seed: of everything random.
      device: where to run.
      compile: False leaves out the test that the methods can be traced in one graph.
      quick: True leaves out that as well, the population, and that every parameter learns: the check with which every
        run of an agent of one's own begins.

    Raises:
      ContractError: with the rule that is broken.
    """
    if num_envs < 2 or num_envs % 2:
        raise ValueError(f"num_envs={num_envs} cannot be cut in halves; use an even number.")
    agent = copy.deepcopy(agent).to(device)
    _check_modules(agent, alone=quick)
    root = random.key(seed, device)
    env_keys, actor_keys, keys = (random.split(random.fold_in(root, i), num_envs) for i in range(3))
    params, buffers = variables_of(agent)
    params = _perturb(params, random.fold_in(root, 3))
    groups = _check_groups(agent)
    acted = trajectory = _with_ends(_check_act(agent, env, params | buffers, env_keys, actor_keys, unroll_length))
    if agent.replayed:
        trajectory = _windows(agent, acted)
        keys = random.split(keys[0], trajectory.timestep.step_type.shape[1])
    batch = _check_prepare(agent, params | buffers, trajectory, keys)
    _check_statistics(agent, params | buffers, acted)
    minibatch = _minibatch(agent, batch)

    def loss(own: Variables, batch: Batch, keys: Tensor) -> tuple[dict[str, Tensor], LossOutput]:
        target = None if agent.target_rate is None else bind(agent, params | buffers)
        out = bind(agent, own | buffers).loss(batch, keys, target)
        require(isinstance(out, LossOutput), f"loss() must return a LossOutput; it returned a {type(out).__name__}.")
        return (out.loss if isinstance(out.loss, dict) else {"loss": out.loss}), out

    def gradient(own: Variables, batch: Batch, keys: Tensor) -> Variables:
        gradients: Variables = {}
        for group, names in groups.items():
            part = {name: own[name] for name in names}
            gradients |= torch.func.grad(lambda p, g=group: loss(own | p, batch, keys)[0][g])(part)
        return gradients

    num_priorities = keys.shape[0] if agent.replayed else minibatch.steps["weight"].shape[-1]
    _check_loss(agent, groups, params, buffers, minibatch, num_priorities, keys[0], loss)
    _check_weights(agent, params, minibatch, keys, loss, gradient)
    if not (agent.reuse_forward or agent.through_env):
        own = {name: x.detach().requires_grad_() for name, x in params.items()}
        learned = [name for name, x in loss(own, minibatch, keys[0])[0].items() if x.requires_grad]
        require(bool(learned) or not groups, "loss() depends on no parameter: something in it is detached.")
    if quick:
        return
    if agent.recurrent:
        began = pytree.tree_map(lambda x: x[0], acted.timestep)
        _check_memory(agent, params | buffers, began, acted.actor_state, actor_keys)

    def gradient_through(own: Variables) -> Variables:
        """Of all losses, with the trajectory made of the same parameters."""

        def total(own: Variables) -> Tensor:
            step, carry = make_step(agent, env), start(agent, env, env_keys)
            _, made = unroll(step, own | buffers, carry, env_keys, actor_keys, length=unroll_length, grad=True)
            batch = _minibatch(agent, bind(agent, own | buffers).prepare(made, keys))
            return torch.stack([*loss(own, batch, keys[0])[0].values()]).sum()

        return torch.func.grad(total)(own)

    if agent.reuse_forward:
        _check_gradients(gradient_through(params))
    elif agent.through_env:
        require(agent.recurrent, "An agent with through_env must be recurrent: its loss gets the steps in order.")
        require(
            env.traits.differentiable,
            f"through_env needs an environment that is differentiable; {env.spec.name} is not.",
        )
        _check_gradients(gradient_through(params))
    else:
        _check_gradients(gradient(params, minibatch, keys[0]))

    timestep = pytree.tree_map(lambda x: x[0], acted.timestep)
    other = _perturb(params, random.fold_in(root, 4))
    state = acted.actor_state
    methods: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "act()": (lambda p, *a: bind(agent, p | buffers).act(*a), (timestep, state, actor_keys)),
        "prepare()": (lambda p, *a: bind(agent, p | buffers).prepare(*a), (trajectory, keys)),
        "loss() and its gradient": (gradient, (minibatch, keys[0])),
    }
    for name, (method, arguments) in methods.items():
        _check_vmap(name, method, params, other, arguments)
        if compile:
            compiled = torch.compile(method, backend="eager", fullgraph=True, dynamic=False)
            # These lines are compiled anew for each agent that is checked.
            with torch._dynamo.config.patch(recompile_limit=1_000, accumulated_recompile_limit=1_000):
                _works("compiled in one graph", name, lambda c=compiled, a=arguments: c(params, *a))


def _perturb(params: Variables, key: Tensor) -> Variables:
    """Parameters with some noise, so that none is zero by initialisation and none has a zero gradient by chance."""
    return {
        name: value + 0.01 * random.normal(random.fold_in(key, i), value.numel()).reshape(value.shape).to(value.dtype)
        for i, (name, value) in enumerate(params.items())
    }


def _check_modules(agent: Agent, *, alone: bool) -> None:
    """Refuses those that no pure function of parameters and keys can hold, or, if not `alone`, no population."""
    for name, module in agent.named_modules():
        what = f"{name} is a {type(module).__name__}"
        if isinstance(module, _NormBase):
            require(
                not (module.track_running_stats and module.training),
                f"{what} with running statistics, which it writes into its buffers; use nn.LayerNorm, or "
                "torchpod.nets.RunningMoments with Agent.statistics, or, in a pretrained network, call its eval().",
            )
        if isinstance(module, _DropoutNd):
            require(
                module.p == 0 or not module.training,
                f"{what} with p={module.p:g}, which draws from torch's generator; leave it out (p=0), or multiply by a "
                "mask drawn from the keys, (random.uniform(keys, n) >= p) / (1 - p).",
            )
        require(
            alone or type(module) not in (nn.RNN, nn.GRU, nn.LSTM),
            f"{what}, which neither torch.vmap, and so no population, nor torch.compile knows; use GRUCell or LSTMCell "
            "of torchpod.nets, step by step.",
        )


def _check_groups(agent: Agent) -> dict[str, list[str]]:
    """Parameter names per optimizer group."""
    require(
        agent.max_lag is None or agent.max_lag >= 0,
        f"max_lag must be a number of iterations, at least 0, or None for no limit; it is {agent.max_lag}.",
    )
    require(agent.target_interval >= 1, f"target_interval must be at least 1; it is {agent.target_interval}.")
    try:
        groups = Groups(agent).names
    except ValueError as error:
        raise ContractError(str(error)) from error
    unknown = sorted(agent.optimizer_intervals.keys() - groups)
    require(not unknown, f"optimizer_intervals must name some of optimizer_groups(), {sorted(groups)}, not {unknown}.")
    return groups


def _with_ends(trajectory: Trajectory) -> Trajectory:
    """With a reset in every other row where no episode has ended, so that what must hold there is tested."""
    timestep, middle = trajectory.timestep, trajectory.timestep.step_type.shape[0] // 2 - 1
    if (timestep.step_type == LAST).any():
        return trajectory
    step_type = timestep.step_type.clone()
    step_type[middle, ::2], step_type[middle + 1, ::2] = LAST, FIRST
    return trajectory._replace(timestep=timestep._replace(step_type=step_type))


def _check_act(
    agent: Agent, env: Env, variables: Variables, env_keys: Tensor, actor_keys: Tensor, length: int
) -> Trajectory:
    size = env_keys.shape[0]
    before = clone(variables_of(agent))
    for name, leaf in named_leaves(agent.initial_state(size), "initial_state(B)"):
        require_batched(leaf, size, name)
    carry = start(agent, env, env_keys)
    bound, timestep, state = bind(agent, variables), carry.timestep, carry.actor_state
    arguments = clone((timestep, state, actor_keys))
    result = _called(agent, "act()", variables, lambda: bound.act(timestep, state, actor_keys))
    require(
        isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], ActorOutput),
        "act() must return (ActorOutput, state).",
    )
    output, new_state = result
    _check_action(env.spec, output.action, timestep, size)
    require(isinstance(output.extras, dict), "ActorOutput.extras must be a dict.")
    for name, leaf in named_leaves(output.extras, "ActorOutput.extras"):
        require_batched(leaf, size, name)
    require(
        form(new_state) == form(state),
        "act() must return a state with the structure, shapes and dtypes of initial_state().",
    )
    changed = difference((timestep, state, actor_keys), arguments, "(timestep, state, keys)")
    require(changed is None, f"act() must not modify its arguments; it changed {changed}.")
    on_self = attributes(agent)
    changed = difference(bound.act(timestep, state, actor_keys), result, "result")
    require(
        changed is None,
        f"act() must be a function of its arguments; two equal calls differ in {changed}. Draw from the keys and "
        "keep nothing on self.",
    )
    changed = written(agent, on_self)
    require(changed is None, f"act() must keep nothing on self, but in its state; it wrote {changed}.")
    first, second = (bound.act(timestep, state, keys, False)[0].action for keys in (actor_keys, env_keys))
    changed = difference(first, second, "action")
    require(changed is None, "act(explore=False) must not be random: two keys gave two actions.")
    index = random.permutation(actor_keys[0], size)[: size // 2]
    changed = difference(
        bound.act(*rows((timestep, state, actor_keys), index)), rows(result, index), "result", **TOLERANCE
    )
    require(changed is None, f"act(): rows must be independent; leaving out environments changed {changed}.")
    _, trajectory = unroll(make_step(agent, env), variables, carry, env_keys, actor_keys, length=length)
    for t in range(0, length + 1, max(1, length // 8)):
        seen = pytree.tree_map(lambda x, t=t: x[t], trajectory.timestep)
        greedy = bound.act(seen, state, actor_keys, False)[0].action
        _check_action(env.spec, greedy, seen, size, "act(explore=False): ")
    changed = difference(variables_of(agent), before, "variables")
    require(changed is None, f"act() must not write to the agent; it changed {changed}.")
    return trajectory


def _check_memory(agent: Agent, variables: Variables, timestep: TimeStep, state: Tree, keys: Tensor) -> None:
    """That where an episode begins the memory of the last one does not matter."""
    other = pytree.tree_map(lambda x: x + 1 if x.is_floating_point() else x, state)
    timestep = timestep._replace(step_type=torch.full_like(timestep.step_type, FIRST))
    fresh, after = (bind(agent, variables).act(timestep, x, keys)[0].action for x in (state, other))
    changed = difference(after, fresh, "action", **TOLERANCE)
    require(
        changed is None,
        f"act() of a recurrent agent must begin anew where step_type is FIRST; another state before it changed the "
        f"{changed}. Take initial_state() there.",
    )


def _check_statistics(agent: Agent, variables: Variables, trajectory: Trajectory) -> None:
    seen = bind(agent, variables)("statistics", trajectory)
    modules = dict(agent.named_modules())
    for name, given in seen.items():
        x, *weight = given if isinstance(given, tuple) else (given,)
        module = modules.get(name)
        require(
            isinstance(module, RunningMoments), f"statistics() must name modules that are RunningMoments, not {name!r}."
        )
        shape = cast(RunningMoments, module).moments.mean.shape
        lead = x.shape[: x.ndim - len(shape)]
        require(
            x.shape == (*lead, *shape) and all(w.shape == lead for w in weight),
            f"statistics()[{name!r}] must have the shape {list(shape)} of its module behind other axes, weights the "
            f"shape of those alone; they are {[list(y.shape) for y in (x, *weight)]}.",
        )


def _check_action(spec: EnvSpec, action: Tree, timestep: TimeStep, size: int, how: str = "") -> None:
    observation, device = timestep.observation, timestep.step_type.device
    for group in spec.groups or (None,):
        one, seen, wanted, name = action, observation, spec.action, f"{how}action"
        if group is not None:
            require(
                isinstance(action, dict) and set(action) == set(spec.groups or ()),
                f"{name} must be a dict with one entry per group, {sorted(spec.groups or ())}.",
            )
            one, seen, wanted, name = action[group], observation[group], spec.action[group], f"{name}[{group!r}]"
        require_spec(one, _unbounded(wanted), lead_of(spec, group, size), device, name)
        if (mask := mask_of(seen)) is not None:
            numbers = cast(Tensor, one).reshape(*mask.shape[:-1], -1)  # of each choice one
            parts = zip(mask_by_choice(mask, wanted), numbers.split(1, -1), strict=True)
            allowed = all(part.gather(-1, number).all() for part, number in parts)
            require(allowed, f"{name} must be one that the action_mask allows.")


def _unbounded(spec: SpecTree) -> SpecTree:
    """Continuous actions may leave the box: environments clamp them."""
    if isinstance(spec, dict):
        return {k: _unbounded(v) for k, v in spec.items()}
    return Array(spec.shape, spec.dtype) if isinstance(spec, Box) else spec


def _windows(agent: Agent, trajectory: Trajectory) -> Trajectory:
    """What replay would make of it: all windows of `replayed` steps; of a recurrent agent the first of each row."""
    length, num_steps = agent.replayed, trajectory.timestep.step_type.shape[0] - 1
    require(
        length <= num_steps,
        f"replayed={length} steps are more than the unroll_length={num_steps} of this check; give a larger one.",
    )
    starts = [0] if agent.recurrent else range(num_steps - length + 1)

    def cut(tree: Tree, size: int) -> Tree:
        return pytree.tree_map(lambda x: torch.cat([x[i : i + size] for i in starts], 1), tree)

    timestep = cut(trajectory.timestep._replace(extras={}), length + 1)
    state = trajectory.actor_state if agent.recurrent else ()
    return Trajectory(timestep, cut(trajectory.output, length), state, ())


def _check_prepare(agent: Agent, variables: Variables, trajectory: Trajectory, keys: Tensor) -> Batch:
    before = clone(trajectory)
    batch = _called(agent, "prepare()", variables, lambda: bind(agent, variables).prepare(trajectory, keys))
    require(isinstance(batch, Batch), f"prepare() must return a Batch; it returned a {type(batch).__name__}.")
    require(
        isinstance(batch.steps, dict) and "weight" in batch.steps,
        "Batch.steps must be a dict that holds `weight`: how much each row counts.",
    )
    num_steps, size = trajectory.timestep.step_type.shape[0] - 1, keys.shape[0]
    length, weight = num_steps, batch.steps["weight"]
    if agent.replayed and weight.ndim == 2 and 0 < weight.shape[0] <= length + 1:
        length = weight.shape[0]  # a window may make fewer rows than it has steps, or keep its last timestep
    require_tensor(weight, (length, size), torch.float32, keys.device, "Batch.steps['weight']")
    for name, leaf in named_leaves(batch.steps, "Batch.steps"):
        require(
            isinstance(leaf, Tensor) and leaf.shape[:2] == (length, size),
            f"{name} must be a tensor [T, B, ...], here [{length}, {size}, ...].",
        )
    if agent.reuse_forward:
        _check_forward(trajectory.output.extras.get("forward", ()), batch.steps.get("forward", ()))
    is_last = trajectory.timestep.step_type == LAST
    # Of fewer rows than steps the agent alone knows which steps they are.
    resets = [is_last[i : i + length] for i in range(max(1, num_steps - length + 1))]
    for name in weights_of(batch.steps):
        x = batch.steps[name]
        require((x >= 0).all() and x.isfinite().all(), f"Batch.steps[{name!r}] must be at least 0, and finite.")
        require(
            any((x[reset] == 0).all() for reset in resets),
            f"Batch.steps[{name!r}] must be 0 at LAST: from there a reset leads to FIRST, and no transition.",
        )
    for name in agent.standardise:
        weight = batch.steps.get(weight_of(name))
        require(
            name in batch.steps and weight is not None and batch.steps[name].shape == weight.shape,
            f"standardise names {name!r}, so Batch.steps must hold it in the shape of {weight_of(name)!r}.",
        )
    if agent.recurrent:
        for name, leaf in named_leaves(batch.actor_state, "Batch.actor_state"):
            require_batched(leaf, size, name)
    _check_report(agent, batch)
    changed = difference(trajectory, before, "trajectory")
    require(changed is None, f"prepare() must not modify its arguments; it changed {changed}.")
    changed = difference(bind(agent, variables).prepare(trajectory, keys), batch, "result")
    require(changed is None, f"prepare() must be a function of its arguments; two equal calls differ in {changed}.")
    return batch


def _check_report(agent: Agent, batch: Batch) -> None:
    told = batch.steps | batch.report
    require(
        not batch.report or not (agent.replayed or agent.through_env),
        "Batch.report is for agents that learn from each trajectory as it comes; leave it out with replayed or "
        "through_env, and report by LossOutput.metrics.",
    )
    for name, x in batch.report.items():
        reward, weight = f"{name.rpartition('/')[0]}/reward".lstrip("/"), told.get(weight_of(name))
        require(reward in batch.report, f"Batch.report must have {reward!r} beside {name!r}.")
        require(
            weight is not None and x.shape == weight.shape,
            f"Batch.report[{name!r}] must have the shape of {weight_of(name)!r}; it is {list(x.shape)}.",
        )


def _check_forward(said: Tree, handed: Tree) -> None:
    """What an agent with `reuse_forward` says in `act` and hands on in `prepare`."""
    leaves = dict(named_leaves(said, "['forward']"))
    require(
        bool(leaves) and all(isinstance(x, Tensor) and x.is_floating_point() for x in leaves.values()),
        "An agent with reuse_forward must return what its networks say, floating-point tensors, in "
        "ActorOutput.extras['forward'].",
    )
    require(
        set(leaves) == {name for name, _ in named_leaves(handed, "['forward']")},
        f"An agent with reuse_forward must hand extras['forward'] of act() on as Batch.steps['forward'], with "
        f"{', '.join(leaves)}.",
    )


def _minibatch(agent: Agent, batch: Batch) -> Batch:
    """The whole batch as one minibatch, as the learner cuts it."""
    steps = dict(batch.steps)
    steps |= {name: steps[name] / steps[name].sum().clamp(min=1e-8) for name in weights_of(steps)}
    for name in agent.standardise:
        weight = steps[weight_of(name)]
        mean = (weight * steps[name]).sum()
        std = (weight * (steps[name] - mean).square()).sum().sqrt()
        steps[name] = (steps[name] - mean) / (std + 1e-8)
    if agent.recurrent:
        return Batch(steps, batch.actor_state)
    return Batch(pytree.tree_map(lambda x: x.flatten(0, 1), steps), ())


def _check_loss(
    agent: Agent,
    groups: dict[str, list[str]],
    params: Variables,
    buffers: Variables,
    batch: Batch,
    num_priorities: int,
    key: Tensor,
    loss: Callable,
) -> None:
    before = clone(batch)
    losses, out = _called(agent, "loss()", params | buffers, lambda: loss(params, batch, key))
    require(
        set(losses) == set(groups),
        f"loss() must return one loss per name of optimizer_groups(), {sorted(groups)}; it returned {sorted(losses)}.",
    )
    for name, value in losses.items():
        require_tensor(value, (), torch.float32, key.device, f"loss {name!r}")
        require(value.isfinite(), f"loss {name!r} must be finite; it is {value.item()}.")
    for name, value in out.metrics.items():
        require(name not in _OF_THE_RUN, f"metric {name!r} is a number of the run's own; give it another name.")
        require(isinstance(value, Tensor) and value.shape == (), f"metric {name!r} must be a scalar tensor.")
    if out.priority is not None:
        what = "window of replay" if agent.replayed else "row"
        require(
            out.priority.shape == (num_priorities,),
            f"LossOutput.priority must have one entry per {what}, {num_priorities} here; it has the shape "
            f"{list(out.priority.shape)}.",
        )
        require(
            (out.priority >= 0).all() and out.priority.isfinite().all(),
            "LossOutput.priority must be at least 0, and finite.",
        )
    for name, x in out.buffers.items():
        like = buffers.get(name)
        require(
            like is not None and like.is_floating_point() and like.shape == x.shape == (),
            f"LossOutput.buffers[{name!r}] must be a scalar, the new value of a buffer of the agent of that name.",
        )
    changed = difference(batch, before, "batch")
    require(changed is None, f"loss() must not modify its arguments; it changed {changed}.")
    again = loss(params, batch, key)[0]
    changed = difference(again, losses, "result")
    require(
        changed is None,
        f"loss() must be a function of its arguments; two equal calls differ in {changed}. Draw from the key.",
    )


def _check_weights(
    agent: Agent, params: Variables, batch: Batch, keys: Tensor, loss: Callable, gradient: Callable
) -> None:
    """That loss and metrics are sums over rows, times their weights."""
    axis = 1 if agent.recurrent else 0  # a recurrent agent sees its zero-weight rows, so take whole environments
    weight = batch.steps["weight"]
    num = weight.shape[axis]
    kept = torch.arange(num, device=weight.device) % 2 == 0

    def weigh(factor: Tensor | float, source: Batch = batch) -> Batch:
        def by(x: Tensor) -> Tensor:
            return x * (factor.reshape(-1, *[1] * (x.ndim - axis - 1)) if isinstance(factor, Tensor) else factor)

        return source._replace(steps=source.steps | {name: by(source.steps[name]) for name in weights_of(source.steps)})

    def value(batch: Batch, key: Tensor = keys[0]) -> Tree:
        losses, out = loss(params, batch, key)
        return losses, out.metrics

    def add(a: Tree, b: Tree) -> Tree:
        return pytree.tree_map(torch.add, a, b)

    whole = value(batch)
    changed = difference(add(value(weigh(kept.float())), value(weigh((~kept).float()))), whole, "result", **TOLERANCE)
    if changed is not None and not loss(params, batch, keys[0])[1].buffers:  # running statistics are of all that count
        told = "its values for two halves of the weights do not add up to that for all of them."
        raise ContractError(
            "loss() must be a sum over rows weighted by steps['weight'], and so must its metrics; "
            f"{changed} is not: {_columns_beside_rows(lambda: value(batch), num) or told}"
        )
    index = torch.where(kept, torch.arange(num, device=weight.device), 0)  # rows of weight 0 become copies of row 0
    altered = weigh(kept.float(), _select(batch, index, axis))
    changed = difference(
        gradient(params, altered, keys[0]), gradient(params, weigh(kept.float()), keys[0]), "gradient", **TOLERANCE
    )
    if changed is not None:
        told = (
            "what looks at the whole minibatch, such as advantage normalisation, is the learner's: see "
            "Agent.standardise."
        )
        raise ContractError(
            f"Rows of weight 0 must contribute no gradient; they change {changed}: "
            f"{_columns_beside_rows(lambda: value(batch), num) or told}"
        )
    if difference(value(batch, keys[1]), whole, "result") is not None:
        return  # noise is drawn per row of the minibatch: other rows, other noise
    twice = weigh(0.5, _select(batch, torch.arange(num, device=weight.device).repeat(2), axis))
    changed = difference(value(twice), whole, "result", **TOLERANCE)
    require(changed is None, f"Doubling the rows with half the weights must give the same loss; {changed} differs.")


class _OuterError(ValueError):
    """`[R, 1]` beside `[R]`."""


class _Outer(TorchFunctionMode):
    """Raises `_OuterError` where a column of `num` rows and a vector of them make a square."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self._num = num

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, num = func(*args, **(kwargs or {})), self._num
        shapes = [tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        square = isinstance(result, Tensor) and result.shape == (num, num)
        if square and (num, 1) in shapes and {(num,), (1, num)} & {*shapes}:
            raise _OuterError(f"[{num}, 1] beside [{num}] makes [{num}, {num}]")
        return result


def _columns_beside_rows(loss: Callable[[], Any], num: int) -> str:
    """Where a `[R, 1]` that should be `[R]` makes every row meet every other, as a sentence; empty if nowhere."""
    try:
        with _Outer(num):
            loss()
    except _OuterError as error:
        return f"{raised(error)[0].partition(': ')[2]}; each row meets every other: take squeeze(-1) of the former."
    return ""


def _select(batch: Batch, index: Tensor, axis: int) -> Batch:
    return Batch(
        pytree.tree_map(lambda x: x.index_select(axis, index), batch.steps),
        pytree.tree_map(lambda x: x[index], batch.actor_state),
    )


def _check_gradients(gradients: Variables) -> None:
    for name, value in gradients.items():
        require(value.isfinite().all(), f"Gradients must be finite; that of {name} is not.")
    without = [name for name, value in gradients.items() if not value.any()]
    require(not without, f"Every parameter must get a gradient from the loss of its group; {without} get none.")


def _check_vmap(
    name: str, method: Callable[..., Any], params: Variables, other: Variables, arguments: tuple[Any, ...]
) -> None:
    """Two members with different parameters at once, and one by one."""
    members = pytree.tree_map(lambda a, b: torch.stack([a, b]), params, other)
    both = pytree.tree_map(lambda x: torch.stack([x, x]), arguments)
    result = _works("mapped over a population with torch.vmap", name, lambda: torch.vmap(method)(members, *both))
    for i, own in enumerate((params, other)):
        member = pytree.tree_map(lambda x, i=i: x[i], result)
        changed = difference(member, method(own, *arguments), "result", **TOLERANCE)
        require(
            changed is None,
            f"{name} must give the same for a member of a population as alone; they differ in {changed}.",
        )


def _works(how: str, name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        told, text = raised(error)
        instead = next((f"; {repair}" for part, repair in _INSTEAD.items() if part in f"{text} {error}"), "")
        raise ContractError(f"{name} must work {how}; it raised {told}{instead}.") from error


@contextlib.contextmanager
def _assigned() -> Iterator[list[str]]:
    """Names of the parameters and buffers that modules assign meanwhile, on `self`."""
    found, assign = [], nn.Module.__setattr__

    def spy(self: nn.Module, name: str, value: Any) -> None:
        if name in self._buffers or name in self._parameters:
            found.append(name)
        assign(self, name, value)

    nn.Module.__setattr__ = spy
    try:
        yield found
    finally:
        nn.Module.__setattr__ = assign


def _called(agent: Agent, name: str, variables: Variables, call: Callable[[], Any]) -> Any:
    """The first call of a method, which says where it fails, and must leave the variables to the learner."""
    versions = {key: x._version for key, x in variables.items()}
    try:
        with _assigned() as changed:
            result = call()
        changed += [key for key, x in variables.items() if x._version != versions[key]]
        require(
            not changed,
            f"{name} must not change self.{', self.'.join(dict.fromkeys(changed))}: that is lost after the call. "
            "loss() returns the new value of a buffer, LossOutput(..., buffers={name: value}).",
        )
        return result
    except (ContractError, NotImplementedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if isinstance(error, ValueError) and frame.f_code.co_filename.startswith(OURS):
            raise  # a sentence of ours
        kept = not agent.recurrent and bool(pytree.tree_leaves(agent.initial_state(2)))
        more = " If loss() needs the state that initial_state() makes, say recurrent = True." if kept else ""
        raise ContractError(
            f"{name} must not raise, and of its first batch it raised {raised(error)[0]}.{more}"
        ) from error
