"""Makes the table that `recycle` starts from: what a model says after each token by itself.

    python scripts/successors.py --model smollm2 --out FILE.safetensors

Every token of the vocabulary opens the model's answer to a question that asks for nothing, 63 of
them in a pass, as children of one root: no user's text is involved. FILE is what the drafter's
option `successors` takes; that of smollm2 is src/draftahead/data/smollm2-successors.safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftahead import LLM

KEPT = 4
AT_ONCE = 63


def opening(llm: LLM) -> list[int]:
    """What a model has read when it begins to speak."""
    if getattr(llm.tokenizer, "chat_template", None) is not None:
        return llm.encode([{"role": "user", "content": "Go on."}])
    return [getattr(llm.tokenizer, "bos_token_id", None) or 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    llm = LLM(asked.model, drafter="none", max_batch=1, max_context=256)
    passes = llm.engine.target.runner
    *before, root = opening(llm)
    passes.prefill(0, before)
    kind = torch.uint16 if passes.vocabulary <= 1 << 16 else torch.int32
    found = []
    for start in range(0, passes.vocabulary, AT_ONCE):
        tokens = torch.arange(start, min(start + AT_ONCE, passes.vocabulary))
        nodes = torch.cat([torch.tensor([root]), tokens])[None]
        parents = torch.tensor([[-1, *[0] * len(tokens)]])
        logits = passes.run(nodes, parents=parents)[0, 1:]
        found.append(logits.topk(KEPT).indices.to(kind))
        print(f"\r{start + len(tokens)} of {passes.vocabulary} tokens", end="", flush=True)
    save_file({"successors": torch.cat(found).cpu()}, asked.out, {"model": str(asked.model)})
    print(f"\n{asked.out}: {asked.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
