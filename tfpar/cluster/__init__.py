"""Who this process is in a cluster, who its peers are, and whether they are alive."""

from __future__ import annotations

from tfpar.cluster.info import ClusterInfo, current, detect, export_tf_config, tf_config_json
from tfpar.cluster.reachability import Peer, check_reachable

__all__ = ["ClusterInfo", "Peer", "check_reachable", "current", "detect", "export_tf_config", "tf_config_json"]
