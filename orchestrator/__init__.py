"""kvferry: the KV cache of a prompt, from prefill to decode, layer by layer, while the forward still runs.

What a worker needs stands here; `docs/embedding.md` walks through it.
"""

from orchestrator.chunk import ChunkSpec
from orchestrator.config import Config
from orchestrator.cuda_events import CudaEvents, HostEvents
from orchestrator.decode import Decode, RoomHandle
from orchestrator.forward import ForwardPass, LayerNotifier
from orchestrator.loop_thread import EmbeddedLoop
from orchestrator.node import Node
from orchestrator.outcome import RoomStatus
from orchestrator.perfetto import chrome_trace
from orchestrator.prefill import Prefill
from orchestrator.trace import TransferResult
from protocols.layout import LayerBuffer, Layout

__all__ = [
    "ChunkSpec",
    "Config",
    "CudaEvents",
    "Decode",
    "EmbeddedLoop",
    "ForwardPass",
    "HostEvents",
    "LayerBuffer",
    "LayerNotifier",
    "Layout",
    "Node",
    "Prefill",
    "RoomHandle",
    "RoomStatus",
    "TransferResult",
    "chrome_trace",
]
