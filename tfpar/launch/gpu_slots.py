"""The slots in which the workers of a local cluster run; a slot that keeps failing is left out.

A slot is a worker's share of the GPUs. Workers are renumbered when one is left out, because TensorFlow needs numbers
without gaps; they keep their slots, so that the failing GPU is no longer used.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from tfpar.config import ConfigError

NO_GPU = "-1"  # the value of CUDA_VISIBLE_DEVICES that hides all GPUs
TRUSTED_S = 600.0  # a start that ran this long has shown that every slot works


class Slots:
    """The slots of a cluster's workers.

    Args:
      workers: How many there are.
      gpus: All GPUs, as `visible_gpus` names them.
      least: How many must be left; 0: all.
      together: Whether several workers may use a GPU.
    """

    def __init__(self, workers: int, gpus: Sequence[str], *, least: int = 0, together: bool = False) -> None:
        self._shares = dict(enumerate(share_gpus(workers, gpus, together=together) or [""] * workers))
        self._first = workers
        self._least = least
        self._suspect: int | None = None

    @property
    def workers(self) -> int:
        """Number of slots in use."""
        return len(self._shares)

    @property
    def left_out(self) -> int:
        """Number of slots left out."""
        return self._first - self.workers

    @property
    def gpus(self) -> list[str]:
        """CUDA_VISIBLE_DEVICES of each remaining worker; empty where there is no GPU."""
        return [share for share in self._shares.values() if share]

    def failed(self, worker: int, ran: float, *, alone: bool) -> str:
        """Records a failed start. A slot that fails twice in a row is left out if enough others remain.

        Args:
          worker: Current number of the worker that failed first.
          ran: Seconds that the start ran.
          alone: Whether it was the only one to fail. If several fail, their slots are not the cause.

        Returns:
          A message if a slot is left out; otherwise empty.
        """
        if ran >= TRUSTED_S or not alone:
            self._suspect = None
        if not alone:
            return ""
        slot = list(self._shares)[worker]
        if slot != self._suspect or not 0 < self._least < self.workers:
            self._suspect = slot
            return ""
        self._suspect = None
        gpus = self._shares.pop(slot)
        where = f" (GPU {gpus})" if gpus not in ("", NO_GPU) else ""
        left = f"{self.workers} worker{'s' * (self.workers > 1)}"
        return f"continuing with {left}, without worker {worker}{where}{_renumbered(worker, self.workers)}"


def _renumbered(gone: int, workers: int) -> str:
    if gone >= workers:
        return ""
    if gone == workers - 1:
        return f"; worker {gone + 1} is now worker {gone}"
    return f"; workers {gone + 1} to {workers} are now workers {gone} to {workers - 1}"


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that TensorFlow would see, as CUDA_VISIBLE_DEVICES names them.

    Raises:
      ConfigError: The driver does not answer.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        return names[: names.index(NO_GPU)] if NO_GPU in names else names
    if not shutil.which("nvidia-smi"):
        return []
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            "nvidia-smi has not answered for 60 seconds, so the GPUs of this machine are not known. Name those to use "
            "in CUDA_VISIBLE_DEVICES (-1: none), or look after the driver."
        ) from error
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in listing.stdout.splitlines()))]


def share_gpus(workers: int, gpus: Sequence[str], *, together: bool = False) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each worker: an equal number of GPUs each.

    Args:
      workers: How many there are.
      gpus: All GPUs.
      together: If there are fewer GPUs than workers, each uses one, together with others; otherwise none uses any.
    """
    if not gpus:
        return []
    if together and len(gpus) < workers:
        return [gpus[worker % len(gpus)] for worker in range(workers)]
    each = len(gpus) // workers
    return [",".join(gpus[worker * each : (worker + 1) * each]) or NO_GPU for worker in range(workers)]
