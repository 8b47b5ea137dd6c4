"""`draftahead train`: generates training data, and trains and exports drafters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftahead.cli import options
from draftahead.errors import ConfigError, DraftaheadError

if TYPE_CHECKING:
    from draftahead.train.batches import TrainBatches
    from draftahead.train.loop import History, TrainTask
    from draftahead.train.setup import TrainSetup

app = typer.Typer(help="Train a drafter for your model.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="The folder to write to.")]
IntermediateSize = Annotated[
    int | None, typer.Option(min=1, help="Of its MLPs; unset: the target's, or in proportion.")
]
DraftVocabulary = Annotated[
    int | None, typer.Option(min=1, help="Most frequent tokens that it can draft; unset: all.")
]
Depth = Annotated[int, typer.Option(min=1, help="Drafted tokens of a chain, in evaluations.")]
DepthDecay = Annotated[
    float, typer.Option(help="Weight of the loss at a depth, relative to the depth before.")
]

# ------------------------------------------------------------------------------ generated data


@app.command()
@options.grouped
def data(
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    prompts: Annotated[Path, typer.Option(help="JSON lines with prompt, messages, turns or text.")],
    out: Out,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 256,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Leave out prompts of more tokens.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
    shard: Annotated[str, typer.Option(help="2/3: shard 2 of 3, for several processes.")] = "1/1",
    max_context: options.MaxContext = None,
) -> None:
    """Generate training data: the target's own continuations of prompts. Resumable."""
    from draftahead.train import dataset

    parts = shard.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--shard takes a number and a count, as 2/3, not {shard!r}")
    number, count = int(parts[0]), int(parts[1])
    if not 1 <= number <= count:
        raise ConfigError(f"--shard {shard}: the first number must be 1 to {count}")
    options.check_folder(out)
    llm = model.build(drafter.config(), max_context=max_context, max_batch=batch)
    requests, texts = dataset.read_prompts(prompts, llm)
    notes = options.notes_console()
    if texts is not None:
        dataset.write_texts(texts, out)
    if requests:
        dataset.generate_data(
            llm,
            requests,
            out,
            params=options.sampling_params(
                temperature=temperature, max_tokens=max_tokens, seed=seed
            ),
            max_length=max_length,
            shard=(number, count),
            progress=lambda done, files, tokens: notes.print(
                f"{done} of {files} files, {tokens} new tokens"
            ),
        )
    found = dataset.read_data(out)
    typer.echo(f"{out}: {len(found)} texts with {found.num_learned} tokens to learn")


# ----------------------------------------------------------------------------------- trainings


