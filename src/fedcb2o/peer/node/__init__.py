"""Node of a federation: one agent, its data, rounds and checks."""

from fedcb2o.peer.node.agent import build_network, load_member_dataset, load_model
from fedcb2o.peer.node.engine import PeerEngine
from fedcb2o.peer.node.node import Node
from fedcb2o.peer.node.observer import NodeObserver, NullObserver
from fedcb2o.peer.node.peer_monitor import PeerMonitor
from fedcb2o.peer.node.preflight import (
    CheckResult,
    check_members,
    format_results,
    hello_content,
)
from fedcb2o.peer.node.publisher import ModelPublisher
from fedcb2o.peer.node.run_directory import open_run

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
