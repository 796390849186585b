"""Weights from the trainer's ranks into the engines, through shared memory, proved to have arrived."""
