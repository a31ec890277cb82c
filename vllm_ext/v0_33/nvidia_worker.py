"""The worker for our model on an NVIDIA GPU."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from deepinfer_plugins.vllm_ext.v0_33.worker import WorkerMixin


class DeepInferCudaWorker(WorkerMixin, Worker):
    """vLLM's own with our changes."""
