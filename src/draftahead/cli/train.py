"""`draftahead train`: answers to learn from, and drafters made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftahead.cli import options
from draftahead.errors import ConfigError

app = typer.Typer(help="Make a drafter for your model.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="The folder to write to.")]


@app.command()
def answers(
    prompts: Annotated[Path, typer.Option(help="JSON lines with prompt, messages, turns or text.")],
    out: Out,
    model: options.Model = "smollm2",
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 256,
    longest: Annotated[int | None, typer.Option(help="Leave out longer prompts.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    batch: Annotated[int, typer.Option(help="Texts at once.")] = 8,
    part: Annotated[str, typer.Option(help="2/3: the second of three processes.")] = "1/1",
    drafter: options.Drafter = None,
    draft_model: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    max_context: options.MaxContext = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantize: options.Quantize = None,
) -> None:
    """Let the model answer prompts, to train on. What was interrupted goes on where it was."""
    from draftahead.train import texts

    shares = part.split("/")
    if len(shares) != 2 or not all(share.isdigit() for share in shares):
        raise ConfigError(f"--part is a number of a number of parts, as 2/3, not {part!r}")
    mine, of = int(shares[0]), int(shares[1])
    if not 1 <= mine <= of:
        raise ConfigError(f"--part {part}: there are parts 1 to {of}")
    config = options.drafter_from(drafter, draft_model, speculative_config, None)
    llm = options.build_llm(
        model,
        config,
        dtype=dtype,
        device=device,
        quantize=quantize,
        max_context=max_context,
        max_batch=batch,
    )
    asked, whole = texts.read_prompts(prompts, llm)
    sampling = options.sampling_from(temperature=temperature, max_tokens=max_tokens, seed=seed)
    notes = Console(stderr=True)

    def told(done: int, files: int, tokens: int) -> None:
        notes.print(f"{done} of {files} files, {tokens} new tokens", highlight=False)

    if whole is not None:
        texts.write_texts(whole, out)
    if asked:
        texts.write_answers(
            llm, asked, out, sampling=sampling, longest=longest, part=(mine, of), told=told
        )
    found = texts.read_answers(out)
    typer.echo(f"{len(found)} texts with {found.learnt} tokens to learn in {out}")
