"""Inner products of per-sample gradients, computed without holding the gradients."""
