"""One file a family: a module here that holds a `Family` is found by itself."""
