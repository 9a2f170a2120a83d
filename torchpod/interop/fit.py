"""Whether actor, networks and loss of TorchRL fit an environment; what does not is said in one sentence (unfit.py)."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrl.data import Composite
from torchrl.modules import GRUModule, LSTMModule, NoisyLinear
from torchrl.modules.tensordict_module.exploration import (
    AdditiveGaussianModule,
    AdditiveGaussianWrapper,
    EGreedyModule,
    EGreedyWrapper,
    OrnsteinUhlenbeckProcessModule,
    OrnsteinUhlenbeckProcessWrapper,
)
from torchrl.objectives import LossModule

from torchpod.interop.unfit import Shapes, Watched, for_actions, misread, miswritten, only_for, shapes_of, undivided
from torchpod.specs import Box, Discrete, EnvSpec, MultiDiscrete

_READS = misread, undivided
_EXPLORING = (
    *(EGreedyModule, EGreedyWrapper, AdditiveGaussianModule, AdditiveGaussianWrapper),
    *(OrnsteinUhlenbeckProcessModule, OrnsteinUhlenbeckProcessWrapper),
)


def require_kinds(actor: Any, loss: Any, spec: Any) -> None:
    """That these are what `LossAgent` takes, and that no module of theirs wants something that no loop here does."""
    for what, x, kind, repair in (
        ("an actor", actor, TensorDictModuleBase, "wrap networks in TensorDictModule and ProbabilisticActor"),
        ("a loss", loss, LossModule, "give an object of torchrl.objectives, made of the actor"),
        ("a spec", spec, EnvSpec, "give the env.spec of an environment"),
    ):
        if not isinstance(x, kind):
            found = f"the class {x.__name__}" if isinstance(x, type) else f"a {type(x).__name__}"
            raise ValueError(f"LossAgent takes {what} that is a {kind.__name__}, and got {found}; {repair}.")
    if any(is_lazy(x) for x in actor.parameters()):  # targets that were made of it have no size either
        raise ValueError(
            "the actor has layers of unknown size, such as LazyLinear; call it once with a TensorDict like the "
            "environment's before the loss is made of it, or give the sizes."
        )
    networks = {x for net in loss.__dict__.values() if isinstance(net, nn.Module) for x in net.modules()}
    if any(isinstance(x, NoisyLinear) for x in (*actor.modules(), *networks)):
        raise ValueError(
            "a network has a NoisyLinear, whose noise is drawn by calls of reset_noise() that no loop here makes; "
            "use Linear, and give LossAgent epsilon or noise."
        )
    for module in actor.modules():
        name = type(module).__name__
        if isinstance(module, LSTMModule | GRUModule):
            raise ValueError(
                f"the actor has a {name}, and LossAgent keeps no memory from step to step; use an actor without, "
                "or an agent of torchpod's with algo.agent.recurrent."
            )
        if isinstance(module, _EXPLORING):
            raise ValueError(
                f"the actor has a {name}, whose exploration nothing here anneals; leave it out, and give LossAgent "
                "epsilon and exploration_fraction, or noise."
            )


class Fit(NamedTuple):
    """See the module. Every method raises `ValueError`, or returns the sentence."""

    spec: EnvSpec
    """Of the environment."""
    loss: str
    """Its name."""
    on_policy: bool

    def check_action(self, actor: TensorDictModuleBase, action: Tensor, data: TensorDict) -> torch.dtype | None:
        """Shape and type of drawn actions, and how many values the actor chooses among.

        Args:
          actor: that drew them.
          action: `[rows, ...]`.
          data: what the actor read.

        Returns:
          The type of actions that are one-hot; None if they are not.
        """
        space, rows = self.spec.action, action.shape[0]
        chooses = isinstance(space, Discrete | MultiDiscrete)
        one_hot = isinstance(space, Discrete) and action.shape == (rows, space.num_values)
        one_hot = one_hot and bool((action != 0).sum(-1).eq(1).all() and action.sum(-1).eq(1).all())
        if not one_hot and (action.shape[1:] != space.shape or chooses == action.is_floating_point()):
            repair = (
                f"change its last layer so that its action, and loc and scale if any, are {list(space.shape)} per row"
            )
            if chooses == action.is_floating_point():
                repair = f"use an actor with a {'Categorical' if chooses else 'TanhNormal'} distribution"
                other = self.loss if self.on_policy else for_actions(self.loss, space)
                repair += f", and {other} in place of {self.loss}" if other != self.loss else ""
            found = f"{str(action.dtype).removeprefix('torch.')} {list(action.shape[1:])} per row"
            takes = f"{self.spec.name} takes {list(space.shape)} ({space})"
            raise ValueError(f"the actor's action is {found}, and {takes}; {repair}.")
        if isinstance(space, Discrete) and hasattr(actor, "get_dist"):
            with torch.no_grad():
                logits = getattr(cast(Any, actor).get_dist(data.clone()), "logits", None)
            what = f"an actor for {self.spec.name}, which takes {space},"
            if logits is not None:
                told = miswritten(what, "logits", space.num_values, {"logits": list(logits.shape[1:])})
                if told:
                    raise ValueError(told)
        return action.dtype if one_hot else None

    def check_kind(self, loss: LossModule) -> None:
        """That a loss which is for discrete or for continuous actions alone gets these."""
        space, kind = self.spec.action, only_for(type(loss))
        if kind is not None and kind != ("continuous" if isinstance(space, Box) else "discrete"):
            raise ValueError(
                f"{self.loss} is for {kind} actions, and {self.spec.name} takes {space}; use "
                f"{for_actions(self.loss, space)} in its place."
            )

    def check_bounds(self, loss: LossModule) -> None:
        """That a loss which was told of actions was told of these.

        SAC and its kin aim at an entropy of so many numbers, and TD3 clips its targets.
        """
        space, own = self.spec.action, cast(Any, loss)
        aim = own._buffers.get("target_entropy")
        if isinstance(space, Discrete) and aim is not None and aim > (most := math.log(space.num_values)):
            raise ValueError(
                f"target_entropy={aim:.4g} of {self.loss} is more than log({space.num_values})={most:.4g}, the most "
                f"that {self.spec.name} allows; make the loss with num_actions={space.num_values}, or a lower one."
            )
        if not isinstance(space, Box):
            return
        told = getattr(own, "_action_spec", None)
        if isinstance(told, Composite):
            told = told.get(getattr(own.tensor_keys, "action", "action"), None)
        shape = None if told is None else list(told.shape[len(told.shape) - len(space.shape) :])
        if shape is not None and shape != list(space.shape):
            raise ValueError(
                f"action_spec of {self.loss} has actions of shape {shape}, and {self.spec.name} takes "
                f"{list(space.shape)} ({space}); make the loss with those of the environment."
            )
        for name, bound in (("min_action", space.low), ("max_action", space.high)):
            x = own._buffers.get(name)
            if x is not None and bool(((x - bound).abs() > 1e-5 * max(1.0, abs(bound))).any()):
                raise ValueError(
                    f"{self.loss} clips actions by {name}={x.tolist()}, and {self.spec.name} takes {space}; make the "
                    "loss with the bounds of the environment, in action_spec or bounds."
                )

    def check_action_space(self, loss: LossModule, *, one_hot: bool) -> None:
        """That a loss for discrete actions reads them as the actor writes them."""
        space, reads = self.spec.action, getattr(loss, "action_space", None)
        if isinstance(space, Discrete) and reads is not None and one_hot == (reads == "categorical"):
            wrote, read = ([space.num_values], []) if one_hot else ([], [space.num_values])
            raise ValueError(
                f"the actor writes 'action' with shape {wrote} per row, and {self.loss} with action_space={reads!r} "
                f"reads it with shape {read}; give both the same action_space, 'categorical' (of an actor with a "
                "distribution: Categorical) or 'one_hot' (OneHotCategorical)."
            )

    def check_log_prob(self, actor: TensorDictModuleBase, loss: LossModule, wrote: Shapes, wanted: set[Any]) -> None:
        """That an actor writes one log-probability per row where the loss reads it.

        Args:
          actor: of a loss with a critic.
          loss: the loss.
          wrote: by the actor, beside the action.
          wanted: keys that the loss or its advantages read.
        """
        key = getattr(loss.tensor_keys, "sample_log_prob", None)
        if isinstance(key, list):
            raise ValueError(f"{self.loss} wants a log-probability per part of an action, {key}; it may have one.")
        if wrote.get(key):
            raise ValueError(
                f"the actor must write {key!r} with shape [] per row, and writes it with shape {wrote[key]}; give it a "
                "distribution of whole actions, such as IndependentNormal or TanhNormal."
            )
        if key in wanted and key not in wrote:
            repair = "build it with return_log_prob=True."
            if not hasattr(actor, "get_dist"):
                repair = "make it a ProbabilisticActor, with return_log_prob=True."
            if named := [other for other in getattr(actor, "log_prob_keys", ()) if other in wrote]:
                repair = (
                    f"build it with log_prob_key={key!r}, or tell the loss by set_keys(sample_log_prob={named[0]!r})."
                )
            raise ValueError(f"{self.loss} needs {key!r} of the actor, which writes {sorted(wrote)}; {repair}")

    def check_value(self, critic: TensorDictModuleBase, key: str, example: TensorDict) -> None:
        """That a critic writes one value per row where the loss reads it, `key`."""
        what = f"the critic of {self.loss}"
        with torch.no_grad():
            out = self.called(what, critic, example.select("observation"))
        if told := miswritten(what, key, 1, shapes_of(out, critic.out_keys)):
            raise ValueError(told)

    def called(self, what: str, module: TensorDictModuleBase, data: TensorDict) -> TensorDict:
        """What a module makes of data; `what` it is, in words."""
        watched = Watched({what: module})
        try:
            with watched:
                return module(data.clone())
        except Exception as error:
            told = self._read_wrongly({what: module}, data)
            if told is None and isinstance(error, NotImplementedError | ValueError):  # which says it itself
                raise ValueError(str(error)) from error
            raise ValueError(told or self.why(watched, {what: module}, what, data, error)) from error

    def why(
        self,
        watched: Watched,
        networks: Mapping[str, TensorDictModuleBase],
        what: str,
        data: TensorDict,
        error: Exception,
    ) -> str:
        """Why networks cannot use what they are given."""
        whose = f"what {self.spec.name} gives"
        if told := self._read_wrongly(networks, data):
            return told
        if (name := watched.network) and (layer := watched.layer()):
            read = shapes_of(data, networks[name].in_keys)
            return f"{name} cannot use {whose}, {read} per row: its {layer}; build it for that."
        lines = [line.strip() for line in str(error).split("\n") if line.strip()] or [type(error).__name__]
        told = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        if isinstance(error, AttributeError) and "get_dist" in told:
            return f"{what} asks the actor for its distribution, and it has none; make it a ProbabilisticActor."
        if isinstance(error, KeyError):
            told += "; let the actor write it, or tell the loss by set_keys what it is called."
        return f"{what} cannot use {whose}, {shapes_of(data)} per row: {told}"

    def _read_wrongly(self, networks: Mapping[str, TensorDictModuleBase], data: TensorDict) -> str | None:
        whose = f"what {self.spec.name} gives"
        found = (check(name, net.in_keys, data, whose) for name, net in networks.items() for check in _READS)
        return next(filter(None, found), None)

    def misvalued(
        self, keys: Any, watched: Watched, networks: Mapping[str, TensorDictModuleBase], *, every: bool
    ) -> str | None:
        """A sentence if networks of values did not write what the loss reads.

        Args:
          keys: of the loss.
          watched: saw the networks write.
          networks: by name.
          every: not only the values of choices.
        """
        action = self.spec.action
        reads = getattr(keys, "action", "action")
        names = [name for name in ("state_action_value", "action_value", "value") if hasattr(keys, name)]
        for name, net in networks.items():
            if "value_network" not in name or name not in watched.wrote or not names:
                continue
            of_states = name.startswith("value_network") and f"q{name}" in networks
            field = "value" if of_states else names[0]
            of_choices = field == "action_value" or (field == "state_action_value" and reads not in net.in_keys)
            if of_choices:
                size = action.num_values if isinstance(action, Discrete) else None
            else:
                size = None if self.loss == "TQCLoss" else 1  # quantiles, any number
            if (every or of_choices) and (told := miswritten(name, getattr(keys, field), size, watched.wrote[name])):
                return told
        return None
