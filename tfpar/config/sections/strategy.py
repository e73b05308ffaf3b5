"""The strategy section."""

from __future__ import annotations

import dataclasses

from tfpar.config.fields import ConfigBase, option

STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker", "parameter_server", "tpu")
TRANSPORTS = ("auto", "tensorflow", "gloo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig(ConfigBase):
    """Where the computation runs."""

    strategy: str = option(
        "auto",
        "How replicas are placed on devices and machines. 'auto' uses a TPU if there is one, else the cluster in "
        "TF_CONFIG, else all GPUs, else the CPU.",
        choices=STRATEGIES,
        may_change_on_resume=True,
        per_host=True,
    )
    devices: int = option(
        0,
        "Devices (replicas) per worker. 0: all GPUs, or one CPU device. Without GPUs, N splits the CPU into N logical "
        "devices.",
        minimum=0,
        may_change_on_resume=True,
        per_host=True,
    )
    mesh: str = option(
        "",
        "How the devices are divided into axes, as in data:2,pipeline:2 or data:2,model:4. data: replicas, each of "
        "which trains on different examples. pipeline: stages of a replica, each with consecutive layers, which work "
        "on one micro-batch after the other (--accumulate_steps). model: devices that divide the weights of layers "
        "(tensor parallelism). A replica may span several workers. auto: the mesh that is predicted to be fastest and "
        "to fit, with micro-batches, recompute and shards; `python -m tfpar.plan` lists plans. Empty: each device is "
        "a replica.",
        may_change_on_resume=True,
    )
    sequence_parallel: bool = option(
        False,
        "With a model axis: between the divided layers of transformer blocks, each device holds only a part of the "
        "positions of every example, so that these activations need less memory. For models made of tfpar's "
        "TransformerBlock; the number of positions must be a multiple of the size of the axis.",
        may_change_on_resume=True,
    )
    device_memory: str = option(
        "",
        "Memory of a device, such as 16GiB: plans that are predicted to need more are left out with --mesh=auto, and "
        "refused with another mesh. Empty: detected for --mesh=auto; other meshes are not checked.",
        may_change_on_resume=True,
    )
    stages: str = option(
        "",
        "First layers of the second and later stages of a pipeline: regular expressions that are searched in the "
        "paths of the layers, in the order in which they run, as in 'block4,block8'. Empty: stages of about equal "
        "FLOPs, cut where few values cross.",
        may_change_on_resume=True,
    )
    stage_balance: str = option(
        "flops",
        "The quantity that the stages of a pipeline share equally, unless --stages sets where they begin: flops, so "
        "that no device waits for another; or weights, so that the fullest device needs as little memory for weights, "
        "gradients and the optimizer's state as possible, which may cost time.",
        choices=("flops", "weights"),
        may_change_on_resume=True,
    )
    stages_per_device: int = option(
        1,
        "Stages of a pipeline that each device holds, assigned to devices in turn (interleaved schedule): the "
        "pipeline fills and empties faster, but sends more tensors.",
        minimum=1,
        may_change_on_resume=True,
    )
    pipeline_schedule: str = option(
        "1f1b",
        "When a pipeline starts a micro-batch: 1f1b starts as many as keep all stages busy, and each further one when "
        "the backward pass of another is done; eager_1f1b starts up to twice as many, so that stages do not wait for "
        "tensors on the way; gpipe starts all at once, and keeps the activations of all.",
        choices=("1f1b", "eager_1f1b", "gpipe"),
        may_change_on_resume=True,
    )
    tpu: str = option(
        "",
        "Name or address of the TPU. Empty: taken from the environment; 'local' on a TPU VM.",
        may_change_on_resume=True,
        per_host=True,
    )
    transport: str = option(
        "auto",
        "What carries data between workers: TensorFlow's collectives (tensorflow), over NCCL between GPUs that it can "
        "connect, else over gRPC; or the native transport over Gloo (gloo), which is faster than gRPC and must be "
        "built in, and copies the data of GPUs through the host's memory. 'auto' is tensorflow where NCCL connects "
        "GPUs, else gloo if all workers can use it.",
        choices=TRANSPORTS,
        may_change_on_resume=True,
    )
    peer_timeout: float = option(
        30.0,
        "Seconds after which a worker or parameter server that does not answer counts as lost; all other workers (with "
        "parameter_server, the chief) then end with an error that names it. Slow workers (compiling, evaluating) still "
        "answer.",
        minimum=8.0,
        maximum=1e6,
        may_change_on_resume=True,
        per_host=True,
    )
    start_timeout: float = option(
        600.0,
        "Seconds that workers and parameter servers wait for each other at the start.",
        minimum=1.0,
        maximum=1e6,
        may_change_on_resume=True,
        per_host=True,
    )
    stall_timeout: float = option(
        1800.0,
        "Seconds in which a worker must make progress. A worker that does not, because of a deadlock for example, "
        "prints where it hangs and exits. The first step, a checkpoint, and each batch of an evaluation or prediction "
        "may take 5 times as long. 0: no limit.",
        minimum=0.0,
        maximum=1e7,
        may_change_on_resume=True,
        per_host=True,
    )
