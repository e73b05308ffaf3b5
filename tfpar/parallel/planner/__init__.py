"""Predicts step time and memory of every way to lay a model out over devices, and orders them; without TensorFlow.

`search` is the way in. What it needs is plain data: the costs of a model's layers (`costs`), and what devices and links
can do (`machine`).
"""
