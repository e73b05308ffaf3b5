"""A worker of `experiments.benchmarks.exchange` that runs PyTorch: gloo, and the hooks of DistributedDataParallel.

Requests as for `exchange_tensorflow`. It needs PyTorch and nothing else.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

from experiments.benchmarks import fleet, netns

if __name__ == "__main__":
    fleet.explain(__doc__)  # before PyTorch, which the environment of a reader need not have

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

_WARM_UP = 4  # PowerSGD's hook starts after 2 dense exchanges


class _Give(torch.autograd.Function):
    """A backward pass that costs nothing: it hands out gradients that are there already."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


class _Model(torch.nn.Module):
    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._gradients = gradients
        self.values = torch.nn.ParameterList([torch.zeros_like(gradient) for gradient in gradients])

    def forward(self) -> torch.Tensor:
        return _Give.apply(self._gradients, *self.values)


class Worker:
    """State between requests."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self._hosts = dist.get_world_size()
        self._gradients: list[torch.Tensor] = []
        self._call: Callable[[], object] = lambda: None

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what is asked."""
        return getattr(self, f"_{request.pop('do')}")(**request)

    def _start(self, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        # PyTorch keeps outputs in the first dim, Keras in the last; what PowerSGD takes for a matrix depends on it.
        transposed = [(*shape[-1:], *shape[:-1]) for shape in shapes]
        self._gradients = [torch.randn(shape, generator=generator) * 1e-3 for shape in transposed]
        dist.barrier()
        return {"machine": f"torch {torch.__version__}"}

    def _build(self, exchange: str) -> dict[str, Any]:
        self._call = lambda: None
        dense = 4 * sum(gradient.numel() for gradient in self._gradients)
        sent: int | None = 2 * (self._hosts - 1) * dense // self._hosts
        if exchange == "gloo":
            # One buffer that is there already: nothing but the collective.
            buffer = torch.cat([gradient.flatten() for gradient in self._gradients])
            self._call = lambda: dist.all_reduce(buffer)
        else:
            if exchange == "ddp:fp16":
                assert sent is not None
                sent //= 2
            elif exchange.startswith("ddp:powersgd"):
                sent = None
            self._call = self._ddp(exchange.partition(":")[2])
        for _ in range(_WARM_UP):
            self._call()
        return {"payload": dense, "formula": sent, "about": ""}

    def _ddp(self, hook: str) -> Callable[[], object]:
        model = _Model(self._gradients)
        name, _, rank = hook.partition(":")
        # PowerSGD's hook starts its later all-reduces when the earlier ones end. With gloo (PyTorch 2.13) those of
        # several buckets then come in another order on each worker, and meet the wrong ones: a single bucket it is.
        bucket_mb = 1 << 14 if name == "powersgd" else None
        parallel = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
        if name == "fp16":
            parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(rank or 4), start_powerSGD_iter=2)
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name:
            raise ValueError(f"no hook is called {name!r}; there are fp16 and powersgd")

        def call() -> None:
            parallel.zero_grad(set_to_none=True)
            parallel().backward()

        return call

    def _time(self, times: int) -> dict[str, Any]:
        dist.barrier()
        before, busy, seconds = int(netns.counter("tx_bytes").read_text()), time.process_time(), []
        for _ in range(times):
            began = time.perf_counter()
            self._call()
            seconds.append(time.perf_counter() - began)
        busy = time.process_time() - busy
        dist.barrier()
        sent = int(netns.counter("tx_bytes").read_text()) - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return {"seconds": seconds, "sent": sent / times, "peak_memory": peak, "cpu_seconds": busy / times}


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    fleet.serve(Worker().handle)