@dataclass(frozen=True, kw_only=True)
class TrainOptions(options.ModelOptions):
    """What all trainings share."""

    data: Annotated[Path, typer.Option(help="A folder that `train data` wrote.")]
    out: Out
    held_out: Annotated[
        Path | None, typer.Option(help="Data to evaluate on; unset: a part of --data.")
    ] = None
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 4000
    lr: Annotated[float, typer.Option(help="Learning rate, after the warm-up.")] = 6e-4
    warmup: Annotated[int, typer.Option(help="Steps of the warm-up.")] = 200
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per batch.")] = 8192
    accumulate: Annotated[int, typer.Option(help="Batches per step.")] = 1
    max_length: Annotated[
        int, typer.Option(min=1, help="Tokens per text; longer ones keep the last ones.")
    ] = 1024
    eval_interval: Annotated[
        int, typer.Option(help="Steps between evaluations, with checkpoints.")
    ] = 500
    patience: Annotated[
        int, typer.Option(help="End after so many evaluations without a gain; 0: never.")
    ] = 0
    ema_decay: Annotated[float, typer.Option(help="Of the moving average of the weights.")] = 0.999
    cache_hidden_states: Annotated[
        float, typer.Option(min=0, help="GB of the target's hidden states to cache.")
    ] = 0.0
    hidden_states_folder: Annotated[
        Path | None, typer.Option(help="Cache them in a file there, not in memory.")
    ] = None
    float32: Annotated[bool, typer.Option(help="No bfloat16 autocast on a GPU.")] = False
    seed: Annotated[int, typer.Option(help="The same seed gives the same drafter.")] = 0
    resume: Annotated[bool, typer.Option(help="Continue the training in --out.")] = False
    plot: options.Plot = None

    def setup(self) -> TrainSetup:
        """Checks what can be checked before the work, and loads target and data."""
        from draftahead.bench.report import require_matplotlib
        from draftahead.loader.progress import terminal_progress
        from draftahead.train.setup import prepare

        if self.plot is not None:
            require_matplotlib()
            options.check_writable(self.plot)
        options.check_folder(self.out)
        if self.hidden_states_folder is not None and not self.cache_hidden_states:
            raise ConfigError("--hidden-states-folder needs a size: give --cache-hidden-states GB")
        with terminal_progress() as progress:
            progress("loading torch and transformers")
            return prepare(
                self.model,
                self.data,
                self.held_out,
                dtype=self.dtype,
                device=self.device,
                seed=self.seed,
                progress=progress,
            )

    def held_out_batches(self, setup: TrainSetup, aux_layers: tuple[int, ...]) -> TrainBatches:
        from draftahead.train.batches import TrainBatches

        return TrainBatches(
            setup.held_out,
            setup.model,
            aux_layers,
            tokens=self.tokens,
            max_length=self.max_length,
        )

    def train(
        self, setup: TrainSetup, task: TrainTask, aux_layers: tuple[int, ...], method: str
    ) -> None:
        """Trains, and reports acceptance and speed-up. `method`: the drafter's name."""
        from draftahead.train.batches import TrainBatches
        from draftahead.train.loop import TrainConfig, TrainLoop

        names = ("steps", "lr", "warmup", "accumulate", "ema_decay", "eval_interval", "patience")
        same = {name: getattr(self, name) for name in (*names, "seed")}
        config = TrainConfig(bfloat16=not self.float32, **same)
        cache_bytes, folder = round(self.cache_hidden_states * 1e9), self.hidden_states_folder
        batches = TrainBatches(
            setup.train,
            setup.model,
            aux_layers,
            tokens=self.tokens,
            max_length=self.max_length,
            seed=self.seed,
            # Each process has its own memory, but all share one disk.
            cache_bytes=cache_bytes if folder is None else cache_bytes // setup.shard[1],
            cache_folder=folder,
            shard=setup.shard,
        )
        is_main = setup.processes.is_main_process
        notes = options.notes_console(quiet=not is_main)
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
            log=notes.print,
            data_digest=setup.data_digest,
        )
        history = loop.run(resume=self.resume)
        setup.processes.destroy_process_group()
        if is_main:
            self._report(setup, history, method)

    def _report(self, setup: TrainSetup, history: History, method: str) -> None:
        from draftahead.train.estimate import measure_steps
        from draftahead.train.plot import draw

        best = max(range(len(history.lengths)), key=history.lengths.__getitem__)
        typer.echo(f"{self.out}: acceptance length {history.lengths[best]:.3f} on held-out texts")
        key = "adapter" if method == "early_exit" else "model"
        drafter = {"method": method, key: str(self.out)}
        speedups = None
        try:
            depth = len(history.by_depth[best])
            estimate = measure_steps(setup.model, drafter, setup.held_out, depth)
            typer.echo(estimate.describe(history.by_depth[best]))
            speedups = [estimate.best(by_depth)[0] for by_depth in history.by_depth]
        except DraftaheadError as problem:  # the trained files are complete all the same
            typer.echo(f"no estimate of the speed-up: {problem}")
        if self.plot is not None:
            draw(history, self.plot, speedups)


