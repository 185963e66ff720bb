"""What a model is: how its parameters' scales hang together, and which unit feeds which."""
