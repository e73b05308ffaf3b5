"""A group over Gloo whose only member is this process."""

import contextlib
from collections.abc import Iterator

from tfpar.collectives.gloo import PipelinedGlooGroup
from tfpar_ops.transport_library import transport_library


@contextlib.contextmanager
def group_of_one() -> Iterator[PipelinedGlooGroup]:
    library = transport_library()
    mesh = library.listen(0, ["this worker"], "127.0.0.1", "token", 10.0)
    library.connect(mesh, [library.address(mesh)])
    yield PipelinedGlooGroup(members=(0,), rank=0, mesh=mesh, workers=(0,))
    library.close(mesh)
