"""Options of `mpiddp train` that contradict each other: the error says why, and which to leave out."""

from __future__ import annotations

from argparse import Namespace

from mpiddp.errors import UserError
from mpiddp.train.data.datasets import DATASETS


def refuse_contradictions(options: Namespace) -> None:
    """Raise UserError for the first two of these options that contradict each other.

    Args:
        options: as parsed; the fields of `TrainOptions`.
    """
    if options.batch_size and options.global_batch_size:
        raise UserError("--batch-size and --global-batch-size are mutually exclusive. Give one.")
    images = "--use-syn" if options.use_syn else f"--dataset {options.dataset}"
    if options.max_shift is not None and (options.use_syn or not DATASETS[options.dataset].layouts):
        raise UserError(
            f"--max-shift shifts images of CIFAR-10 and its like, not those of {images}. Leave "
            "one out."
        )
    if options.profile is None and options.profile_ranks != "0":
        raise UserError(
            "--profile-ranks needs --profile FIRST:LAST. Add it, or leave this one out."
        )
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
        _refuse_with_shards(options)


def _refuse_with_shards(options: Namespace) -> None:
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
    if options.optimizer == "muon":
        raise UserError(
            f"--optimizer muon needs whole convolutions, which {sharded} does not have. Leave "
            "one out."
        )
    if options.sync_bn:
        raise UserError(f"--sync-bn and {sharded} are mutually exclusive. Leave one out.")
    if options.check_divergence and options.parallel == "fsdp":
        raise UserError(
            f"--check-divergence has nothing to compare with {sharded}: each rank has its own shard of every "
            "tensor. Leave one out, or use --parallel hsdp, which has a copy of the model on "
            "every host."
        )
