"""Sampling with SGLang: everything that imports it, but for what a CPU needs."""
