"""Node of a federation: one agent, its data, rounds and checks."""

from fedcb2o.peer.node._agent import build_network, load_member_dataset, load_model
from fedcb2o.peer.node._engine import PeerEngine
from fedcb2o.peer.node._node import Node
from fedcb2o.peer.node._observer import NodeObserver, NullObserver
from fedcb2o.peer.node._peer_monitor import PeerMonitor
from fedcb2o.peer.node._preflight import CheckResult, check_members, format_results, hello_content
from fedcb2o.peer.node._publisher import ModelPublisher
from fedcb2o.peer.node._run_directory import open_run

__all__ = [
    "CheckResult",
    "ModelPublisher",
    "Node",
    "NodeObserver",
    "NullObserver",
    "PeerEngine",
    "PeerMonitor",
    "build_network",
    "check_members",
    "format_results",
    "hello_content",
    "load_member_dataset",
    "load_model",
    "open_run",
]
