"""`draftahead train`: generates training data, and trains and exports drafters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option, Typer

from draftahead.bench.prompts import load_prompts
from draftahead.cli import checks, command, options, terminal
from draftahead.core.sampling_params import SamplingParams
from draftahead.errors import ConfigError, DraftaheadError
from draftahead.loader.progress import progress_bar, terminal_progress
from draftahead.train.config import TrainConfig

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch import Tensor

    from draftahead.train.dataset import Dataset
    from draftahead.train.loop import History
    from draftahead.train.task import TrainTask

app = Typer(help="Train a drafter for your model.", no_args_is_help=True)

Out = Annotated[Path, Option(help="The folder to write to.")]
IntermediateSize = Annotated[int | None, Option(min=1, help="Of its MLPs; unset: the target's.")]
DraftVocabulary = Annotated[int | None, Option(min=1, help="Frequent tokens to draft; unset: all.")]
Depth = Annotated[int, Option(min=1, help="Drafted tokens of a chain, in evaluations.")]
DepthDecay = Annotated[float, Option(min=0, max=1, help="Weight of a depth's loss over the last.")]

# ------------------------------------------------------------------------------ generated data


@app.command()
@command.grouped
def data(
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    prompts: Annotated[Path, Option(help="JSON lines of prompt, messages, turns or text.")],
    out: Out,
    max_tokens: options.MaxTokens = 256,
    max_length: Annotated[
        int | None, Option(min=1, help="Leave out prompts of more tokens.")
    ] = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    batch: options.Batch = 8,
    shard: Annotated[str, Option(help="2/3: shard 2 of 3, for several processes.")] = "1/1",
    max_context: options.MaxContext = None,
) -> None:
    """Generate training data from prompts.

    The data are the target's own continuations. An interrupted run resumes.
    """
    from draftahead.train import dataset

    parts = shard.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--shard takes a number and a count, as 2/3, not {shard!r}")
    number, count = int(parts[0]), int(parts[1])
    if not 1 <= number <= count:
        raise ConfigError(f"--shard {shard}: the first number must be 1 to {count}")
    checks.check_folder(out)
    given = load_prompts(prompts)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    llm = model.build(drafter.config(), max_context=max_context, max_batch=batch)
    requests, texts = dataset.encode_prompts(given, llm)
    if texts is not None:
        dataset.write_texts(texts, out)
    if requests:
        notes = terminal.notes_console()
        with terminal_progress() as progress:

            def report(line: str) -> None:
                notes.print(line)
                progress(f"generating: {line}")

            progress("generating")
            dataset.generate_data(
                llm,
                requests,
                out,
                params=params,
                max_length=max_length,
                shard=(number, count),
                report=report,
            )
    found = dataset.read_data(out)
    typer.echo(f"{out}: {len(found)} texts with {found.num_learned} tokens to learn")


# ----------------------------------------------------------------------------------- trainings


@dataclass(frozen=True)
class TrainSetup:
    """What every training starts with."""

    model: Any  # the target
    tokenizer: Any
    vocab_size: int
    train: Dataset
    held_out: Dataset
    processes: PartialState  # `accelerate launch` starts several, each with a GPU

    def draft_to_target(self, size: int | None) -> Tensor | None:
        """The most frequent tokens; None: the whole vocabulary."""
        return None if size is None else self.train.most_frequent(size, self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(options.ModelOptions):
    """What all trainings share, beside TrainConfig."""

    data: Annotated[Path, Option(help="A folder that `train data` wrote.")]
    out: Out
    held_out: Annotated[Path | None, Option(help="To evaluate on; unset: a part of --data.")] = None
    tokens: Annotated[int, Option(min=1, help="Tokens per batch.")] = 8192
    max_length: Annotated[int, Option(min=1, help="Tokens per text; the last are kept.")] = 1024
    cache_hidden_states: Annotated[float, Option(min=0, help="GB to keep; 0: compute anew.")] = 0.0
    hidden_states_folder: Annotated[Path | None, Option(help="Keep them in a file there.")] = None
    resume: Annotated[bool, Option("--resume", help="Continue the training in --out.")] = False
    plot: options.Plot = None

    def setup(self, seed: int) -> TrainSetup:
        """Checks what can be checked before the work, and loads target and data."""
        import torch
        from accelerate import PartialState

        from draftahead.core.device import gpu_count
        from draftahead.models.support import text_config
        from draftahead.train.dataset import check_vocabulary, read_for_training
        from draftahead.train.loop import refuse_overwriting

        checks.check_folder(self.out)
        refuse_overwriting(self.out, resume=self.resume)
        if self.hidden_states_folder is not None:
            if not self.cache_hidden_states:
                raise ConfigError("--hidden-states-folder needs --cache-hidden-states GB as well")
            checks.check_folder(self.hidden_states_folder)
        train, held_out = read_for_training(self.data, self.held_out, seed=seed)
        torch.manual_seed(seed)  # all processes start with the same weights
        # Without cpu=True, processes on a machine without GPUs would not form a group.
        on_cpu = self.device.startswith("cpu") if self.device else not gpu_count()
        processes = PartialState(cpu=on_cpu)
        device = str(processes.device) if processes.num_processes > 1 else self.device
        model, tokenizer = replace(self, device=device).load()
        vocab_size = int(text_config(model).vocab_size)
        check_vocabulary(train, self.data, vocab_size)
        check_vocabulary(held_out, self.held_out or self.data, vocab_size)
        return TrainSetup(model, tokenizer, vocab_size, train, held_out, processes)

    def train(self, setup: TrainSetup, config: TrainConfig, task: TrainTask) -> None:
        """Trains, and reports acceptance and speed-up."""
        from draftahead.train.batches import TrainBatches
        from draftahead.train.dataset import digest
        from draftahead.train.loop import CHECKPOINT, TrainLoop

        processes, folder = setup.processes, self.hidden_states_folder
        batches_of = partial(
            TrainBatches,
            model=setup.model,
            aux_layers=task.aux_layers,
            tokens=self.tokens,
            max_length=self.max_length,
        )
        held_out = batches_of(setup.held_out)
        cache_bytes = round(self.cache_hidden_states * 1e9)
        batches = batches_of(
            setup.train,
            seed=config.seed,
            # Each process has its own memory, but all share one disk.
            cache_bytes=cache_bytes if folder is None else cache_bytes // processes.num_processes,
            cache_folder=folder,
            shard=(processes.process_index, processes.num_processes),
        )
        notes = terminal.notes_console(quiet=not processes.is_main_process)
        size = sum(weight.numel() for weight in task.module.parameters() if weight.requires_grad)
        notes.print(
            f"{setup.train.num_learned} tokens to learn in {len(setup.train)} texts "
            f"({len(batches)} batches per epoch), {len(setup.held_out)} held-out texts; "
            f"{size / 1e6:.1f}M weights"
        )
        loop = TrainLoop(
            task,
            config,
            self.out,
            batches.from_step,
            held_out,
            log=notes.print,
            data_digest=digest(setup.model, setup.train, setup.held_out),
        )
        with progress_bar("steps", config.steps, shown=processes.is_main_process) as advance:
            try:
                history = loop.run(resume=self.resume, advance=advance)
            except KeyboardInterrupt:
                if (self.out / CHECKPOINT).exists():
                    notes.print("interrupted: --resume goes on from the last evaluation")
                raise
        processes.destroy_process_group()
        if processes.is_main_process:
            self._report(setup, history, {"method": task.method, task.file_key: str(self.out)})

    def _report(self, setup: TrainSetup, history: History, drafter: dict[str, str]) -> None:
        from draftahead.train.estimate import measure_steps
        from draftahead.train.plot import draw

        best = max(range(len(history.lengths)), key=history.lengths.__getitem__)
        typer.echo(f"{self.out}: acceptance length {history.lengths[best]:.3f} on held-out texts")
        speedups = None
        try:
            depth = len(history.by_depth[best])
            with terminal_progress() as progress:
                progress("estimating the speed-up")
                estimate = measure_steps(setup.model, drafter, setup.held_out, depth)
            typer.echo(estimate.describe(history.by_depth[best]))
            speedups = [estimate.best(by_depth)[0] for by_depth in history.by_depth]
        except DraftaheadError as problem:  # the trained files are complete all the same
            typer.echo(f"no estimate of the speed-up: {problem}")
        if self.plot is not None:
            draw(history, self.plot, speedups)


@app.command()
@command.grouped
def eagle(
    training: TrainOptions,
    config: TrainConfig,
    layers: Annotated[int, Option(min=1, help="Decoder layers of the head.")] = 1,
    intermediate_size: IntermediateSize = None,
    aux_layers: Annotated[
        str | None,
        Option(help="Layers whose hidden states it reads; unset: 2,L/2,L-3 of L layers."),
    ] = None,
    draft_vocabulary: Annotated[int, Option(min=1, help="Frequent tokens to draft.")] = 16384,
    train_lm_head: Annotated[
        bool, Option("--train-lm-head", help="Train its lm_head weights, too.")
    ] = False,
    depth: Annotated[int, Option(min=1, help="Drafted tokens of a chain.")] = 5,
    depth_decay: DepthDecay = 0.8,
) -> None:
    """Train an EAGLE-3 head, unrolled over its own outputs."""
    from draftahead.drafters.eagle.head import new_head
    from draftahead.models.support import text_config
    from draftahead.train.eagle import EagleTask

    chosen = aux_layers and set(checks.split_numbers("--aux-layers", aux_layers))
    setup = training.setup(config.seed)
    num_layers = int(text_config(setup.model).num_hidden_layers)
    chosen = chosen or {2, num_layers // 2, num_layers - 3}
    head = new_head(
        setup.model,
        setup.train.most_frequent(draft_vocabulary, setup.vocab_size),
        aux_layers=tuple(sorted(chosen)),
        num_layers=layers,
        intermediate_size=intermediate_size,
    )
    task = EagleTask(
        head,
        setup.model,
        depth=depth,
        depth_decay=depth_decay,
        train_lm_head=train_lm_head,
        name=training.model,
    )
    training.train(setup, config, task)


@app.command()
@command.grouped
def medusa(
    training: TrainOptions,
    config: TrainConfig,
    heads: Annotated[int, Option(min=1, help="Heads: how many tokens ahead.")] = 4,
    layers: Annotated[int, Option(min=1, help="Residual blocks of a head.")] = 1,
    draft_vocabulary: DraftVocabulary = None,
    depth_decay: DepthDecay = 0.8,
) -> None:
    """Train Medusa heads, and choose their draft tree."""
    from draftahead.drafters.medusa.heads import new_heads
    from draftahead.train.medusa import MedusaTask

    setup = training.setup(config.seed)
    made = new_heads(
        setup.model,
        heads,
        num_layers=layers,
        draft_to_target=setup.draft_to_target(draft_vocabulary),
    )
    task = MedusaTask(made, setup.model, depth_decay=depth_decay, name=training.model)
    training.train(setup, config, task)


@app.command()
@command.grouped
def exit(
    training: TrainOptions,
    config: TrainConfig,
    layer: Annotated[int, Option(min=1, help="Exit after so many layers of the target.")],
    rank: Annotated[int, Option(min=1, help="Rank of the adapter.")] = 256,
    draft_vocabulary: DraftVocabulary = None,
    depth: Depth = 4,
) -> None:
    """Train an adapter for early_exit.

    The drafter early_exit drafts with the target's first layers.
    """
    from draftahead.drafters.early_exit.adapter import new_adapter
    from draftahead.train.exit import ExitTask

    setup = training.setup(config.seed)
    draft_to_target = setup.draft_to_target(draft_vocabulary)
    adapter = new_adapter(setup.model, layer, rank=rank, draft_to_target=draft_to_target)
    training.train(setup, config, ExitTask(adapter, setup.model, depth=depth))


@dataclass(frozen=True, kw_only=True)
class DraftModelSizes:
    num_layers: Annotated[int, Option("--layers", min=1, help="Decoder layers of the draft model.")]
    hidden_size: Annotated[int | None, Option(min=1, help="Unset: the target's.")] = None
    intermediate_size: IntermediateSize = None
    num_heads: Annotated[int | None, Option(min=1, help="Unset: in proportion.")] = None
    num_kv_heads: Annotated[int | None, Option(min=1, help="Unset: in proportion.")] = None


@app.command()
@command.grouped
def distill(
    training: TrainOptions, config: TrainConfig, sizes: DraftModelSizes, depth: Depth = 5
) -> None:
    """Train a small draft model.

    It has the target's architecture and vocabulary.
    """
    from draftahead.train.distill import DistillTask, new_draft_model

    setup = training.setup(config.seed)
    draft = new_draft_model(setup.model, **vars(sizes))
    task = DistillTask(draft, setup.model, tokenizer=setup.tokenizer, depth=depth)
    training.train(setup, config, task)


# ------------------------------------------------------------------------------------ export


@app.command()
@command.grouped
def export(
    model: options.ModelOptions,
    head: Annotated[str, Option(help="Folder, file or hub id of a trained head.")],
    out: Out,
) -> None:
    """Write a trained head in the layout of other servers.

    An EAGLE head or Medusa heads, with their lm_head weights.
    """
    from draftahead.train.export import export_head

    checks.check_folder(out)
    checks.check_source(head, "--head")
    target, _ = model.load()
    typer.echo(f"{out}: {export_head(head, target, out, name=model.model)}")
