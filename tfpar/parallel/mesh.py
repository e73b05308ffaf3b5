"""`Mesh`: the devices of a run, arranged by axis.

Along the data axis are replicas, each of which trains on different examples. Along the pipeline axis are stages, which
hold consecutive layers of a replica; along the model axis are the devices that divide the weights of layers. The model
axis is the innermost, because links between neighbours are fastest. The devices of a replica belong to one worker, or
to several workers that hold no other replica.
"""

from __future__ import annotations

import dataclasses
import math

from tfpar.config import ConfigError, ExperimentConfig
from tfpar.parallel.pipeline.cuts import parse_beginnings

AXES = ("data", "pipeline", "model")
_PLANNED = ("sequence", "expert")
AUTO = "auto"  # the mesh that the planner chooses
# The options of a pipeline, with their defaults.
_OF_PIPELINES = {"stages": "", "stage_balance": "flops", "stages_per_device": 1, "pipeline_schedule": "1f1b"}

# The reason why XLA cannot compile the programs of a model axis.
COLLECTIVES_WITHIN = (
    "the devices of a replica communicate within its layers, for which TensorFlow has no XLA kernel on CPUs"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices by axis.

    Attributes:
      data: Number of replicas of the model.
      pipeline: Number of devices, or groups of devices, that hold the stages of a replica.
      model: Number of devices over which layers are divided.
    """

    data: int = 1
    pipeline: int = 1
    model: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.devices_of_replica

    @property
    def devices_of_replica(self) -> int:
        """Number of devices of one replica."""
        return self.pipeline * self.model

    @property
    def text(self) -> str:
        """The mesh as a value of `--mesh`."""
        sizes = dataclasses.asdict(self).items()
        return ",".join(f"{axis}:{size}" for axis, size in sizes if size > 1 or axis == "data")


def parse_sizes(text: str) -> dict[str, int]:
    """Returns the sizes that `--mesh` gives, by axis.

    Raises:
      ConfigError: An axis is unknown, or a size is not positive.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        axis, separator, size = (piece.strip() for piece in part.partition(":"))
        if axis in _PLANNED:
            raise ConfigError(f"--mesh={text}: there is no {axis!r} axis yet. The axes are {', '.join(AXES)}.")
        if axis not in AXES or axis in sizes or not separator or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"--mesh={text}: {part!r} is not AXIS:SIZE with one of the axes {', '.join(AXES)}, once each, and a "
                "size of at least 1. For example --mesh=data:2,model:4."
            )
        sizes[axis] = int(size)
    return sizes


def devices_of_replica(text: str) -> int:
    """Returns the number of devices of one replica, as far as `--mesh` gives it; otherwise 1.

    Raises:
      ConfigError: See `parse_sizes`.
    """
    sizes = parse_sizes(text)
    return sizes.get("pipeline", 1) * sizes.get("model", 1)


def devices_of_worker(text: str, workers: int) -> int:
    """Returns the number of devices per worker that `--mesh` implies.

    If the data axis has a size, that is the product of all sizes divided by the number of workers; otherwise it is the
    number of devices of a replica.

    Raises:
      ConfigError: See `parse_sizes`.
    """
    sizes = parse_sizes(text)
    return max(1, math.prod(sizes.values()) // workers) if "data" in sizes else devices_of_replica(text)


def check_beside_mesh(config: ExperimentConfig, mesh: Mesh) -> None:
    """Refuses options that do not work with replicas of several devices, and pipeline options without a pipeline.

    Args:
      config: The experiment.
      mesh: The mesh of the experiment.

    Raises:
      ConfigError: There is such an option; the message names the first one.
    """
    train, exchange, strategy = config.train, config.exchange, config.strategy
    if mesh.pipeline == 1:
        for name, idle in _OF_PIPELINES.items():
            if (value := getattr(strategy, name)) != idle:
                raise ConfigError(
                    f"--{name}={value} is for pipelines, and there is no pipeline. Add --mesh=pipeline:2, or leave it "
                    "out."
                )
    elif strategy.stages:
        parse_beginnings(strategy.stages, mesh.pipeline * strategy.stages_per_device)
    if train.shard == "weights" and mesh.pipeline > 1:
        raise ConfigError(
            f"--shard=weights does not work with --mesh={strategy.mesh}, which has a pipeline: each micro-batch would "
            "gather the weights of a stage again. Use --shard=gradients, or leave one of them out."
        )
    if exchange.exchange_retune_every and mesh.devices_of_replica > 1:
        raise ConfigError(
            f"--exchange_retune_every={exchange.exchange_retune_every} does not work yet with --mesh={strategy.mesh}, "
            "where replicas have several devices. Leave one of them out."
        )
    if train.jit_compile == "true" and mesh.model > 1:
        raise ConfigError(
            f"--jit_compile=true does not work with --mesh={strategy.mesh}: {COLLECTIVES_WITHIN}. Use "
            "--jit_compile=auto, or a mesh of data and pipeline axes."
        )
    if strategy.sequence_parallel and mesh.model == 1:
        raise ConfigError(
            f"--sequence_parallel divides positions over the model axis, and --mesh={strategy.mesh} has none. Use "
            "--mesh=model:2, or leave it out."
        )


def parse_mesh(text: str, *, workers: int, devices: int) -> Mesh:
    """Returns the mesh that `--mesh` describes.

    Args:
      text: The value of the option, such as `data:2,model:4`. If data is not named, it gets the remaining factor;
        otherwise the model axis gets it, unless pipeline is named too. If empty, every device is a replica.
      workers: Number of workers.
      devices: Number of devices per worker.

    Raises:
      ConfigError: An axis is unknown, a size is not positive, or the sizes do not match the devices; the message names
        sizes that would.
    """
    sizes, total = parse_sizes(text), workers * devices
    pipeline = sizes.get("pipeline", 1)
    divides_rest = "data" in sizes and "pipeline" not in sizes
    model = sizes.get("model") or (max(1, total // sizes["data"]) if divides_rest else 1)
    mesh = Mesh(data=sizes.get("data") or max(1, total // (pipeline * model)), pipeline=pipeline, model=model)
    where = f"{workers} worker{'s' * (workers != 1)} x {devices} device{'s' * (devices != 1)}"
    if mesh.devices != total:
        raise ConfigError(
            f"--mesh={text} is a mesh of {mesh.devices} devices, and there are {where} = {total}. The product of the "
            f"sizes must be {total}; --devices sets the number of devices of a worker."
        )
    of_replica = mesh.devices_of_replica
    if mesh.pipeline > 1 and of_replica > devices and devices % mesh.model and mesh.model % devices:
        raise ConfigError(
            f"--mesh={text}: the {mesh.model} devices that divide a stage must be those of whole workers or fit in "
            f"one, and there are {where}. Start workers whose number of devices is a multiple of {mesh.model} or "
            f"divides {mesh.model}, or leave out the model axis."
        )
    if devices % of_replica and of_replica % devices:
        axis = "pipeline" if mesh.pipeline > 1 else "model"
        raise ConfigError(
            f"--mesh={text}: a replica must consist of whole workers or fit in one, and there are {where}. Use "
            f"--mesh=data:{workers},{axis}:{devices}, or start {mesh.data} workers with --devices={of_replica}."
        )
    return mesh
