"""Observations that are stacks of frames: only the newest is kept, and samples are to the bit what was seen."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import checkpoint, random
from torchpod.compile import Compiler
from torchpod.distributed import ALONE
from torchpod.replay import ReplayBuffer, ReplayConfig, memory
from torchpod.replay.segments import Segments
from torchpod.types import FIRST, LAST, MID, ActorOutput, TimeStep, Trajectory

B, T, K = 3, 4, 3
"""Environments, steps per iteration, and frames of two numbers in an observation."""


def films(seed, num, length=T):
    """Trajectories that follow upon each other. A new episode begins with one frame again and again, or, as after a
    lost life, goes on from the last one's."""
    rng = np.random.default_rng(seed)
    steps, step_type = [], np.full(B, FIRST)
    frames = np.repeat(rng.integers(256, size=(B, 1, 2, 1, 2)), K, 1)
    for _ in range(num * length + 1):
        steps.append((frames.copy(), step_type.copy()))
        begins_anew = (step_type == LAST) & (rng.random(B) < 0.7)
        step_type = np.where(step_type == LAST, FIRST, np.where(rng.random(B) < 0.3, LAST, MID))
        newest = rng.integers(256, size=(B, 1, 2, 1, 2))
        gone_on = np.concatenate([frames[:, 1:], newest], 1)
        frames = np.where(begins_anew[:, None, None, None, None], np.repeat(newest, K, 1), gone_on)
    observation = torch.from_numpy(np.stack([x for x, _ in steps])).to(torch.uint8).movedim(2, -2).flatten(-2)
    types = torch.from_numpy(np.stack([x for _, x in steps])).int()
    for i in range(num):
        now = slice(i * length, (i + 1) * length + 1)
        lead = types[now].shape
        timestep = TimeStep(types[now], torch.rand(lead), torch.ones(lead), observation[now], {})
        yield Trajectory(timestep, ActorOutput(torch.zeros(length, B, dtype=torch.int64), {}), (), ())


def make(frame_stack=K, prioritised=False, length=2, unroll_length=T, **more):
    config = ReplayConfig(capacity=60, min_size=1, prioritised=prioritised, frame_stack=frame_stack)
    return ReplayBuffer(
        config, num_envs=B, unroll_length=unroll_length, length=length, sequences=False, slack=2, **more
    )


def draw(ring, priorities, iteration, key, num=40):
    return ring.sample(ring.storage, priorities, torch.tensor(iteration), torch.tensor(0.4), num, key)


def places(ring, iteration, sample):
    """Times and environments at which the windows of a sample begin."""
    slot, env = sample.leaf // B, sample.leaf % B
    end = (iteration + 1) * ring.unroll_length
    return end - 1 - (end - 1 - slot) % ring.num_slots, env


