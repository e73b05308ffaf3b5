"""`--mesh=auto` and `python -m tfpar.plan`: collects the facts about a model and a run that the planner needs."""
