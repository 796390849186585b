"""A user's own advantage and policy loss, and the configuration that names them."""