@pytest.mark.parametrize("unroll_length", [1, T])
@pytest.mark.parametrize("prioritised", [False, True])
def test_what_is_sampled_is_what_was_seen(seed, prioritised, unroll_length):
    """At every iteration, several times around the ring, and the oldest steps too."""
    ring = make(prioritised=prioritised, unroll_length=unroll_length)
    priorities, ages, seen = ring.priorities("cpu"), set(), []
    for i, trajectory in enumerate(films(seed, 100 // unroll_length, unroll_length)):
        ring.insert(trajectory, torch.tensor(i), priorities)
        observation = trajectory.timestep.observation
        seen = [*seen[: i * unroll_length], *observation]
        if i < ring.fill_iterations:
            continue
        sample = draw(ring, priorities, i, random.at(random.key(seed), i))
        time, env = places(ring, i, sample)
        for step in range(ring.length + 1):
            want = torch.stack([seen[t + step][b] for t, b in zip(time.tolist(), env.tolist(), strict=True)])
            assert torch.equal(sample.trajectory.timestep.observation[step], want)
        ages |= {(i + 1) * unroll_length - t for t in time.tolist()}
    assert max(ages) == ring.window and observation.shape[-1] == 2 * K
    assert ring.storage["timestep"]["observation"].shape == (ring.num_slots, B, 2, 1, 2)


@pytest.mark.slow
def test_a_compiled_sample_of_a_population_is_that_of_whole_observations(seed):
    kept, whole = make(population=2), make(1, population=2)
    for i, trajectories in enumerate(zip(films(seed, 20), films(seed + 9, 20), strict=True)):
        both = pytree.tree_map(lambda *x: torch.stack(x), *trajectories)
        for ring in (kept, whole):
            ring.insert(both, torch.tensor([i, i]), ())
    compiled = Compiler(True)(lambda storage, key: kept.sample(storage, (), torch.tensor(19), torch.tensor(1), 20, key))
    for member in range(2):
        own = pytree.tree_map(lambda x, member=member: x[member], (kept.storage, whole.storage))
        got = compiled(own[0], random.key(seed))
        want = whole.sample(own[1], (), torch.tensor(19), torch.tensor(1), 20, random.key(seed))
        assert torch.equal(got.trajectory.timestep.observation, want.trajectory.timestep.observation)
        assert want.trajectory.timestep.observation.shape == (3, 20, 2, 1, 2 * K)


def test_a_ring_that_is_read_from_files_gives_the_same_samples(seed, tmp_path: Path):
    """Of the oldest steps too, whose frames are older still."""
    ring, again = make(), make()
    *before, last = films(seed, 21)
    for i, trajectory in enumerate(before):
        ring.insert(trajectory, torch.tensor(i), ())
    segments = Segments(ring, tmp_path, 0)
    folder = checkpoint.save(tmp_path, 20, {}, (), {}, ranks=ALONE, keep=1, manifest=segments.save(20))
    Segments(again, tmp_path, 0).restore(folder, 20, broken=False)
    samples = []
    for it in (ring, again):
        it.insert(last, torch.tensor(20), ())
        samples.append(draw(it, (), 20, random.key(seed), 400))
    begun = 21 * T - ring.window  # the oldest time; nothing is drawn that begins at a reset
    types = torch.cat([trajectory.timestep.step_type[:-1] for trajectory in (*before, last)])
    assert places(ring, 20, samples[0])[0].min() == begun + (types[begun:] != LAST).any(-1).int().argmax()
    assert torch.equal(*(sample.trajectory.timestep.observation for sample in samples))


def test_after_a_resume_without_the_episodes_frames_do_not_go_on(seed, tmp_path: Path):
    """The first observations of new ones repeat a frame, whatever came before."""
    ring, other = make(), make()
    for i, trajectory in enumerate(films(seed, 3)):
        ring.insert(trajectory, torch.tensor(i), ())
    folder = checkpoint.save(tmp_path, 3, {}, (), {}, ranks=ALONE, keep=1, manifest=Segments(ring, tmp_path, 0).save(3))
    Segments(other, tmp_path, 0).restore(folder, 3, broken=True)
    for i, new in enumerate(films(seed + 1, 3), 3):
        other.insert(new, torch.tensor(i), ())
        if i == 3:
            first = new.timestep.observation[0]
    sample = draw(other, (), 5, random.key(seed), 400)
    time, env = places(other, 5, sample)
    begins = time == 3 * T
    assert begins.sum() > 3
    assert torch.equal(sample.trajectory.timestep.observation[0, begins], first[env[begins]])


@pytest.mark.parametrize("game", ["Breakout-v5", "Pong-v5"])
def test_atari(seed, game):
    """A life that is lost ends an episode, and frames go on."""
    envpool = pytest.importorskip("torchpod.envs.host.envpool", reason="the extra `envpool` is not installed")
    env, length = envpool.EnvPool(game, episodic_life=True, img_height=21, img_width=21, max_episode_steps=90), 200
    try:
        _, timestep = env.init(random.split(random.key(seed), B))
        seen = [timestep]
        for t in range(length):
            action = random.to_integer(random.bits(random.split(random.key(seed + t), B), 1)[:, 0], 4)
            seen.append(env.step(None, action, random.split(random.key(t), B))[1])
    finally:
        env.close()
    seen = [t._replace(extras={}) for t in seen]
    timestep = pytree.tree_map(lambda *x: torch.stack(x), *seen)
    config = ReplayConfig(capacity=length * B, min_size=1, frame_stack=4)
    ring = ReplayBuffer(config, num_envs=B, unroll_length=length, length=3, sequences=False, slack=1)
    output = ActorOutput(torch.zeros(length, B, dtype=torch.int64), {})
    ring.insert(Trajectory(timestep, output, (), ()), torch.tensor(0), ())
    sample = draw(ring, (), 0, random.key(seed), 2000)
    time, env_index = sample.leaf // B, sample.leaf % B
    assert ring.storage["timestep"]["observation"].shape[2:] == (21, 21, 1)
    assert (timestep.step_type == LAST).sum() > B
    for step in range(4):
        assert torch.equal(sample.trajectory.timestep.observation[step], timestep.observation[time + step, env_index])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda x: {"image": x},
            "one observation whose last axis holds 3 frames, and this one is {'image': \\[2, 1, 6\\]}",
        ),
        (lambda x: x[..., :5], r"and this one is \[2, 1, 5\]; set it to the environment's own, or to 1"),
        (lambda x: x.flip(-1), "the observation of environment 0 in step 1 is no stack of 3 frames that goes on"),
    ],
)
def test_what_is_no_stack_of_frames_is_refused(seed, change, told):
    trajectory = next(films(seed, 1))
    changed = trajectory._replace(
        timestep=trajectory.timestep._replace(observation=change(trajectory.timestep.observation))
    )
    ring = make()
    with pytest.raises(ValueError, match=told):
        ring.insert(changed, torch.tensor(0), ())
    for check in (ring.check_memory, ring.check_frames):
        with pytest.raises(ValueError, match=told):
            check(changed)


