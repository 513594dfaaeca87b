"""The options of `mpiddp train`: parsed, checked and frozen, as the user wrote them.

`mpiddp.train.config` derives the configuration of a run from them. This module does not import torch,
so --help and option errors appear at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddp.arguments import Requests
from mpiddp.checkpoints.save_schedule import Interval
from mpiddp.errors import UserError
from mpiddp.train.option_parser import option_parser


@dataclass(frozen=True)
class TrainOptions:
    """Every option of the command line. None: the user did not set it."""

    arch: str | None
    stem: str
    weights: str | None
    dataset: str
    data_dir: str | None
    use_syn: bool
    image_size: int | None
    num_workers: int
    cache: str
    skip_broken: int  # images of a folder, per rank
    batch_size: int | None  # images per rank and backward pass, the largest
    global_batch_size: int | None
    uneven: bool
    grad_accum_steps: int
    keep_tail: bool
    epochs: int | None
    steps_per_epoch: int | None
    lr: float
    lr_scaling: bool
    schedule: str
    warmup_epochs: float | None
    momentum: float
    weight_decay: float
    label_smoothing: float
    clip_grad_norm: float | None
    parallel: str
    sync_bn: bool
    amp: str
    channels_last: bool
    compile: str  # "off" or one of COMPILE_MODES
    bucket_mb: int  # MiB of gradients per all-reduce
    grad_compression: str
    seed: int
    deterministic: bool
    backend: str | None
    timeout: float  # seconds
    out: str | None
    resume: str
    save_every: Interval | None  # None: once an epoch
    keep: int
    on_save_error: str
    log_every: int  # steps
    per_rank_log: bool
    stop_at_step: int | None
    check_determinism: int | None  # steps of each of its two runs
    check_divergence: int | None  # steps between two checks


def parse(argv: list[str]) -> TrainOptions:
    """The options as written. --use_syn and --use-syn are the same option.

    Raises:
        UserError: unknown options, or values out of range.
    """
    values = vars(option_parser().parse_args([_dashed(argument) for argument in argv]))
    values.pop("local_rank")
    options = TrainOptions(**values)
    if options.batch_size and options.global_batch_size:
        raise UserError("--batch-size and --global-batch-size are mutually exclusive. Give one.")
    if options.keep_tail and options.sync_bn:
        raise UserError(
            "--keep-tail and --sync-bn are mutually exclusive: some ranks may have no images in the "
            "last batch. Leave one out."
        )
    if options.check_determinism and options.resume not in ("auto", "never"):
        raise UserError(
            "--check-determinism starts from fresh weights, so --resume PATH does not apply. Leave it "
            "out; --weights FILE gives it weights."
        )
    if options.parallel != "ddp":
        _check_sharded(options)
    return options


def _check_sharded(options: TrainOptions) -> None:
    """Raise UserError for the options that shards do not have."""
    sharded = f"--parallel {options.parallel}"
    if options.compile != "off":
        raise UserError(
            f"--compile and {sharded} are mutually exclusive: the shards are gathered between the "
            "layers, outside of the compiled graph. Leave one out."
        )
    if options.grad_compression != "off":
        raise UserError(
            f"--grad-compression {options.grad_compression} is a hook of DistributedDataParallel, "
            f"which {sharded} replaces. Leave one out."
        )
    if options.sync_bn:
        raise UserError(f"--sync-bn and {sharded} are mutually exclusive. Leave one out.")
    if options.check_divergence and options.parallel == "fsdp":
        raise UserError(
            f"--check-divergence has nothing to compare with {sharded}: each rank has its own shard of every "
            "tensor. Leave one out, or use --parallel hsdp, which has a copy of the model on every host."
        )


def check_options(argv: list[str]) -> Requests:
    """Check the options before a job starts, and return what they request of the launcher.

    Raises:
        UserError: as `parse`.
    """
    options = parse(argv)
    return Requests(options.backend or "auto", shows_all_ranks=options.per_rank_log)


def _dashed(argument: str) -> str:
    """--use_syn=1 to --use-syn=1; the value keeps its underscores."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
