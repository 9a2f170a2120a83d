"""Gradients through two updates: of a later loss with respect to what the first update used."""

import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.anakin import Anakin
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.learner import Learner, LearnerConfig
from torchpod.nets import MLP
from torchpod.types import Batch

T, B = 8, 4


def double(tree):
    return pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, tree)


class Critic(A2C):
    """With plain MLPs, which stay in float64; `Encoder` makes every observation float32."""

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.encoder, self.value_encoder = MLP(4, config.hidden), MLP(4, config.hidden)


def setting(seed):
    """A learner in float64 and three trajectories."""
    env = CartPole(max_episode_steps=5)
    # epsilon 0.1 and no annealing: Adam's first step is then no mere sign, and the derivative is not tiny
    config = LearnerConfig(
        num_epochs=2, num_minibatches=2, learning_rate=0.05, epsilon=0.1, max_grad_norm=0.5, anneal_learning_rate=False
    )
    anakin = Anakin(
        lambda: Critic(env.spec, A2CConfig(hidden=(6,))),
        env,
        num_envs=B,
        unroll_length=T,
        learner=config,
        num_iterations=10,
        compiler=Compiler(enabled=False),
    )
    state, trajectories = anakin.init(seed), []
    for _ in range(3):
        carry, trajectory = anakin.rollout(state)
        state = state._replace(carry=carry)
        trajectories.append(double(trajectory))
    agent = anakin.agent.double()
    learner = Learner(agent, config, num_iterations=10)
    return learner, double(learner.init(*variables_of(agent))), trajectories, state.learner_keys


def outer_loss(learner, start, trajectories, keys, **first):
    """The loss on the third trajectory after updates on the first, with `first` replaced, and on the second."""
    params, buffers = first.get("params", {}), first.get("buffers", {})
    state = start._replace(params=start.params | params, buffers=start.buffers | buffers)
    state, _ = learner.update(state, trajectories[0], keys)
    state = state._replace(buffers=start.buffers)  # what the second update and the loss use is left alone
    state, _ = learner.update(state, trajectories[1], random.advance(keys, 3))
    agent = bind(learner.agent, state.params | start.buffers)
    batch = agent.prepare(trajectories[2], keys)
    steps = pytree.tree_map(lambda x: x.flatten(0, 1), batch.steps)
    steps["weight"] = steps["weight"] / steps["weight"].sum()
    return agent.loss(Batch(steps), keys[0]).loss


def central_difference(fn, x, size=1e-5):
    return (fn(x + size) - fn(x - size)) / (2 * size)


def test_gradient_of_the_loss_after_two_updates_with_respect_to_the_discount_of_the_first(seed):
    setup = setting(seed)
    discount = torch.tensor(0.9, dtype=torch.float64)

    def fn(x):
        return outer_loss(*setup, buffers={"discount": x})

    gradient = torch.func.grad(fn)(discount)
    assert gradient.abs() > 1e-6
    torch.testing.assert_close(gradient, central_difference(fn, discount), rtol=1e-5, atol=1e-9)
    plain = discount.clone().requires_grad_()  # and in the other way of asking for it
    torch.testing.assert_close(torch.autograd.grad(fn(plain), plain)[0], gradient, rtol=1e-10, atol=1e-12)


def test_gradient_of_the_loss_after_two_updates_with_respect_to_parameters_of_the_first(seed):
    setup = setting(seed)
    start = setup[1]
    generator = torch.Generator().manual_seed(seed)
    direction = {k: torch.randn(v.shape, dtype=v.dtype, generator=generator) for k, v in start.params.items()}

    def fn(params):
        return outer_loss(*setup, params=params)

    def along(x):
        return fn({k: v + x * direction[k] for k, v in start.params.items()})

    gradient = torch.func.grad(fn)(start.params)
    assert all(g.isfinite().all() for g in gradient.values())
    slope = sum((gradient[k] * direction[k]).sum() for k in gradient)
    torch.testing.assert_close(
        slope, central_difference(along, torch.zeros((), dtype=torch.float64)), rtol=1e-5, atol=1e-9
    )


def test_a_population_of_meta_gradients_by_vmap(seed):
    setup = setting(seed)
    discounts = torch.tensor([0.5, 0.8, 0.99], dtype=torch.float64)

    def gradient(x):
        return torch.func.grad(lambda d: outer_loss(*setup, buffers={"discount": d}))(x)

    single = torch.stack([gradient(d) for d in discounts])
    torch.testing.assert_close(torch.vmap(gradient)(discounts), single, rtol=1e-8, atol=1e-12)


def test_a_gradient_that_is_zero_in_the_first_update_leaves_the_meta_gradient_finite(seed):
    learner, start, (first, *others), keys = setting(seed)
    nothing = pytree.tree_map(torch.zeros_like, (first.timestep.reward, first.output.extras["state_value"]))
    first = first._replace(
        timestep=first.timestep._replace(reward=nothing[0]),
        output=first.output._replace(extras=first.output.extras | {"state_value": nothing[1]}),
    )
    zero = {name: torch.zeros_like(value) for name, value in start.params.items()}

    def fn(discount):
        buffers = {name: 0 * start.buffers[name] for name in ("entropy_coefficient", "value_coefficient")}
        return outer_loss(learner, start, [first, *others], keys, params=zero, buffers=buffers | {"discount": discount})

    assert torch.func.grad(fn)(torch.tensor(0.9, dtype=torch.float64)).isfinite()
