"""Hybrid parallelism: which ranks share a layer, a replica or a stage, and what their links carry."""
