"""Where a model is cut into stages of a pipeline, and the devices that hold them."""
