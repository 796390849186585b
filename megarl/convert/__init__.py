"""Conversion between Hugging Face folders and Megatron's torch_dist checkpoints; docs/conversion.md."""
