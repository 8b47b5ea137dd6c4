"""Makes the table that `recycle` starts from: a model's most likely tokens after each token alone.

    python scripts/successors.py --model smollm2 --out FILE.safetensors

Every token of the vocabulary is the first token of the answer to one fixed prompt, 63 of them per
forward as children of one root: no user's text is involved. FILE is for the drafter's option
`successors`; that of smollm2 is src/draftahead/data/smollm2-successors.safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftahead import LLM
from draftahead.core.tree import MAX_NODES
from draftahead.drafters.recycle import SUCCESSORS

NODES_PER_FORWARD = MAX_NODES - 1  # without the root


def prompt_tokens(llm: LLM) -> list[int]:
    """A prompt that says nothing about the answer."""
    if getattr(llm.tokenizer, "chat_template", None) is not None:
        return llm.encode([{"role": "user", "content": "Go on."}])
    return [getattr(llm.tokenizer, "bos_token_id", None) or 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    llm = LLM(args.model, drafter="none", max_batch=1)
    runner = llm.engine.verifier.runner
    *before, root = prompt_tokens(llm)
    runner.prefill(0, before)
    dtype = torch.uint16 if runner.vocab_size <= 1 << 16 else torch.int32
    successors = []
    for start in range(0, runner.vocab_size, NODES_PER_FORWARD):
        tokens = torch.arange(start, min(start + NODES_PER_FORWARD, runner.vocab_size))
        nodes = torch.cat([torch.tensor([root]), tokens])[None]
        parents = torch.tensor([[-1, *[0] * len(tokens)]])
        logits = runner.forward(nodes, parents=parents).logits[0, 1:]
        successors.append(logits.topk(SUCCESSORS).indices.to(dtype))
        print(f"\r{start + len(tokens)} of {runner.vocab_size} tokens", end="", flush=True)
    save_file({"successors": torch.cat(successors).cpu()}, args.out, {"model": args.model})
    print(f"\n{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
