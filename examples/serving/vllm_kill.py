#!/usr/bin/env python3
"""vLLM: four engines step together, one is killed, the others go on in the same group.

    TORCHFT_EXT_REPLACE_GLOO=1 python examples/serving/vllm_kill.py

Real: vLLM's data-parallel groups, its step's collectives, its sentinels, its plugin loading. In
place of the rest of an engine stand the classes below: there is no model, no scheduler, no client.
"""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from kill_one import PROCESSES, STEPS, Processes, say
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state, stateless_destroy_torch_distributed_process_group
from vllm.plugins import load_general_plugins
from vllm.v1.fault_tolerance import EngineCoreSentinel, fault_tolerant_wrapper
from vllm.v1.worker.dp_utils import coordinate_batch_across_dp
from vllm.v1.worker.sentinel import gpu_worker_sentinel

import torchft_ext

# ---------------------------------------------------------------- an engine's process


class Runner:
    """What the worker's sentinel clears before a retry."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(req_id_to_index={})
        self.execute_model_state = None


class Executor:
    """Has one worker, in this process."""

    is_failed = False

    def __init__(self, config: Any) -> None:
        # The manager of expert kernels, which a CPU does not have.
        manager = SimpleNamespace(clean_buffers=lambda: None)
        gpu_worker_sentinel.get_ep_all2all_manager = lambda: manager
        worker = SimpleNamespace(
            vllm_config=config,
            parallel_config=config.parallel_config,
            rank=0,
            use_v2_model_runner=True,
            model_runner=Runner(),
        )
        self.sentinel = gpu_worker_sentinel.WorkerSentinel(worker)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert method == "handle_ft_command"
        return [self.sentinel.handle_command(*args)]


class Statuses:
    """The engine's output queue: what it pushes goes to the parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def put_nowait(self, output: tuple[int, Any]) -> None:
        say(
            self._pipe,
            "output",
            when=time.monotonic(),
            result=output[1].utility_output.result.result,
        )


class Engine:
    """Steps as vLLM's DPEngineCoreProc does: one collective of a worker, one of the engines."""

    def __init__(self, config: Any, pipe: Connection) -> None:
        self.pipe = pipe
        self.vllm_config = config
        self.engine_index = config.parallel_config.data_parallel_rank
        self.enable_fault_tolerance = True
        self.batch_queue = None
        self.step_counter = 0
        self.steps = 0
        self.last_step: int | None = None
        self.scheduler = SimpleNamespace(finish_requests=lambda *_: [])
        self.output_queue = Statuses(pipe)
        self.dp_group, self.dp_store = config.parallel_config.stateless_init_dp_group(
            return_store=True
        )
        self.model_executor = Executor(config)
        self.ft_sentinel = EngineCoreSentinel(self, config.parallel_config)

    def _send_abort_outputs(self, aborted: list[Any]) -> None:
        assert not aborted

    def step(self) -> bool:
        """Return whether any engine has something left to do."""
        config = self.vllm_config.parallel_config
        coordinate_batch_across_dp(8, False, config, num_tokens_padded=8)
        unfinished = self.last_step is None or self.steps < self.last_step
        more, _ = config.sync_dp_state(self.dp_group, unfinished, False)
        self.steps += 1
        if self.steps == STEPS:
            say(self.pipe, "stepping")
        return bool(more)

    def loop(self) -> None:
        while self.step():
            pass
        raise SystemExit(0)


def configured(rank: int, port: int) -> Any:
    parallel = ParallelConfig(data_parallel_size=PROCESSES, data_parallel_rank=rank)
    parallel.data_parallel_master_ip = "127.0.0.1"
    parallel._coord_store_port = port
    parallel.cpu_distributed_timeout_seconds = 60
    parallel.disable_nccl_for_dp_synchronization = True
    parallel.enable_fault_tolerance = True
    parallel.all2all_backend = "deepep_low_latency"
    return VllmConfig(parallel_config=parallel)


def run_engine(rank: int, pipe: Connection) -> None:
    load_general_plugins()
    config = configured(rank, pipe.recv())
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        engine = Engine(config, pipe)
        group, ours = engine.dp_group, torchft_ext.backends_of(engine.dp_group)
        say(pipe, "begun", ours=len(ours))
        threading.Thread(target=obey, args=(engine,), daemon=True).start()
        try:
            fault_tolerant_wrapper(Engine.loop)(engine)
        except SystemExit:
            same = engine.dp_group is group
            say(pipe, "ended", same=same, size=group.size())
            stateless_destroy_torch_distributed_process_group(group)
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def obey(engine: Engine) -> None:
    """Run the client's commands, on a thread of its own as vLLM's engine does."""
    while True:
        command = engine.pipe.recv()
        engine.last_step = engine.steps + STEPS
        engine.ft_sentinel.handle_command(0, 1, command)


# ---------------------------------------------------------------- the parent


def main() -> None:
    with Processes(run_engine) as engines:
        pid, killed = engines.kill_one()
        for number, message in engines.gather("output").items():
            late = (message["when"] - killed) * 1e3
            result = message["result"]
            print(f"engine {number}: {result['status']} {late:.1f} ms after the kill of {pid}")
            print(f"  fault_info: {result['fault_info']}")
        engines.send({"instruction": "retry", "params": {}, "request_id": "1"})
        for _ in ("its status", "the answer"):
            for number, message in engines.gather("output").items():
                print(f"engine {number}: {message['result']}")
        engines.print_ends()


if __name__ == "__main__":
    main()
