"""Reports on a node's rounds: page, figures, live table and records."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcb2o.peer.report._live_table import LiveTable
    from fedcb2o.peer.report._node_page import write_node_report
    from fedcb2o.peer.report._peer_records import PeerRecords

__all__ = ["LiveTable", "PeerRecords", "write_node_report"]

_MODULES = {
    "LiveTable": "_live_table",
    "PeerRecords": "_peer_records",
    "write_node_report": "_node_page",
}


def __getattr__(name: str) -> object:  # lazy: matplotlib takes time, which a node does not need
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
