"""Checkpoints whose tensors lie in parts on the ranks: torch's DTensors, of fully_shard and others."""
