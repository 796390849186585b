"""What a rank hosts: the actor and, where a recipe has one, the reference."""
