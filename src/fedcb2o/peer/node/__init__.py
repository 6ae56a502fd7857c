"""One agent of a federation as a process: its data, its rounds, its checks before the first round."""

from fedcb2o.peer.node.agent import data_of, load_model, network
from fedcb2o.peer.node.engine import Among
from fedcb2o.peer.node.node import Node
from fedcb2o.peer.node.observer import Silent, Watch
from fedcb2o.peer.node.publisher import Offers

__all__ = ["Among", "Node", "Offers", "Silent", "Watch", "data_of", "load_model", "network"]
