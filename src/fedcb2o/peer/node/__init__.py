"""Node of a federation: one agent, its data, rounds and checks."""

from fedcb2o.peer.node.agent import build_network, load_member_dataset, load_model
from fedcb2o.peer.node.engine import PeerEngine
from fedcb2o.peer.node.node import Node
from fedcb2o.peer.node.observer import NodeObserver, NullObserver
from fedcb2o.peer.node.publisher import ModelPublisher

__all__ = [
    "ModelPublisher",
    "Node",
    "NodeObserver",
    "NullObserver",
    "PeerEngine",
    "build_network",
    "load_member_dataset",
    "load_model",
]