def test_what_is_no_stack_of_frames_is_refused_later_too(seed):
    ring, (first, second) = make(), films(seed, 2)
    ring.insert(first, torch.tensor(0), ())
    stored = pytree.tree_map(torch.clone, ring.storage)
    timestep = second.timestep._replace(observation=second.timestep.observation.flip(-1))
    with pytest.raises(ValueError, match="in step 1 is no stack of 3 frames that goes on"):
        ring.insert(second._replace(timestep=timestep), torch.tensor(1), ())
    assert all(torch.equal(a, b) for a, b in zip(*map(pytree.tree_leaves, (stored, ring.storage)), strict=True))


def test_the_first_observation_of_a_run_repeats_a_frame(seed):
    trajectory = next(films(seed, 1))
    later = pytree.tree_map(lambda x: x[1:2], trajectory.timestep._replace(extras={}))
    with pytest.raises(ValueError, match="the observation of environment . in step 0 is no stack of 3 frames"):
        make().check_memory(trajectory._replace(timestep=later))
    first = pytree.tree_map(lambda x: x[:1], trajectory.timestep._replace(extras={}))
    make().check_memory(trajectory._replace(timestep=first))


def test_a_ring_without_frames_is_refused():
    with pytest.raises(ValueError, match="frame_stack=0 must be at least 1"):
        make(0)


def test_the_capacity_that_is_advised_fits(seed, monkeypatch):
    """With the frames that are kept beyond it."""
    trajectory = next(films(seed, 1))
    config = ReplayConfig(capacity=4000, min_size=1, frame_stack=K)
    size = {"num_envs": B, "unroll_length": T, "length": 1, "sequences": False}
    monkeypatch.setattr(memory, "free_bytes", lambda *_: (2000 * 33 / 0.9, "cpu"))
    with pytest.raises(ValueError, match="use at most algo.replay.capacity=") as refused:
        ReplayBuffer(config, **size).insert(trajectory, torch.tensor(0), ())
    fitting = int(str(refused.value).rstrip(".").rpartition("=")[2])
    assert 1000 < fitting < 4000
    ReplayBuffer(replace(config, capacity=fitting), **size).insert(trajectory, torch.tensor(0), ())
