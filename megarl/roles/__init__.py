"""What a rank hosts: the actor with the roles on its ranks, or a role that has ranks of its own."""
