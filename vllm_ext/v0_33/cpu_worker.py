"""The worker for our model on a CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from deepinfer_plugins.vllm_ext.v0_33.worker import WorkerMixin


class DeepInferCpuWorker(WorkerMixin, CPUWorker):
    """vLLM's own with our changes."""
