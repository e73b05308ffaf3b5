"""Cuts a model into the stages of a pipeline, and assigns the stages to devices."""
