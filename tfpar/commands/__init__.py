"""The console command `tfpar`: a subcommand per module, each of which also runs as a script of `experiments/`."""
