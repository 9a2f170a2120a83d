"""Videos: what is played is what the evaluation plays, and files can be read back."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.test_evaluate import Lives, make
from torchpod import random
from torchpod.algos.multi_agent import IPPO, IPPOConfig
from torchpod.env import HostEnv
from torchpod.envs import CartPole, Catch, CovidEconomy, TagContinuous
from torchpod.evaluate import evaluate
from torchpod.metrics import short
from torchpod.recording import record_episode
from torchpod.render import drawing_of, frame_size
from torchpod.video import check_video, play, record, write_video

Image = pytest.importorskip("PIL.Image")


def read(path):
    """All frames `[T, H, W, 3]`, and how many there are per second."""
    if path.suffix == ".gif":
        with Image.open(path) as image:
            made = []
            for i in range(image.n_frames):
                image.seek(i)
                made.append(np.asarray(image.convert("RGB")))
            return np.stack(made), 1000 / image.info["duration"]
    with pytest.importorskip("av").open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), rate


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
@pytest.mark.parametrize("env", [CartPole(max_episode_steps=30), Catch()], ids=["cartpole", "catch"])
def test_a_video_can_be_read_back(env, suffix, tmp_path, seed):
    if suffix == ".mp4":
        pytest.importorskip("av")
    agent, variables = make(env, seed)
    key, path = random.key(seed), tmp_path / "new" / f"episode{suffix}"
    recording = record_episode(agent, env, variables, key, num_episodes=4)
    expected = [frame for frame, _ in play(env, recording)]
    score = evaluate(agent, env, variables, key, num_episodes=4)
    line = record(path, env, recording)
    assert line == f"{path}: {len(expected)} frames, return {short(score.returns[0].item())}"
    assert len(expected) == score.lengths[0] + 1  # the first frame is before the first step
    frames, rate = read(path)
    assert frames.shape == (len(expected), *frame_size(env), 3)
    assert rate == pytest.approx(drawing_of(env).fps, rel=0.15)  # a GIF counts hundredths of a second
    assert np.abs(frames.astype(int) - np.stack(expected)).mean() < 4
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("env", [TagContinuous(2, 10, max_episode_steps=9), CovidEconomy(9)], ids=["tag", "covid"])
def test_a_gif_has_the_colours_that_were_drawn(env, tmp_path, seed):
    """The 256 of a frame are none far from any that is there, be it of a few small discs."""
    torch.manual_seed(seed)
    agent = IPPO(env.spec, IPPOConfig(hidden=(8,)))
    recording = record_episode(agent, env, agent.state_dict(), random.key(seed), num_episodes=1, explore=True)
    expected = np.stack([frame for frame, _ in play(env, recording)]).astype(int)
    record(tmp_path / "episode.gif", env, recording)
    frames, _ = read(tmp_path / "episode.gif")
    assert np.abs(frames - expected).max() <= 16


def test_an_episode_goes_on_to_the_end_of_the_game(seed):
    """Which has two lives, and rewards that the agent sees clipped."""
    env = Lives()
    agent, variables = make(env, seed)
    score = evaluate(agent, env, variables, random.key(seed), num_episodes=3)
    played = list(play(env, record_episode(agent, env, variables, random.key(seed), num_episodes=3)))
    assert played[-1][1] == score.returns[0]
    assert len(played) == score.lengths[0] + 2  # the reset between the lives has a frame too


def test_what_cannot_be_written_is_said_before(monkeypatch):
    env = CartPole()
    for name in ("x.avi", "x"):
        with pytest.raises(ValueError, match=r"has the suffix .*; use one of .gif, .mp4\."):
            check_video(Path(name), env)
    with pytest.raises(
        ValueError, match="cartpole cannot be drawn: it is no tensor environment; record it with its own"
    ):
        check_video(Path("x.gif"), HostEnv(env))
    monkeypatch.setitem(sys.modules, "av", None)
    check_video(Path("x.gif"), env)
    with pytest.raises(ImportError, match=r"x.mp4 needs av: pip install 'torchpod-rl\[video\]'\."):
        check_video(Path("x.mp4"), env)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"x.gif needs PIL: pip install 'torchpod-rl\[video\]'\."):
        check_video(Path("x.gif"), env)


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_video_that_fails_leaves_no_file(suffix, tmp_path):
    if suffix == ".mp4":
        pytest.importorskip("av")

    def frames():
        yield np.zeros((32, 48, 3), np.uint8)
        raise RuntimeError("the drawing failed")

    with pytest.raises(RuntimeError, match="the drawing failed"):
        write_video(tmp_path / f"x{suffix}", frames(), 10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_one_frame_is_a_video_too(suffix, tmp_path):
    if suffix == ".mp4":
        pytest.importorskip("av")
    write_video(tmp_path / f"x{suffix}", [np.full((32, 48, 3), 200, np.uint8)], 10)
    assert (tmp_path / f"x{suffix}").stat().st_size > 100


def test_playing_leaves_the_global_generator_alone(seed):
    env = Catch()
    agent, variables = make(env, seed)
    before = torch.get_rng_state()
    list(play(env, record_episode(agent, env, variables, random.key(seed), num_episodes=1)))
    assert torch.equal(torch.get_rng_state(), before)
