"""`megarl plan`: what a configuration needs on some machines, phase by phase, without starting anything."""
