"""The exchange in which every worker updates a share of the weights (`--shard`)."""