@app.command()
@options.grouped
def eagle(
    training: TrainOptions,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the head.")] = 1,
    intermediate_size: IntermediateSize = None,
    aux_layers: Annotated[
        str | None,
        typer.Option(help="Layers whose hidden states it reads; unset: 2,L/2,L-3 of L layers."),
    ] = None,
    draft_vocabulary: Annotated[
        int, typer.Option(min=1, help="Most frequent tokens that it can draft.")
    ] = 16384,
    train_lm_head: Annotated[bool, typer.Option(help="Train its lm_head weights, too.")] = False,
    depth: Annotated[int, typer.Option(min=1, help="Drafted tokens of a chain.")] = 5,
    depth_decay: DepthDecay = 0.8,
) -> None:
    """Train an EAGLE-3 head, unrolled over its own outputs."""
    from draftahead.drafters.eagle.head import new_head
    from draftahead.models.support import text_config
    from draftahead.train.eagle import EagleTask

    setup = training.setup()
    num_layers = int(text_config(setup.model).num_hidden_layers)
    chosen = {2, num_layers // 2, num_layers - 3}
    if aux_layers is not None:
        chosen = set(options.split_numbers("--aux-layers", aux_layers))
    aux = tuple(sorted(chosen))
    tokens = setup.most_frequent_tokens(draft_vocabulary)
    head = new_head(setup.model, tokens, depths=aux, layers=layers, inner=intermediate_size)
    task = EagleTask(
        head,
        setup.model,
        training.held_out_batches(setup, aux),
        depth=depth,
        depth_decay=depth_decay,
        train_lm_head=train_lm_head,
        name=training.model,
    )
    training.train(setup, task, aux, "eagle")


@app.command()
@options.grouped
def medusa(
    training: TrainOptions,
    heads: Annotated[int, typer.Option(min=1, help="Heads: how many tokens ahead.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Residual blocks of a head.")] = 1,
    draft_vocabulary: DraftVocabulary = None,
    depth_decay: DepthDecay = 0.8,
) -> None:
    """Train Medusa heads, and choose their draft tree."""
    from draftahead.drafters.medusa.heads import new_heads
    from draftahead.train.medusa import MedusaTask

    setup = training.setup()
    tokens = None if draft_vocabulary is None else setup.most_frequent_tokens(draft_vocabulary)
    made = new_heads(setup.model, heads, layers=layers, tokens=tokens)
    held_out = training.held_out_batches(setup, ())  # the last hidden states are always there
    task = MedusaTask(made, setup.model, held_out, depth_decay=depth_decay, name=training.model)
    training.train(setup, task, (), "medusa")


@app.command()
@options.grouped
def exit(
    training: TrainOptions,
    layer: Annotated[int, typer.Option(help="Exit after so many layers of the target.")],
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 256,
    draft_vocabulary: DraftVocabulary = None,
    depth: Depth = 4,
) -> None:
    """Train an adapter for early_exit, which drafts with the target's first layers."""
    from draftahead.drafters.early_exit.adapter import new_adapter
    from draftahead.train.exit import ExitTask

    setup = training.setup()
    tokens = None if draft_vocabulary is None else setup.most_frequent_tokens(draft_vocabulary)
    adapter = new_adapter(setup.model, layer, rank=rank, tokens=tokens)
    held_out = training.held_out_batches(setup, (layer,))
    task = ExitTask(adapter, setup.model, held_out, depth=depth)
    training.train(setup, task, (layer,), "early_exit")


@app.command()
@options.grouped
def distill(
    training: TrainOptions,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the draft model.")],
    hidden_size: Annotated[int | None, typer.Option(min=1, help="Unset: the target's.")] = None,
    intermediate_size: IntermediateSize = None,
    num_heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads; unset: in proportion.")
    ] = None,
    num_kv_heads: Annotated[
        int | None, typer.Option(min=1, help="KV heads; unset: in proportion.")
    ] = None,
    depth: Depth = 5,
) -> None:
    """Train a small draft model of the target's architecture and vocabulary."""
    from draftahead.train.distill import DistillTask, new_draft_model

    setup = training.setup()
    draft = new_draft_model(
        setup.model,
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    held_out = training.held_out_batches(setup, ())
    task = DistillTask(draft, setup.model, held_out, tokenizer=setup.tokenizer, depth=depth)
    training.train(setup, task, (), "draft_model")


# ------------------------------------------------------------------------------------ export


@app.command()
@options.grouped
def export(
    model: options.ModelOptions,
    head: Annotated[str, typer.Option(help="Folder, file or hub id of a trained head.")],
    out: Out,
) -> None:
    """Write an EAGLE head or Medusa heads with their lm_head weights, for other servers."""
    from draftahead.train.export import export_head

    target, _ = model.load()
    typer.echo(f"{out}: {export_head(head, target, out, name=model.model)}")
