"""One side of SGLang's own Mooncake connector, driven over JSON lines: ``python sglang_process.py prefill|decode``.

Runs in an environment of its own (see ``peers``), so it imports nothing of this repository. SGLang's connector is
imported unmodified from its wheel; what a CPU machine cannot import, and a transfer does not need, is replaced by empty
modules, and the settings that a server would have parsed by plain values.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HOST = "127.0.0.1"
PACKAGES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.configs",
    "sglang.srt.distributed",
    "sglang.srt.distributed.device_communicators",
    "sglang.srt.managers",
    "sglang.srt.mem_cache",
    "sglang.srt.observability",
    "sglang.srt.utils",
)
"""Their ``__init__`` would import a whole inference engine; their modules are taken as they are."""
EMPTY = (
    "sglang.srt.configs.model_config",
    "sglang.srt.distributed.parallel_state",
    "sglang.srt.mem_cache.page_interleave",
    "sglang.srt.observability.mooncake_trace",
    "sglang.srt.observability.trace",
    "sglang.srt.runtime_context",
    "sglang.srt.server_args",
    "sglang.srt.utils.common",
)
"""Modules of which a transfer needs a few names at most."""


class Settings(SimpleNamespace):
    """Parsed settings of a server: one that is not named is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Everything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Nothing(metaclass=Everything):
    """In place of tracing: may be called and decorated with, and has every attribute."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __call__(self, *arguments: Any, **_: object) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Hollow(types.ModuleType):
    """A module of which every name is there and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing if name[:1].isupper() else Nothing()


