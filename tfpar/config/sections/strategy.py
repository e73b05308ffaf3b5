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
        "How replicas are laid out. 'auto' uses a TPU if there is one, else the cluster in TF_CONFIG, else all GPUs, "
        "else the CPU.",
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
        "How the devices of all workers are laid out, as in data:2,pipeline:2 or data:2,model:4. The data axis has "
        "replicas. The pipeline axis has stages, which hold consecutive layers and work on one micro-batch after the "
        "other (--accumulate_steps); on the model axis, the weights of layers are divided (tensor parallelism). The "
        "devices of a replica lie within a worker, or on several workers that have no other replica. auto: what fits "
        "and is predicted to be fastest, with micro-batches, recompute and shards; `python -m tfpar.plan` lists plans. "
        "Empty: each device is a replica.",
        may_change_on_resume=True,
    )
    sequence_parallel: bool = option(
        False,
        "With a model axis: between the divided layers of transformer blocks, each of its devices has some positions "
        "of every example, so that activations there take as much less memory. For models of tfpar's TransformerBlock, "
        "with a number of positions that the axis divides.",
        may_change_on_resume=True,
    )
    device_memory: str = option(
        "",
        "Memory of a device, such as 16GiB: plans that are predicted to need more are left out with --mesh=auto, and "
        "refused with another mesh. Empty: asked for --mesh=auto, else not checked.",
        may_change_on_resume=True,
    )
    stages: str = option(
        "",
        "Where the stages of a pipeline begin, from the second on: regular expressions, searched in the paths of "
        "layers in the order in which they run, as in 'block4,block8'. Empty: stages of about equal FLOPs, cut where "
        "little crosses.",
        may_change_on_resume=True,
    )
    stage_balance: str = option(
        "flops",
        "What the stages of a pipeline are to have equally much of, unless --stages says where they begin: flops, so "
        "that no device waits for another; or weights, so that the fullest device needs as little memory for weights, "
        "gradients and the optimizer's state as possible, which may cost time.",
        choices=("flops", "weights"),
        may_change_on_resume=True,
    )
    stages_per_device: int = option(
        1,
        "Stages of a pipeline that each device holds, dealt out in turn (interleaved schedule): the pipeline fills and "
        "empties faster, and more tensors travel.",
        minimum=1,
        may_change_on_resume=True,
    )
    pipeline_schedule: str = option(
        "1f1b",
        "When the stages of a pipeline work on a micro-batch: 1f1b starts as many as keep all stages busy, and the "
        "next when the backward pass of one is done; gpipe starts all at once, and keeps the activations of all.",
        choices=("1f1b", "gpipe"),
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
        "What carries data between the CPUs of workers: TensorFlow's collectives over gRPC (tensorflow), or the native "
        "transport over Gloo (gloo), which is faster and must be built in. 'auto' is tensorflow. GPUs always use NCCL.",
        choices=TRANSPORTS,
        may_change_on_resume=True,
    )
    peer_timeout: float = option(
        30.0,
        "Seconds after which a worker or parameter server that does not answer counts as lost; all other workers (with "
        "parameter_server, the chief) then end with an error that names it. Slow workers (compiling, evaluating) still "
        "answer.",
        minimum=8.0,
        may_change_on_resume=True,
        per_host=True,
    )
    start_timeout: float = option(
        600.0,
        "Seconds that workers and parameter servers wait for each other at the start.",
        minimum=1.0,
        may_change_on_resume=True,
        per_host=True,
    )
    stall_timeout: float = option(
        1800.0,
        "Seconds in which a worker must make progress. A worker that does not, because of a deadlock for example, "
        "prints where it hangs and exits. The first step, an evaluation and a checkpoint may each take 5 times as "
        "long. 0: no limit.",
        minimum=0.0,
        maximum=1e7,
        may_change_on_resume=True,
        per_host=True,
    )
