"""`Mesh`: how the devices of a run are laid out, by axis.

The data axis has replicas, each of which sees its own examples; the model axis has the devices among which the weights
of one replica are divided. The model axis is the innermost: its devices belong to one worker, where links are fastest.
"""

from __future__ import annotations

import dataclasses

from tfpar.config import ConfigError, ExperimentConfig

AXES = ("data", "model")
_PLANNED = ("pipeline", "stage", "sequence", "expert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices by axis.

    Attributes:
      data: Replicas of the model.
      model: Devices of a replica.
    """

    data: int = 1
    model: int = 1

    @property
    def devices(self) -> int:
        """All devices."""
        return self.data * self.model


def parse_sizes(text: str) -> dict[str, int]:
    """The sizes that `--mesh` gives, by axis.

    Raises:
      ConfigError: An unknown axis, or no positive size.
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


def check_beside_mesh(config: ExperimentConfig, model_devices: int) -> None:
    """Refuses options that a model axis does not go with.

    Args:
      config: The experiment.
      model_devices: Devices on the model axis.

    Raises:
      ConfigError: The first of them.
    """
    train, exchange = config.train, config.exchange
    for name, value, idle in (
        ("shard", train.shard, "none"),
        ("exchange_retune_every", exchange.exchange_retune_every, 0),
    ):
        if value != idle and model_devices > 1:
            raise ConfigError(
                f"--{name}={value} does not work yet with --mesh={config.strategy.mesh}, where replicas have "
                "several devices. Leave one of them out."
            )


def parse_mesh(text: str, *, workers: int, devices: int) -> Mesh:
    """The mesh that `--mesh` asks for.

    Args:
      text: Such as `data:2,model:4`; an axis that is not named has the size that the others leave it. Empty: all
        devices are replicas.
      workers: Number of workers.
      devices: Devices of each worker.

    Raises:
      ConfigError: An unknown axis, no positive size, or sizes that do not suit the devices; with those that would.
    """
    sizes, total = parse_sizes(text), workers * devices
    model = sizes.get("model") or (max(1, total // sizes["data"]) if "data" in sizes else 1)
    mesh = Mesh(data=sizes.get("data") or max(1, total // model), model=model)
    where = f"{workers} worker{'s' * (workers != 1)} x {devices} device{'s' * (devices != 1)}"
    if mesh.devices != total:
        raise ConfigError(
            f"--mesh={text} is a mesh of {mesh.devices} devices, and there are {where} = {total}. Sizes must multiply "
            f"to {total}; --devices says how many devices a worker has."
        )
    if devices % mesh.model:
        raise ConfigError(
            f"--mesh={text}: a replica must lie within a worker, and there are {where}. Use "
            f"--mesh=data:{workers},model:{devices}, or start {mesh.data} workers with --devices={mesh.model}."
        )
    return mesh