def prepare(bootstrap_port: int) -> None:
    """Make ``sglang.srt.disaggregation.mooncake.conn`` importable. Nothing of it is changed."""
    (root,) = {Path(folder, "sglang") for folder in sys.path if Path(folder, "sglang", "srt").is_dir()}
    for name in PACKAGES:
        package = Hollow(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    for name in EMPTY:
        sys.modules[name] = Hollow(name)
    context: Any = sys.modules["sglang.srt.runtime_context"]
    one = dict.fromkeys(
        ("attn_tp_size", "attn_cp_size", "attn_dcp_size", "attn_dp_size", "dp_size", "pp_size", "num_dp_ranks"), 1
    )
    zero = dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dcp_rank", "attn_dp_rank"), 0)
    parallel = Settings(
        **one,
        **zero,
        nnodes=1,
        load_balance_method="follow_bootstrap_room",
        enable_dsa_cache_layer_split=False,
        enable_kv_cache_sharding=False,
        enable_cp_tp_group_sharing=False,
    )
    settings = {
        "get_parallel": parallel,
        "get_serving": Settings(host=HOST, port=0),
        "get_disagg": Settings(
            disaggregation_bootstrap_port=bootstrap_port, disaggregation_decode_allocation_policy="early"
        ),
        "get_device": Settings(device="cpu"),
        "get_observability": Settings(enable_trace=False),
        "get_memory": Settings(enable_unified_memory=False),
        "get_schedule": Settings(chunked_prefill_size=8192, max_prefill_tokens=16384),
        "get_spec": Settings(),
    }
    for name, value in settings.items():
        setattr(context, name, lambda value=value: value)
    context.linear_attn_tp_size = lambda: 1
    context.max_prefill_buffer_tokens = lambda: None
    common: Any = sys.modules["sglang.srt.utils.common"]
    common.ceil_align = lambda number, step: -(-number // step) * step
    common.run_with_deadline = lambda call, **_: call()
    utils: Any = sys.modules["sglang.srt.utils"]
    utils.is_npu = lambda: False
    communicator = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
    state: Any = sys.modules["sglang.srt.distributed.parallel_state"]
    state.get_mooncake_transfer_engine = lambda: importlib.import_module(communicator).get_mooncake_transfer_engine()


class Side:
    """A manager over the pool at ``path``."""

    def __init__(self, role: str, path: str, buffers: int, pages: int, item_len: int, page_size: int, port: int):
        prepare(port)
        self._conn = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
        base = importlib.import_module("sglang.srt.disaggregation.base.conn")
        utils = importlib.import_module("sglang.srt.disaggregation.utils")
        engine = importlib.import_module("sglang.srt.distributed.device_communicators.mooncake_transfer_engine")
        engine.init_mooncake_transfer_engine(HOST, 0, None)
        self._poll = base.KVPoll
        self._address = f"{HOST}:{port}"
        if role == "prefill":
            self._server = self._conn.MooncakeKVBootstrapServer(HOST, port)
            time.sleep(0.5)
        file = os.open(path, os.O_RDWR)
        self._memory = np.frombuffer(mmap.mmap(file, os.fstat(file).st_size), np.uint8)
        self._aux = np.zeros(4096, np.uint8)
        each = pages * item_len
        arguments = base.KVArgs()
        values = {
            "engine_rank": 0,
            "kv_data_ptrs": [self._memory.ctypes.data + number * each for number in range(buffers)],
            "kv_data_lens": [each] * buffers,
            "kv_item_lens": [item_len] * buffers,
            "kv_layer_ids": [],
            "kv_cache_dtype_str": "uint8",
            "aux_data_ptrs": [self._aux.ctypes.data],
            "aux_data_lens": [self._aux.nbytes],
            "aux_item_lens": [64],
            "ib_device": "",
            "gpu_id": 0,
            "kv_head_num": 1,
            "total_kv_head_num": 1,
            "page_size": page_size,
            "system_dp_rank": 0,
            "pp_rank": 0,
            "prefill_start_layer": 0,
            "prefill_end_layer": buffers // 2,
            "is_hybrid_mla_backend": False,
            "swa_kv_cache_layout": None,
            "mla_compression_ratios": None,
            "rust_http_port": None,
            "kv_buf_groups": 1,
            "hidden_kv_layers": 0,
            "draft_kv_layers": 0,
        }
        lists = ("types", "data_ptrs", "data_lens", "item_lens", "layer_ids", "dim_per_tensor", "slice_outer_counts")
        values |= {f"state_{name}": [] for name in (*lists, "conv_shard_groups")}
        for name, value in values.items():
            setattr(arguments, name, value)
        mode = utils.DisaggregationMode(role)
        self._manager = self._conn.MooncakeKVManager(arguments, mode, Settings(), False)
        self._role = role
        self._request: Any = None

    def open(self, room: int, pages: int) -> None:
        """Prefill: a sender, which then waits for the decode."""
        self._request = self._conn.MooncakeKVSender(self._manager, self._address, room)
        self._request.init(pages, 0)

    def expect(self, room: int, pages: list[int]) -> None:
        """Decode: a receiver, which tells the prefill where the pages go."""
        if not self._manager.try_ensure_parallel_info(self._address):
            raise RuntimeError("the prefill has not registered")
        self._request = self._conn.MooncakeKVReceiver(self._manager, self._address, room)
        self._request.init(0)
        self._request.send_metadata(np.array(pages, np.int32), 0)

    def ready(self) -> None:
        """Prefill: wait until the decode's pages are known."""
        self._wait(self._poll.WaitingForInput)

    def send(self, chunks: list[list[int]]) -> float:
        """Hand every chunk over. Returns the monotonic second before the first."""
        arrays = [np.array(chunk, np.int32) for chunk in chunks]
        start = time.monotonic()
        for array in arrays:
            self._request.send(array)
        return start

    def finish(self) -> float:
        """Wait for success. Returns the monotonic second at which it was seen."""
        self._wait(self._poll.Success)
        end = time.monotonic()
        self._request.clear()
        return end

    def cpu(self) -> float:
        """CPU seconds of this process's Python threads but the main one, which obeys the bench."""
        mine = {thread.native_id for thread in threading.enumerate() if thread is not threading.main_thread()}
        files = [Path(f"/proc/self/task/{task}/schedstat") for task in mine]
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9

    def _wait(self, status: int) -> None:
        deadline = time.monotonic() + 30.0
        while (now := self._request.poll()) != status:
            if now == self._poll.Failed or time.monotonic() > deadline:
                raise RuntimeError(f"SGLang's request stands at {now}, {status} was expected")
            time.sleep(0.0002)


def main() -> None:
    os.environ |= {"SGLANG_HOST_IP": HOST, "MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the native library prints to standard output, which belongs to the answers
    side = Side(sys.argv[1], **json.loads(sys.argv[2]))
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(side, method)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
