"""Tensor environments as `gymnasium.vector.VectorEnv`: NumPy in, NumPy out, registered as torchpod/CartPole-v1, ...

Importing this module registers them, and nothing else does: Gymnasium loads no entry points since 1.0. It imports the
module itself for `gymnasium.make_vec("torchpod.interop.gym_vector:torchpod/CartPole-v1")`. The rules of both sides are
the same (`AutoresetMode.NEXT_STEP`): the step after the last of an episode ignores the action and returns the first
observation of the next one, with reward 0.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import require_finite
from torchpod.compile import Compiler
from torchpod.env import TensorEnv
from torchpod.envs import MAKERS
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete, SpecTree
from torchpod.trees import contiguous
from torchpod.types import LAST, TimeStep, Tree

_NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
}


class VectorEnv(gymnasium.vector.VectorEnv):
    """A batch of a tensor environment behind Gymnasium's contract for vector environments.

    `step(actions)` takes `[B]` integers or `[B, A]` floats and returns observations `[B, ...]`, rewards `[B]` float32,
    terminations and truncations `[B]` bool, and no infos. On the CPU the arrays are the tensors' own memory; what is
    returned is never written to later, and may be written to.

    Args:
      env: such as `torchpod.envs.CartPole()`; `torchpod.testing.check_env` tests one of your own.
      num_envs: B.
      seed: of the first `reset` if it gets none. `reset(seed=...)` begins again from a seed, with the same episodes
        for the same actions; without one, further resets begin other episodes.
      compile: compile the step, which takes seconds at the first one.
      device: where the environments live; arrays are on the CPU.

    Raises:
      ValueError: for an environment on the host, one with groups of agents or a dict of actions; if there
        is no environment.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}

    def __init__(
        self, env: TensorEnv, num_envs: int = 1, seed: int = 0, *, compile: bool = False, device: str = "cpu"
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs} must be at least 1.")
        if not isinstance(getattr(env, "spec", None), EnvSpec):
            found = f"the class {env.__name__}" if isinstance(env, type) else repr(env)
            raise ValueError(f"VectorEnv takes an environment such as torchpod.envs.CartPole(), and got {found}.")
        if not env.traits.pure:
            raise ValueError(
                f"{env.spec.name} is stepped on the host; VectorEnv takes environments that are tensor programs."
            )
        if env.spec.groups is not None:
            raise ValueError(f"{env.spec.name} has groups of agents, which Gymnasium knows nothing of; use one agent.")
        if isinstance(env.spec.action, dict):
            raise ValueError(
                f"{env.spec.name} has a dict of actions, {sorted(env.spec.action)}, and VectorEnv takes one Box, "
                "Discrete or MultiDiscrete; make it one."
            )
        self.num_envs, self.render_mode = num_envs, None
        self.single_observation_space = space_of(env.spec.observation)
        self.single_action_space = space_of(env.spec.action)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._env, self._seed, self._device = env, seed, torch.device(device)
        self._step = Compiler(compile)(self._stepped)
        self._keys: Tensor | None = None
        self._state: Tree = None
        self._count = 0

    def _stepped(self, state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        return contiguous(self._env.step(state, action, keys))

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in every environment.

        Args:
          seed: one for all of them, `[B]` of their own, or None to go on from the last one.
          options: none are known.
        """
        if options:
            raise ValueError(f"{self._env.spec.name} has no options of reset; {sorted(options)} came, leave them out.")
        if seed is not None and not isinstance(seed, int | np.integer):
            if len(seed) != self.num_envs:
                raise ValueError(f"{len(seed)} seeds came for {self.num_envs} environments; give one, or one for each.")
            if not all(isinstance(each, int | np.integer) for each in seed):
                raise ValueError(f"seeds must be integers, and {list(seed)} came; give one for each environment.")
        self._count += 1
        if seed is not None or self._keys is None:
            self._keys, self._count = self._keys_of(self._seed if seed is None else seed), 0
        with torch.no_grad():
            self._state, timestep = self._env.init(random.at(self._keys, self._count))
            self._state = contiguous(self._state)
        return self._observation(timestep), {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """See `gymnasium.vector.VectorEnv.step`.

        Raises:
          ResetNeeded: before the first `reset`.
          ValueError: for actions of another shape, integers out of range, NaN and infinity. Floats outside the bounds
            go to the environment; torchpod's own clip them, as Gymnasium's do.
        """
        if self._keys is None:
            raise gymnasium.error.ResetNeeded(f"{self._env.spec.name}: call reset() before step().")
        action = torch.from_numpy(self._checked(actions)).to(self._device)
        self._count += 1
        with torch.no_grad():
            self._state, timestep = self._step(self._state, action, random.at(self._keys, self._count))
        last, ended = timestep.step_type == LAST, timestep.discount == 0
        outcome = (timestep.reward, last & ended, last & ~ended)
        rewards, terminations, truncations = (x.numpy(force=True) for x in outcome)
        return self._observation(timestep), rewards, terminations, truncations, {}

    def _keys_of(self, seed: int | Sequence[int]) -> Tensor:
        if isinstance(seed, int | np.integer):
            return random.split(random.key(int(seed), self._device), self.num_envs)
        return torch.stack([random.key(int(each), self._device) for each in seed])

    def _checked(self, actions: Any) -> np.ndarray:
        array, name = np.asarray(actions), self._env.spec.name
        if array.shape != self.action_space.shape:
            raise ValueError(
                f"{name} takes actions of shape {list(self.action_space.shape or ())}, and these are "
                f"{list(array.shape)}; give one for each of the {self.num_envs} environments."
            )
        space = self.single_action_space
        if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            floats = np.ascontiguousarray(array, space.dtype)
            require_finite(torch.from_numpy(floats), f"{name} takes finite numbers as actions")
            return floats
        num = space.n if isinstance(space, spaces.Discrete) else space.nvec
        if array.dtype.kind not in "iu" or array.min() < 0 or (array >= num).any():
            raise ValueError(
                f"{name} takes integers from 0 to {num - 1} as actions, and these are {array.dtype} from "
                f"{array.min()} to {array.max()}."
            )
        return np.ascontiguousarray(array, self.single_action_space.dtype)

    def _observation(self, timestep: TimeStep) -> Any:
        """Arrays that share the memory of the tensors, except where the state of the environment has it too."""
        kept = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(self._state)}

        def array(x: Tensor) -> np.ndarray:
            if x.untyped_storage().data_ptr() in kept:
                x = x.clone()
            return (x.view(torch.int8) if x.dtype == torch.bool else x).numpy(force=True)

        return pytree.tree_map(array, timestep.observation)


def space_of(spec: SpecTree) -> spaces.Space[Any]:
    """The space of Gymnasium for a spec, without the batch axis.

    Raises:
      ValueError: for a dtype that Gymnasium has no space of.
    """
    if isinstance(spec, dict):
        return spaces.Dict({name: space_of(inner) for name, inner in spec.items()})
    dtype: Any = _NUMPY.get(spec.dtype)
    if isinstance(spec, Discrete):
        return spaces.Discrete(spec.num_values, dtype=dtype)
    if isinstance(spec, MultiDiscrete):
        return spaces.MultiDiscrete(np.array(spec.nvec), dtype=dtype)
    if spec.dtype == torch.bool:
        return spaces.MultiBinary(spec.shape)
    if dtype is None:
        raise ValueError(f"Gymnasium has no space of {spec.dtype}; use float32, float64, uint8, int32, int64 or bool.")
    if isinstance(spec, Box):
        low, high = spec.low, spec.high
    elif np.issubdtype(dtype, np.integer):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        low, high = -np.inf, np.inf
    assert isinstance(spec, Array | Box)
    return spaces.Box(np.full(spec.shape, low, dtype), np.full(spec.shape, high, dtype), dtype=dtype)


def make(
    name: str, num_envs: int = 1, *, seed: int = 0, compile: bool = False, device: str = "cpu", **arguments: Any
) -> VectorEnv:
    """What `gymnasium.make_vec` calls.

    Args:
      name: a key of `torchpod.envs.MAKERS`.
      num_envs: see `VectorEnv`, and so the next three.
      seed: as there.
      compile: as there.
      device: as there.
      arguments: of the environment's own, such as `max_episode_steps` where it has that.

    Raises:
      ValueError: for an argument that the environment does not take.
    """
    known = list(inspect.signature(MAKERS[name]).parameters)
    for argument in arguments:
        if argument not in known:
            raise ValueError(f"{name} takes no argument {argument}; it takes {', '.join(known) or 'none'}.")
    env = MAKERS[name](**arguments)
    assert isinstance(env, TensorEnv)
    return VectorEnv(env, num_envs, seed, compile=compile, device=device)


def _register() -> None:
    for name, maker in MAKERS.items():
        # With groups of agents there is no such thing as a vector environment, as `VectorEnv` says.
        if isinstance(maker, type) and issubclass(maker, TensorEnv) and maker().spec.groups is None:
            id_ = f"torchpod/{maker.__name__}-v1"
            if id_ not in gymnasium.registry:
                gymnasium.register(id_, vector_entry_point=f"{__name__}:make", kwargs={"name": name})


_register()
