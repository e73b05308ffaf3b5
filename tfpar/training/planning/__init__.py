"""`--mesh=auto` and `python -m tfpar.plan`: what the planner has to know of a model and of a run."""
