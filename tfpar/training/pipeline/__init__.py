"""Pipeline parallelism: replicas of several devices, each of which holds consecutive layers (`--mesh`)."""

from tfpar.training.pipeline.placing import PipelinePlacing

__all__ = ["PipelinePlacing"]
