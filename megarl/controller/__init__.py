"""The one process that leads a run: Ray, worker groups, the trainer's loop."""
