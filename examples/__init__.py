"""Short scripts that run, one a use."""
