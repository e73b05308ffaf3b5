"""Predicts step time and memory of every plan for a model and a set of devices, and sorts the plans.

`search` is the entry point. Its inputs are plain data: the costs of a model's layers (`costs`), and the speeds and
sizes of devices and links (`machine`). This package does not use TensorFlow.
"""
