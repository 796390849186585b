"""One declarative parameter map a model family, Hugging Face ↔ Megatron. Knows names and shapes, not processes."""
