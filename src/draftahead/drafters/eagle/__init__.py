"""EAGLE-3 heads. `drafter.py` chooses one of three ways to build a step's trees:

- on a GPU whose kernels support the head: `cuda_trees.py` launches one CUDA graph (`cuda_head.py`);
- on a CPU, adaptive and all greedy: `cpu_trees.py` makes one C++ call (`cpu_head.py`);
- else TreeBuilder or a sampled chain, level by level: `tree_forward.py` calls `runner.py`.

Before each, `prefill.py` finds the inputs that the head's KV cache lacks.
"""
