"""The logger of a run: metrics.jsonl, and the sinks that its settings ask for."""

from pathlib import Path

from torchpod.anakin import Anakin
from torchpod.config import ConfigError, TrainConfig
from torchpod.env import Env
from torchpod.metrics import Logger, Sink
from torchpod.run.progress import Advice, ConsoleSink, advise
from torchpod.run.sinks import CsvSink, TensorBoardSink, WandbSink
from torchpod.sebulba import Sebulba
from torchpod.sebulba.actor import splits


def make_logger(config: TrainConfig, run_dir: Path, resumed_at: int, loop: Anakin | Sebulba, env: Env) -> Logger:
    """The logger; rows of iterations behind `resumed_at` are dropped.

    Raises:
      ConfigError: if a sink cannot be made.
    """
    sinks: list[Sink] = []
    try:
        if config.logger.csv:
            sinks.append(CsvSink(run_dir, resume_at=resumed_at))
        if config.logger.tensorboard:
            sinks.append(TensorBoardSink(run_dir, resume_at=resumed_at))
        if config.logger.wandb:
            sinks.append(WandbSink(run_dir, project=config.logger.wandb_project, config=config.to_dict()))
    except (ImportError, ValueError) as error:
        for sink in sinks:
            sink.close()
        raise ConfigError(str(error)) from error
    if config.logger.console:
        advice = _advice(config, loop, env) if isinstance(loop, Sebulba) else None
        sinks.append(ConsoleSink(config.total_env_steps, config.num_iterations, advice=advice))
    return Logger(run_dir, sinks=sinks, resume_at=resumed_at)


def _advice(config: TrainConfig, loop: Sebulba, env: Env) -> Advice:
    settings, learner = config.loop, config.algo.learner
    one_pool = settings.pools_per_actor == 1 and settings.num_actor_threads > 0
    return advise(
        env,
        lag=settings.lag,
        max_lag=loop.agent.max_lag,
        queue_size=settings.queue_size,
        actors=loop.num_actors,
        pools=loop.num_actors * settings.pools_per_actor,
        one_stands_still=loop.device.type == "cuda" and one_pool and splits(env),
        num_epochs=learner.num_epochs,
        num_minibatches=learner.num_minibatches,
    )
