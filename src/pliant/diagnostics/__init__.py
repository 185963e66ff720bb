"""What a network says about itself: pure measures, and the probes that feed them from a live model."""
