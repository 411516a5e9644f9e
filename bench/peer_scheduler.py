"""vLLM's scheduler on the same load, where it can be imported; never a dependency.

Its `Scheduler` is driven without a model: requests of prompt ids in, `schedule`, made-up tokens, `update_from_output`.
Written for vLLM 0.33, of which no kernel is needed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50_000,
    "torch_dtype": "float32",
}


class VllmBench:
    """A vLLM scheduler over blocks without storage, whose model is a random number generator."""

    def __init__(self, block_size: int, num_seqs: int, max_seq_len: int, num_blocks: int, budget: int) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import torch
        from vllm.config import (  # type: ignore[import-not-found]
            CacheConfig,
            DeviceConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.utils.hashing import sha256  # type: ignore[import-not-found]
        from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
        from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]

        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(
                json.dumps({**_CONFIG, "max_position_embeddings": max_seq_len}), encoding="utf-8"
            )
            model = ModelConfig(
                model=folder, skip_tokenizer_init=True, max_model_len=max_seq_len, dtype="float32", seed=0
            )
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
        cache.num_gpu_blocks = num_blocks
        config = VllmConfig(
            scheduler_config=SchedulerConfig(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=max_seq_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            model_config=model,
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
        )
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.rng = np.random.default_rng(0)
        self.count = 0

    def ask(self, num_tokens: int, max_tokens: int) -> None:
        """Submit a made-up prompt."""
        from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
        from vllm.v1.request import Request  # type: ignore[import-not-found]

        prompt = self.rng.integers(0, 50_000, num_tokens).tolist()
        params = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
        self.scheduler.add_request(
            Request(
                request_id=f"r{self.count}",
                prompt_token_ids=prompt,
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.hasher,
            )
        )
        self.count += 1

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_left(self) -> int:
        """Blocks that a new request could take."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def step(self) -> float:
        """Seconds of schedule and update; the tokens in between are not counted."""
        from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found]

        start = time.perf_counter()
        plan = self.scheduler.schedule()
        seconds = time.perf_counter() - start
        ids = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[token] for token in self.rng.integers(0, 50_000, len(ids)).tolist()],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        start = time.perf_counter()
        self.scheduler.update_from_output(plan, output)
        return seconds + time.perf_counter() - start
